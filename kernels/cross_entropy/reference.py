"""Cross entropy over a slice of the vocabulary: the specification (torch only), in the two steps between which tensor
parallel ranks exchange three numbers per token.

Letters: T tokens, V the vocabulary entries in this slice; `first` is the global index of the slice's first entry.
"""

import torch
from torch import Tensor

from ..cost import Cost


def slice_statistics(logits: Tensor, targets: Tensor, first: int, valid: int) -> Tensor:
    """Per token, over this slice: maximum, sum of exp(logit - maximum), and the target's logit (0 if elsewhere).

    Shapes:   logits (T, V); targets (T,) int64 global ids; result (3, T) in promote_types(logits.dtype, float32).
              Entries from `valid` on are padding: they take no part. A slice with valid = 0 gives (-inf, 0, 0).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    result = torch.zeros(3, len(logits), dtype=dtype, device=logits.device)
    if valid == 0:
        result[0] = -torch.inf
        return result
    wide = logits[:, :valid].to(dtype)
    result[0] = wide.amax(-1)
    result[1] = (wide - result[0][:, None]).exp_().sum(-1)
    local = targets - first
    here = (local >= 0) & (local < valid)
    picked = wide.gather(1, local.clamp(0, valid - 1)[:, None])[:, 0]
    result[2] = torch.where(here, picked, 0)
    return result


def combine_statistics(parts: Tensor) -> tuple[Tensor, Tensor]:
    """From every slice's (slices, 3, T): log-sum-exp (T,) and loss (T,) = logsumexp - target logit, in slice order."""
    maximum = parts[:, 0].amax(0)
    log_sum = (parts[:, 1] * (parts[:, 0] - maximum).exp()).sum(0).log()
    # maximum - target first: adding a large maximum to log_sum would round log_sum away
    return log_sum + maximum, log_sum + (maximum - parts[:, 2].sum(0))


def slice_gradient(
    logits: Tensor, targets: Tensor, log_sum: Tensor, scale: Tensor | float, first: int, valid: int
) -> Tensor:
    """dlogits (T, V) = scale * (softmax - onehot(target)), zero in the padding.

    Shapes:   scale a number or (T, 1): the upstream gradient, 0 for ignored tokens; result in logits.dtype
    Source:   Megatron's vocab-parallel cross entropy (arXiv:1909.08053, section 3), written from its formula
    """
    gradient = (logits.to(log_sum.dtype) - log_sum[:, None]).exp_()
    gradient[:, valid:] = 0
    local = targets - first
    rows = ((local >= 0) & (local < valid)).nonzero()[:, 0]
    gradient[rows, local[rows]] -= 1
    return gradient.mul_(scale).to(logits.dtype)


def cross_entropy_cost(tokens: int, vocab: int, itemsize: int, backward: bool = False) -> Cost:
    """Forward reads the logits once and writes three numbers per token; backward reads them and writes as much."""
    logits = tokens * vocab * itemsize
    return Cost((4 if backward else 5) * tokens * vocab, (2 * logits if backward else logits) + 12 * tokens)

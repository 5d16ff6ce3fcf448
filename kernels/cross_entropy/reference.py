"""Cross entropy over a slice of the vocabulary: the specification (torch only), in the steps between which tensor
parallel ranks exchange three numbers per token.

Letters: T tokens, V the vocabulary entries in this slice (0 for one of padding only); `first` is the global index of
the slice's first entry. Wide dtype: promote_types(logits.dtype, float32).
"""

import torch
from torch import Tensor

from ..cost import Cost


def slice_statistics(logits: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Per token: maximum, sum of exp(logit - maximum), the target's logit (0 if elsewhere); and the exponentials.

    Shapes:   logits (T, V); targets (T,) int64 global ids; results (3, T) and (T, V) in the wide dtype. An empty slice
              gives (-inf, 0, 0).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if wide.shape[1] == 0:
        nothing = wide.new_zeros(len(wide))
        return torch.stack([nothing - torch.inf, nothing, nothing]), wide
    maximum = wide.amax(-1)
    exponentials = (wide - maximum[:, None]).exp_()
    local, here = _target(targets, first, wide.shape[1])
    target = torch.where(here, wide.gather(1, local)[:, 0], 0)
    return torch.stack([maximum, exponentials.sum(-1), target]), exponentials


def combine_statistics(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum of exp(logit - maximum) and loss, each (T,), from all slices' statistics (slices, 3, T) in order."""
    maximum = parts[:, 0].amax(0)
    total = (parts[:, 1] * (parts[:, 0] - maximum).exp()).sum(0)
    # maximum - target first: the logarithm must not be rounded away by a large maximum
    return maximum, total, total.log() + (maximum - parts[:, 2].sum(0))


def slice_gradient(exponentials: Tensor, factor: Tensor, targets: Tensor, scale: Tensor, first: int) -> Tensor:
    """dlogits (T, V) = scale * (exponentials * factor - onehot(target)), in the memory of exponentials.

    Shapes:   exponentials (T, V), exp(logit - m) for some m (T,); factor (T,), exp(m - maximum) / total, so that the
              product is the softmax; scale (T,), the upstream gradient, 0 for ignored tokens; all in the wide dtype
    Source:   Megatron's vocab-parallel cross entropy (arXiv:1909.08053, section 3), written from its formula
    """
    gradient = exponentials.mul_((factor * scale)[:, None])
    if gradient.shape[1] == 0:
        return gradient
    local, here = _target(targets, first, gradient.shape[1])
    return gradient.scatter_add_(1, local, -(scale * here)[:, None])


def _target(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Each target's column (T, 1) in this slice, clamped, and whether it is there (T,)."""
    local = targets - first
    return local.clamp(0, size - 1)[:, None], (local >= 0) & (local < size)


def cross_entropy_cost(tokens: int, vocab: int, itemsize: int, backward: bool = False) -> Cost:
    """Forward reads the logits once and writes three numbers per token; backward reads them and writes as much."""
    logits = tokens * vocab * itemsize
    return Cost((4 if backward else 5) * tokens * vocab, (2 * logits if backward else logits) + 12 * tokens)

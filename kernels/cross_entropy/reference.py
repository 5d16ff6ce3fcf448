"""Cross entropy of a vocabulary that tensor-parallel ranks hold in slices: the specification (torch only).

Steps: slice_statistics; the ranks exchange its result, three numbers per token, or four with label smoothing; then
combine_statistics and slice_gradient. Everything but the z-loss is computed from differences of logits, so a large
offset costs no precision. Letters: T tokens; V columns of the logits, the slice's entries and then padding, if any.
Wide dtype: promote_types(logits.dtype, float32).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cost import Cost
from ..operands import FLOATS, require, wide_dtype


class VocabSlice(NamedTuple):
    """The part of a vocabulary of `entries` entries that a rank holds: at most `width` of them, from `first` on.

    Slice s has first = s * width, so only the last slices may hold fewer than `width` entries, or none.
    """

    first: int
    width: int
    entries: int

    @property
    def valid(self) -> int:
        """How many entries the slice holds. Columns of logits after them are padding."""
        return max(0, min(self.width, self.entries - self.first))


IGNORE_INDEX = -100  # the target that torch.nn.functional.cross_entropy ignores


class LossTerms(NamedTuple):
    """loss = (1 - e) (lse - x_target) + e (lse - mean(x)) + z lse**2, and 0 where the target is ignore_index.

    lse is log(sum(exp(x))) over all entries, e is label_smoothing as torch.nn.functional.cross_entropy defines it, and
    z is z_loss.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def rows(self) -> int:
        """Numbers per token that slices exchange."""
        return 4 if self.label_smoothing else 3


Work = tuple[Tensor, Tensor]  # exp(logit - shift) (T, V), 0 in the padding; shift (T,), the maximum made finite


def check_operands(
    logits: Tensor, targets: Tensor, vocab: VocabSlice, normalisers: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """ValueError unless all have the shapes and dtypes that are given below, with a column for each entry."""
    tokens, of_tokens = logits.shape[0], (wide_dtype(logits.dtype),)
    require(
        "cross_entropy", logits, ("logits", logits, (tokens, max(logits.shape[-1], vocab.valid)), FLOATS),
        ("targets", targets, (tokens,), (torch.int64,)), ("normalisers", normalisers, (2, tokens), of_tokens),
        ("scale", scale, (tokens,), of_tokens),
    )  # fmt: skip


def check_parts(parts: Tensor, targets: Tensor, terms: LossTerms) -> None:
    """ValueError unless these are statistics and targets of combine_statistics."""
    slices, *_, tokens = parts.shape
    require(
        "cross_entropy", parts, ("statistics", parts, (slices, terms.rows, tokens), (torch.float32, torch.float64)),
        ("targets", targets, (tokens,), (torch.int64,)),
    )  # fmt: skip


def slice_statistics(
    logits: Tensor, targets: Tensor, vocab: VocabSlice, terms: LossTerms
) -> tuple[Tensor, Work | None]:
    """What other slices must know of this one for each token, and intermediate values that slice_gradient may use.

    Math:     maximum; sum of exp(logit - maximum); the target's logit, 0 if another slice holds it; with label
              smoothing the sum of maximum - logit. A slice without entries gives (-inf, 0, 0, 0). A slice whose logits
              are all -inf gives (-inf, 0, 0, inf)
    Shapes:   logits (T, V) with any row stride; targets (T,) int64 global ids; result (3 or 4, T), wide
    """
    check_operands(logits, targets, vocab)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nothing = wide.new_zeros(len(wide))
    if vocab.valid == 0:
        statistics = torch.stack([nothing - torch.inf, *[nothing] * (terms.rows - 1)])
        return statistics, (torch.zeros_like(wide), nothing)
    maximum = wide[:, : vocab.valid].amax(-1)
    shift = _finite(maximum)
    exponentials = torch.empty_like(wide)
    exponentials[:, vocab.valid :] = 0
    shifted = torch.sub(wide[:, : vocab.valid], shift[:, None], out=exponentials[:, : vocab.valid])
    deficit = [-shifted.sum(-1)] if terms.label_smoothing else []
    total = shifted.exp_().sum(-1)
    local, here = _target(targets, vocab)
    target = torch.where(here, wide.gather(1, local)[:, 0], nothing)
    return torch.stack([maximum, total, target, *deficit]), (exponentials, shift)


def combine_statistics(parts: Tensor, targets: Tensor, vocab: VocabSlice, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exp(logit - maximum) over the whole vocabulary, (2, T), and the losses (T,).

    Shapes:   parts (slices, 3 or 4, T), all slices' statistics in order; vocab: any slice's
    Numerics: a target outside the vocabulary makes the sum NaN, and with it loss and gradient. No slice holds such a
              target, so nothing else would show the mistake
    """
    check_parts(parts, targets, terms)
    maximum = parts[:, 0].amax(0)
    shift = _finite(maximum)
    total = (parts[:, 1] * (parts[:, 0] - shift).exp()).sum(0)
    ignored = targets == terms.ignore_index
    total = total.masked_fill(~ignored & ((targets < 0) | (targets >= vocab.entries)), torch.nan)
    # maximum - target first: the logarithm must not be rounded away by a large maximum
    loss = shift - parts[:, 2].sum(0)
    if terms.label_smoothing:
        starts = torch.arange(len(parts), device=parts.device)[:, None] * vocab.width
        sizes = (vocab.entries - starts).clamp(0, vocab.width)
        raised = torch.where(sizes > 0, sizes * (shift - _finite(parts[:, 0])), 0)
        deficit = (parts[:, 3] + raised).sum(0)
        loss = (1 - terms.label_smoothing) * loss + terms.label_smoothing / vocab.entries * deficit
    loss = total.log() + loss
    if terms.z_loss:
        loss = loss + terms.z_loss * (shift + total.log()).square()
    return torch.stack([maximum, total]), loss.masked_fill(ignored, 0)


def slice_gradient(
    logits: Tensor,
    normalisers: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    vocab: VocabSlice,
    terms: LossTerms,
    *,
    work: Work | None = None,
    in_place: bool = False,
) -> Tensor:
    """dlogits (T, V), like logits: 0 in the padding and for ignored tokens.

    Math:     scale * (softmax * (1 + 2 z lse) - (1 - e) onehot(target) - e / entries)
    Shapes:   normalisers (2, T) of combine_statistics; scale (T,), the upstream gradient, None for ones
    Memory:   work, from slice_statistics, is overwritten; without it the exponentials are made again. in_place allows
              the result to take the logits' memory, as the kernel's does; this function's never does
    Source:   Megatron's vocab-parallel cross entropy (arXiv:1909.08053, section 3), label smoothing (arXiv:1512.00567),
              z-loss (PaLM, arXiv:2204.02311, section 5), written from their formulas
    """
    check_operands(logits, targets, vocab, normalisers, scale)
    maximum, total = _finite(normalisers[0]), normalisers[1]
    exponentials, shift = (None, maximum) if work is None else work
    counted = targets != terms.ignore_index
    scale = counted.to(total.dtype) if scale is None else scale.masked_fill(~counted, 0)
    factor = scale * (shift - maximum).exp() / total
    if terms.z_loss:
        factor = factor * (1 + 2 * terms.z_loss * (maximum + total.log()))
    factor = factor.masked_fill(~counted, 0)  # 0 / 0 in an ignored row whose logits are all -inf
    if exponentials is None:
        exponentials = torch.zeros_like(logits, dtype=total.dtype)
        torch.sub(logits[:, : vocab.valid], maximum[:, None], out=exponentials[:, : vocab.valid]).exp_()
    gradient = exponentials.mul_(factor[:, None])
    if vocab.valid:
        if terms.label_smoothing:
            gradient[:, : vocab.valid] -= (scale * (terms.label_smoothing / vocab.entries))[:, None]
        local, here = _target(targets, vocab)
        gradient.scatter_add_(1, local, -((1 - terms.label_smoothing) * scale * here)[:, None])
    return gradient.to(logits.dtype)


def _finite(maximum: Tensor) -> Tensor:
    """The maximum, with the least finite number in place of -inf, because -inf - -inf is NaN."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)


def _target(targets: Tensor, vocab: VocabSlice) -> tuple[Tensor, Tensor]:
    """Each target's column (T, 1) in this slice, clamped to it, and whether the slice holds the target (T,)."""
    local = targets - vocab.first
    return local.clamp(0, vocab.valid - 1)[:, None], (local >= 0) & (local < vocab.valid)


def cross_entropy_cost(tokens: int, vocab: int, itemsize: int, backward: bool = False) -> Cost:
    """The forward reads the logits and writes three float32 numbers per token. The backward reads them all and writes
    the gradient."""
    logits = tokens * vocab * itemsize
    return Cost((4 if backward else 5) * tokens * vocab, (2 * logits if backward else logits) + 12 * tokens)

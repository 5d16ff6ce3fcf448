"""Cross entropy over a slice of the vocabulary: the steps of reference.py, each one pass over logits as stored.

Belongs here: one program per token that walks its row of logits in blocks of columns. What a thread holds of a block is
reduced in the thread; threads meet once per row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_options
from ..replay import launch, replayed
from ..rows import row_argument, vectorised, with_contiguous_columns
from .reference import LossTerms, VocabSlice, check_operands, check_parts

LOWEST = tl.constexpr(-3.4028234663852886e38)  # float32's least number; in place of a maximum of -inf
VECTOR_BYTES = 16
VECTORS, SCALARS = 2, 8  # loads that a thread has in flight
WARPS = 8  # of a program whose row is long enough
BLOCKS = 4  # a row should have so many before a program gets more warps
COMBINE_TOKENS = 128  # tokens of one program of combine_statistics


@triton.jit
def block_columns(LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(LANES, VECTOR): the columns of a block, a thread's vector in each row."""
    return tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def update_statistics(x, maximum, total, deficit, seen, at, valid, LABEL_SMOOTHING: tl.constexpr, WHOLE: tl.constexpr):
    """Online softmax of each lane: its maximum, sum of exponentials and sum of maximum - logit after one more vector.

    seen: logits of the lane before. Sums are relative to max(maximum, LOWEST).
    """
    before = tl.maximum(maximum, LOWEST)
    maximum = tl.maximum(maximum, tl.max(x, 1))
    shift = tl.maximum(maximum, LOWEST)
    total = total * tl.exp(before - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
    if LABEL_SMOOTHING:
        differences = shift[:, None] - x
        if not WHOLE:
            differences = tl.where(at < valid, differences, 0.0)
        raised = tl.where(seen > 0, (shift - before) * seen, 0.0)  # before the first, LOWEST may be infinitely far
        deficit += raised + tl.sum(differences, 1)
    return maximum, total, deficit


@triton.jit(do_not_specialize=["tokens", "first"])
def slice_statistics_kernel(
    logits, targets, statistics, tokens, columns, valid, first,
    LABEL_SMOOTHING: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """statistics[:, token] of one program's token. Blocks that hold no padding take no mask."""
    BLOCK: tl.constexpr = LANES * VECTOR
    token = tl.program_id(0).to(tl.int64)
    row = logits.pointer + token * logits.stride
    at = block_columns(LANES, VECTOR)
    lanes = tl.arange(0, LANES)
    maximum = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    deficit = tl.zeros((LANES,), tl.float32)
    whole = valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(row + start + at).to(tl.float32)
        maximum, total, deficit = update_statistics(
            x, maximum, total, deficit, start // LANES, at, valid, LABEL_SMOOTHING, True
        )
    if whole < valid:
        # columns, not valid, bounds the load: a multiple of 16 keeps it 16 bytes wide
        x = tl.load(row + whole + at, mask=whole + at < columns, other=float("-inf")).to(tl.float32)
        x = tl.where(whole + at < valid, x, float("-inf"))
        maximum, total, deficit = update_statistics(
            x, maximum, total, deficit, whole // LANES, whole + at, valid, LABEL_SMOOTHING, False
        )
    shift = tl.maximum(maximum, LOWEST)
    highest = tl.max(maximum, 0)
    finite = tl.maximum(highest, LOWEST)
    local = tl.load(targets + token) - first
    here = (local >= 0) & (local < valid)
    target = tl.load(row + local, mask=here, other=0.0).to(tl.float32)
    tl.store(statistics + token, highest)
    tl.store(statistics + tokens + token, tl.sum(total * tl.exp(shift - finite), 0))
    tl.store(statistics + 2 * tokens + token, target)
    if LABEL_SMOOTHING:
        seen = whole // LANES + tl.minimum(tl.maximum(valid - whole - lanes * VECTOR, 0), VECTOR)
        deficit += tl.where(seen > 0, (finite - shift) * seen, 0.0)
        tl.store(statistics + 3 * tokens + token, tl.sum(deficit, 0))


@triton.jit(do_not_specialize=["tokens", "slices", "width", "entries"])
def combine_statistics_kernel(
    parts, targets, normalisers, losses, tokens, slices, width, entries, terms,
    LABEL_SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """normalisers (2, tokens) and losses (tokens,) of one block of tokens, from parts (slices, 3 or 4, tokens)."""
    ROWS: tl.constexpr = 4 if LABEL_SMOOTHING else 3
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    parts += token
    maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
    for index in range(slices):
        maximum = tl.maximum(maximum, tl.load(parts + index * ROWS * tokens, mask=mask, other=0.0))
    shift = tl.maximum(maximum, LOWEST)
    total = tl.zeros((BLOCK,), tl.float32)
    target = tl.zeros((BLOCK,), tl.float32)
    deficit = tl.zeros((BLOCK,), tl.float32)
    for index in range(slices):
        part = parts + index * ROWS * tokens
        own = tl.load(part, mask=mask, other=0.0)
        total += tl.load(part + tokens, mask=mask, other=1.0) * tl.exp(own - shift)
        target += tl.load(part + 2 * tokens, mask=mask, other=0.0)
        if LABEL_SMOOTHING:
            size = tl.minimum(tl.maximum(entries - index * width, 0), width)
            deficit += tl.load(part + 3 * tokens, mask=mask, other=0.0)
            if size > 0:
                deficit += (shift - tl.maximum(own, LOWEST)) * size
    index = tl.load(targets + token, mask=mask, other=0)
    ignored = index == terms.ignore_index
    total = tl.where(ignored | ((index >= 0) & (index < entries)), total, float("nan"))
    loss = shift - target  # first: the logarithm must not be rounded away by a large maximum
    if LABEL_SMOOTHING:
        loss = (1.0 - terms.label_smoothing) * loss + terms.label_smoothing / entries * deficit
    logarithm = tl.log(total)
    lse = shift + logarithm
    loss = logarithm + loss + (terms.z_loss * lse) * lse
    tl.store(normalisers + token, maximum, mask=mask)
    tl.store(normalisers + tokens + token, total, mask=mask)
    tl.store(losses + token, tl.where(ignored, 0.0, loss), mask=mask)


@triton.jit(do_not_specialize=["tokens", "first", "entries"])
def slice_gradient_kernel(
    logits, dlogits, normalisers, targets, scale, tokens, columns, valid, first, entries, terms,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program's row of dlogits, which may be that of logits: a thread reads a vector before it writes there."""
    BLOCK: tl.constexpr = LANES * VECTOR
    token = tl.program_id(0).to(tl.int64)
    row, drow = logits.pointer + token * logits.stride, dlogits.pointer + token * dlogits.stride
    at = block_columns(LANES, VECTOR)
    index = tl.load(targets + token)
    local = (index - first).to(tl.int32)
    maximum = tl.maximum(tl.load(normalisers + token), LOWEST)
    total = tl.load(normalisers + tokens + token)
    upstream = tl.load(scale + token) if scale is not None else 1.0
    counted = index != terms.ignore_index
    factor = tl.where(counted, upstream / total * (1.0 + 2.0 * terms.z_loss * (maximum + tl.log(total))), 0.0)
    upstream = tl.where(counted, upstream, 0.0)
    onehot, uniform = (1.0 - terms.label_smoothing) * upstream, terms.label_smoothing / entries * upstream
    whole = valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        # an ignored row is not read: exp(-inf) is the 0 that is wanted
        x = tl.load(row + start + at, mask=counted, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - maximum) * factor - uniform
        gradient -= tl.where(start + at == local, onehot, 0.0)
        tl.store(drow + start + at, gradient.to(dlogits.pointer.dtype.element_ty))
    for start in range(whole, columns, BLOCK):
        inside = start + at < columns
        x = tl.load(row + start + at, mask=inside & counted, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - maximum) * factor - uniform
        gradient -= tl.where(start + at == local, onehot, 0.0)
        gradient = tl.where(start + at < valid, gradient, 0.0)
        tl.store(drow + start + at, gradient.to(dlogits.pointer.dtype.element_ty), mask=inside)


def block_options(logits: Tensor) -> dict[str, int]:
    """LANES, VECTOR and the launch's options: as many warps as a row of logits has work for."""
    wide = vectorised(logits.shape[1]) and vectorised(logits.stride(0))
    vector = VECTOR_BYTES // logits.element_size() if wide else 1
    lanes = 32 * (VECTORS if wide else SCALARS)
    warps = min(WARPS, triton.next_power_of_2(triton.cdiv(max(1, logits.shape[1]), BLOCKS * lanes * vector)))
    return {"LANES": warps * lanes, "VECTOR": vector, **launch_options(warps, 1)}


@replayed
def slice_statistics(logits: Tensor, targets: Tensor, vocab: VocabSlice, terms: LossTerms) -> tuple[Tensor, None]:
    """(statistics, None): what other slices must know of this one. slice_gradient reads the logits again.

    Math:     slice_statistics of reference.py
    Shapes:   logits (T, V) bf16|fp16|fp32, of any row stride, only read; targets (T,) int64; result (3 or 4, T) float32
    Numerics: float32; online softmax per lane of a block, lanes merged at the end of the row, always in one order
    Traffic:  the logits once; in 16-byte loads if V and the row stride are multiples of 16 and the memory is aligned
    Order:    one program per token, no communication, deterministic
    Source:   online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867)
    """
    check_operands(logits, targets, vocab)
    tokens, columns = logits.shape
    statistics = torch.empty(terms.rows, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        logits = with_contiguous_columns(logits)
        launch(
            slice_statistics_kernel, (tokens,),
            row_argument(logits), targets.contiguous(), statistics, tokens, columns, vocab.valid, vocab.first,
            LABEL_SMOOTHING=bool(terms.label_smoothing), **block_options(logits),
        )  # fmt: skip
    return statistics, None


@replayed
def combine_statistics(parts: Tensor, targets: Tensor, vocab: VocabSlice, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exp(logit - maximum) over the whole vocabulary, (2, T), and the losses (T,).

    Math:     combine_statistics of reference.py
    Shapes:   parts (slices, 3 or 4, T) float32, all slices' statistics in order; targets (T,) int64; results float32
    Numerics: float32, slices added in their order
    Traffic:  small against the logits: reads 12 or 16 bytes per token and slice and 8 per target, writes 12 per token
    Order:    programs of 128 tokens, no communication, deterministic
    Source:   as in reference.py
    """
    check_parts(parts, targets, terms)
    slices, _, tokens = parts.shape
    normalisers, losses = parts.new_empty(2, tokens), parts.new_empty(tokens)
    if tokens:
        launch(
            combine_statistics_kernel, (triton.cdiv(tokens, COMBINE_TOKENS),),
            parts.contiguous(), targets.contiguous(), normalisers, losses,
            tokens, slices, vocab.width, vocab.entries, terms,
            LABEL_SMOOTHING=bool(terms.label_smoothing), BLOCK=COMBINE_TOKENS, **launch_options(4, 1),
        )  # fmt: skip
    return normalisers, losses


@replayed
def slice_gradient(
    logits: Tensor,
    normalisers: Tensor,
    targets: Tensor,
    scale: Tensor | None,
    vocab: VocabSlice,
    terms: LossTerms,
    *,
    work: None = None,
    in_place: bool = False,
) -> Tensor:
    """dlogits (T, V), like logits: 0 in the padding and for ignored tokens.

    Math:     slice_gradient of reference.py
    Shapes:   logits (T, V) bf16|fp16|fp32; normalisers (2, T) and scale (T,) float32, scale None for ones.
              in_place: the result is the logits' memory, else contiguous memory of its own
    Numerics: float32 between load and store: one rounding
    Traffic:  reads the logits of tokens that are not ignored once, and writes dlogits; 16 bytes at a time as in
              slice_statistics
    Order:    one program per token, no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(logits, targets, vocab, normalisers, scale)
    tokens, columns = logits.shape
    logits = with_contiguous_columns(logits)
    dlogits = logits if in_place else logits.new_empty(tokens, columns)
    if dlogits.numel():
        launch(
            slice_gradient_kernel, (tokens,),
            row_argument(logits), row_argument(dlogits), normalisers.contiguous(), targets.contiguous(),
            None if scale is None else scale.contiguous(),
            tokens, columns, vocab.valid, vocab.first, vocab.entries, terms, **block_options(logits),
        )  # fmt: skip
    return dlogits

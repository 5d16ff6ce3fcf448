"""Dropout, and the bias and the residual that a row-parallel linear adds beside it: the specification (torch only).

The mask is never stored: every pass draws it again.
"""

import torch
from torch import Tensor

from ..cast import cast
from ..cost import Cost
from ..finish import Dropout, Finish
from ..philox.reference import random_words
from ..quantize import reference as quantize
from ..quantize.format import Blocks, blocks_bytes


def _zero_dropped(scaled: Tensor, dropout: Dropout) -> Tensor:
    """Zero the elements that dropout drops, in place."""
    words = random_words(dropout.key, dropout.start, scaled.shape[-1])
    return scaled.masked_fill_(words < dropout.threshold, 0)


def dropout_apply(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1 / (1 - p). It is its own backward.

    Math:     y[m, n] = x[m, n] / (1 - p) where word(key, start[m] + n) >= p * 2**32, else 0
    Shapes:   x (M, N); start (M,) int64, the global index of each row's first element; y like x
    Numerics: exact zeros; one multiplication in x.dtype
    Traffic:  see dropout_cost; no mask in memory between forward and backward
    Source:   Philox (kernels/philox); the mask compares 32-bit words as integers
    """
    dropout = Dropout(start, key, p)
    Finish(dropout=dropout).check("dropout", x)
    return _zero_dropped(x * dropout.scale, dropout)


def finish_forward(x: Tensor, finish: Finish) -> Tensor:
    """residual + dropout(x + bias), with the parts that are given; x itself if none is. finish.norm is not applied.

    Shapes:   x (M, N), whose memory the result may take; finish as in kernels/finish.py. row_linear and experts have
              checked them, before they sent anything; launchers, whose checks cost a replay nothing, do it again
    Numerics: in promote_types(x.dtype, float32), rounded once to x.dtype
    Traffic:  see finish_cost
    """
    if not finish.adds:
        return x
    y = cast(x, torch.promote_types(x.dtype, torch.float32))
    if finish.bias is not None:
        y += finish.bias
    if finish.dropout is not None:
        _zero_dropped(y.mul_(finish.dropout.scale), finish.dropout)
    if finish.residual is not None:
        y += finish.residual
    return cast(y, x.dtype)


def finish_backward(
    dz: Tensor, dropout: Dropout | None, bias: bool, *, blocks: bool = False
) -> tuple[Tensor | Blocks, Tensor | None]:
    """(dx, dbias or None) of finish_forward; the residual's gradient is dz itself. blocks: dx by quantize_rows.

    Math:     dx = dropout(dz), or dz itself without dropout; dbias, if `bias`, is the sum over rows of the rounded dx,
              never of its blocks
    Shapes:   dz, dx (M, N); dbias (N,)
    Numerics: dx as dropout_apply; dbias accumulated in at least float32, rounded once to dz.dtype
    Traffic:  see finish_cost
    """
    dx = dz if dropout is None else dropout_apply(dz, *dropout)
    return quantize.quantize_rows(dx) if blocks else dx, dx.sum(0) if bias else None


def dropout_cost(m: int, n: int, itemsize: int) -> Cost:
    """x is read, y is written. The integer operations of Philox, about 20 per element, do not count as flops."""
    return finish_cost(m, n, itemsize, dropout=True)


def finish_cost(
    m: int, n: int, itemsize: int, *, bias: bool = False, dropout: bool = False, residual: bool = False,
    backward: bool = False, blocks: bool = False,
) -> Cost:  # fmt: skip
    """Forward reads x, the residual and the bias, and writes z. Backward reads dz, and writes dbias and, with dropout,
    dx, or with `blocks`, also without dropout, dx in blocks of e4m3. With dropout both read 8 bytes per row, its start.
    """
    rows = (1 + (dropout and not blocks) if backward else 2 + residual) * m * n
    flops = (bias + dropout + (residual and not backward) + 2 * blocks) * m * n
    written = blocks_bytes(m, n) if blocks else 0
    return Cost(flops, (rows + bias * n) * itemsize + dropout * 8 * m + written)

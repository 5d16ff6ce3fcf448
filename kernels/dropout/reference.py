"""Dropout whose mask is drawn again wherever it is needed, never stored, and what a row-parallel linear adds beside it:
the specification (torch only)."""

import torch
from torch import Tensor

from ..cast import cast
from ..cost import Cost
from ..finish import Dropout, Finish
from ..philox.reference import random_words


def _zero_dropped(scaled: Tensor, dropout: Dropout) -> Tensor:
    """Zero the elements that dropout drops, in place."""
    words = random_words(dropout.key, dropout.start, scaled.shape[-1])
    return scaled.masked_fill_(words < dropout.threshold, 0)


def dropout_apply(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1 / (1 - p); its own backward.

    Math:     y[m, n] = x[m, n] / (1 - p) where word(key, start[m] + n) >= p * 2**32, else 0
    Shapes:   x (M, N); start (M,) int64, the global index of each row's first element; y like x
    Numerics: exact zeros; one multiplication in x.dtype
    Traffic:  see dropout_cost; no mask in memory between forward and backward
    Source:   Philox (kernels/philox); mask by comparison of the 32-bit word, as integers
    """
    dropout = Dropout(start, key, p)
    return _zero_dropped(x * dropout.scale, dropout)


def finish_forward(x: Tensor, finish: Finish) -> Tensor:
    """residual + dropout(x + bias), whichever of them are given (finish.norm is not looked at); else x itself.

    Shapes:   x (M, N), which may be overwritten: the result can take its place; finish as in kernels/finish.py
    Numerics: in promote_types(x.dtype, float32), rounded once to x.dtype
    Traffic:  see finish_cost
    """
    if finish.bias is None and finish.dropout is None and finish.residual is None:
        return x
    y = cast(x, torch.promote_types(x.dtype, torch.float32))
    if finish.bias is not None:
        y += finish.bias
    if finish.dropout is not None:
        _zero_dropped(y.mul_(finish.dropout.scale), finish.dropout)
    if finish.residual is not None:
        y += finish.residual
    return cast(y, x.dtype)


def finish_backward(dz: Tensor, dropout: Dropout | None, bias: bool) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias or None) of finish_forward; the residual's gradient is dz.

    Math:     dx = dropout(dz), dz itself without dropout; dbias = sum_m dx as rounded, if `bias`
    Shapes:   dz, dx (M, N); dbias (N,)
    Numerics: dx as dropout_apply; dbias accumulated in at least float32, rounded once to dz.dtype
    Traffic:  see finish_cost
    """
    dx = dz if dropout is None else dropout_apply(dz, *dropout)
    return dx, dx.sum(0) if bias else None


def dropout_cost(m: int, n: int, itemsize: int) -> Cost:
    """x in, y out; about 20 integer operations per element for Philox are not counted as flops."""
    return finish_cost(m, n, itemsize, dropout=True)


def finish_cost(
    m: int, n: int, itemsize: int, *, bias: bool = False, dropout: bool = False, residual: bool = False,
    backward: bool = False,
) -> Cost:  # fmt: skip
    """Forward reads x, the residual and the bias and writes z; backward reads dz, writes dx if there is dropout (it is
    dz otherwise), and dbias. 8 bytes of start a row with dropout."""
    rows = (1 + dropout if backward else 2 + residual) * m * n
    flops = (bias + dropout + (residual and not backward)) * m * n
    return Cost(flops, (rows + bias * n) * itemsize + dropout * 8 * m)

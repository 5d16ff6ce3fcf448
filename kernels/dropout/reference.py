"""Dropout whose mask is drawn again wherever it is needed, never stored: the specification (torch only)."""

from torch import Tensor

from ..cost import Cost
from ..philox.reference import random_words


def dropout_apply(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """x with each element zeroed with probability p and the rest scaled by 1 / (1 - p); its own backward.

    Math:     y[m, n] = x[m, n] / (1 - p) where word(key, start[m] + n) >= p * 2**32, else 0
    Shapes:   x (M, N); start (M,) int64, the global index of each row's first element; y like x
    Numerics: exact zeros; one multiplication in x.dtype
    Traffic:  see dropout_cost; no mask in memory between forward and backward
    Source:   Philox (kernels/philox); mask by comparison of the 32-bit word, as integers
    """
    keep = random_words(key, start, x.shape[-1]) >= round(p * 2**32)
    return x * keep * (1.0 / (1.0 - p))


def dropout_cost(m: int, n: int, itemsize: int) -> Cost:
    """x in, y out; about 20 integer operations per element for Philox are not counted as flops."""
    return Cost(m * n, 2 * m * n * itemsize + 8 * m)

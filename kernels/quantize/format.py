"""Numbers in blocks of e4m3: what a matrix of 8-bit values and its exponents mean, and their type. Torch only.

Belongs here: what the reference, the kernels and their callers must agree on.

A matrix is cut into blocks that share a scale: 1 x BLOCK along features for activations and gradients (rows),
BLOCK x BLOCK for weights. A block's scale is a power of two, 2**exponent: the smallest with amax / scale <= LARGEST.
So a value of the matrix is value * 2**exponent, which has four significant bits, and is exact in bfloat16. A scale
follows from its own block and from nothing else: whoever holds whole blocks of a matrix computes the same numbers.

    matrix         values               exponents
    rows (M, K)    (M, K) float8_e4m3fn    (K / BLOCK, M) int8: a block's exponents of all rows lie side by side
    weight (N, K)  (N, K) float8_e4m3fn    (N / BLOCK, K / BLOCK) int8

A weight's transposed copy has the same bytes, transposed: values (K, N), exponents (K / BLOCK, N / BLOCK).

Exponents are at least LOWEST and at most HIGHEST, so that a scale and its inverse are normal float32 numbers. LOWEST is
also what a block of zeros has; smaller numbers than LOWEST allows for are rounded to multiples of 2**(LOWEST - 9). A
block that holds a NaN or an infinity has the exponent NOT_A_NUMBER and in its values nothing but the byte NAN:
it is NaN altogether, for whoever reads the one or the other.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
NUMBER_BYTES = 1 + 1 / BLOCK  # of a number of rows in blocks, with its part of the exponent
LARGEST = 448.0  # of e4m3: 1.75 * 2**8
LOWEST, HIGHEST = -120, 120
NOT_A_NUMBER = 127  # the exponent of a block that holds a NaN or an infinity
NAN = 0x7F  # the byte of its values
VALUES = torch.float8_e4m3fn
EXPONENTS = torch.int8


class Blocks(NamedTuple):
    """A matrix in blocks of e4m3; both tensors without gaps."""

    values: Tensor
    """(M, K) float8_e4m3fn, as the layout above has it."""
    exponents: Tensor
    """int8: (K / BLOCK, M) for rows, (N / BLOCK, K / BLOCK) for a weight (N, K)."""


def row_exponents(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the exponents of rows (rows, columns)."""
    return columns // BLOCK, rows


def blocks_bytes(rows: int, columns: int) -> int:
    """Bytes of rows (rows, columns) in blocks."""
    return rows * columns + rows * (columns // BLOCK)


def shard_bytes(rows: int, columns: int) -> int:
    """Bytes of the same as a rank sends them to a kernel: rounded up to those of the widest load."""
    return -(-blocks_bytes(rows, columns) // 16) * 16


def weight_exponents(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the exponents of a weight (rows, columns)."""
    return rows // BLOCK, columns // BLOCK


def empty_rows(like: Any, rows: int, columns: int) -> Blocks:
    """Blocks of rows (rows, columns) to be written, on the device of a tensor or of packed rows."""
    exponents = like.new_empty(row_exponents(rows, columns), dtype=EXPONENTS)
    return Blocks(like.new_empty(rows, columns, dtype=VALUES), exponents)


def empty_weight(like: Tensor, rows: int, columns: int) -> Blocks:
    """Blocks of a weight (rows, columns) to be written, on the device of a tensor."""
    exponents = like.new_empty(weight_exponents(rows, columns), dtype=EXPONENTS)
    return Blocks(like.new_empty(rows, columns, dtype=VALUES), exponents)

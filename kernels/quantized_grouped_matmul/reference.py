"""GEMMs of groups of rows in blocks of e4m3, each with a matrix of its own: the specification (torch only), and the
cost. Letters: as in reference.py of grouped_matmul; format.py of quantize has the blocks."""

import torch
from torch import Tensor

from ..cost import Cost
from ..grouped_matmul import reference as grouped
from ..operands import require
from ..quantize.format import BLOCK, VALUES, Blocks
from ..quantize.reference import check_blocks, check_weight_blocks, check_width, dequantize, dequantize_weight

OPERATION = "quantized_grouped_matmul"


def check_operands(
    a: Blocks, weights: Blocks, offsets: Tensor, index: Tensor | None, transposed: bool, dtype: torch.dtype
) -> tuple[int, int]:
    """(N, K) of one group's product. ValueError unless all have the shapes and dtypes of quantized_grouped_matmul; on a
    CPU also for a row that is not there."""
    check_blocks(OPERATION, a, dtype)
    check_weight_blocks(OPERATION, weights, dtype)
    groups, k = offsets.shape[0] - 1, a.values.shape[1]
    rows, columns = weights.values.shape
    n = rows if transposed else rows // max(groups, 1)
    check_width(f"{OPERATION}: a group's matrix", "output features", n)
    shape = (n, groups * k) if transposed else (groups * n, k)
    require(
        OPERATION, a.values, ("the weights' values", weights.values, shape, (VALUES,)),
        *grouped.indices(offsets, groups, index),
    )  # fmt: skip
    grouped.check_rows(offsets, (a.values, index))
    return n, k


def quantized_grouped_matmul(
    a: Blocks,
    weights: Blocks,
    offsets: Tensor,
    index: Tensor | None = None,
    *,
    transposed: bool = False,
    dtype: torch.dtype,
) -> Tensor:
    """y (R, N), in this dtype, with y[r] = W_e a[r] for each row r of group e of the numbers that the blocks stand for.

    Math:     that of quantized_matmul for each group
    Shapes:   a: rows (R, K), or with an index (R,) int32 any number of rows (T, K), of which row r takes a[index[r]];
              weights: those of all groups, one below the other, (E N, K) with exponents (E N / 128, K / 128). If
              transposed, a weight's second copy, for the gradient of rows: of groups' matrices (K, N) one below the
              other it is (N, E K), with exponents (N / 128, E K / 128). offsets (E + 1,) int32, from 0 to R. Groups may
              be empty
    Numerics: as quantized_matmul for each group
    Traffic:  see quantized_grouped_matmul_cost
    Source:   as grouped_matmul and quantized_matmul
    Errors:   ValueError for operands of other shapes or dtypes
    """
    n, k = check_operands(a, weights, offsets, index, transposed, dtype)
    groups, wide = offsets.shape[0] - 1, torch.promote_types(dtype, torch.float32)
    matrices = dequantize_weight(weights, wide)
    matrices = matrices.view(n, groups, k).transpose(0, 1) if transposed else matrices.view(groups, n, k)
    return grouped.grouped_matmul(dequantize(a, wide), matrices, offsets, index).to(dtype)


def quantized_grouped_matmul_cost(rows: int, n: int, k: int, groups: int, itemsize: int) -> Cost:
    """2 R N K flops; rows and all matrices are read, a byte a value and a byte a block; the result has itemsize bytes a
    value."""
    blocks = rows * (k // BLOCK) + groups * (n // BLOCK) * (k // BLOCK)
    return Cost(2 * rows * n * k, rows * k + groups * n * k + blocks + rows * n * itemsize)

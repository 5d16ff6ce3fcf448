"""GEMM, then all-reduce and what follows it: the specification for all ranks in one process, and the cost; also of
matrices in blocks of e4m3 (format.py of quantize)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cost import Cost
from ..dropout.reference import finish_forward
from ..finish import NOTHING, Finish
from ..matmul_reduce_scatter.reference import numbers, total_product
from ..quantize.format import Blocks
from ..quantized_matmul.reference import quantized_matmul_cost


def matmul_all_reduce_reference(
    inputs: Sequence[Sequence[Tensor]],
    weights: Sequence[Sequence[Tensor]],
    finish: Finish = NOTHING,
    *,
    b_transposed: bool = False,
) -> Tensor:
    """finish(sum over ranks r and i of A[r][i] B[r][i]^T), equal on all ranks, rounded once to the inputs' dtype.

    Shapes: inputs[r][i] (M, K_i), weights[r][i] (N, K_i), or (K_i, N) if b_transposed; result (M, N).
    """
    return finish_forward(total_product(inputs, weights, b_transposed), finish).to(inputs[0][0].dtype)


def quantized_matmul_all_reduce_reference(
    inputs: Sequence[Sequence[Blocks]],
    weights: Sequence[Sequence[Blocks]],
    finish: Finish = NOTHING,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """matmul_all_reduce_reference of the numbers that blocks stand for, in this dtype.

    Shapes: inputs[r][i] blocks of rows (M, K_i), weights[r][i] of a weight (N, K_i); result (M, N).
    """
    return matmul_all_reduce_reference(*numbers(inputs, weights, dtype), finish).to(dtype)


def matmul_all_reduce_cost(m: int, n: int, k: int, world: int, itemsize: int, one_shot: bool) -> Cost:
    """Of one rank, (M, K) x (K, N): the GEMM, and the partials that it writes and reads.

    One-shot: t partials of all rows. Two-shot: t partials of M / t rows each, then as many rows of sums.
    """
    return Cost(2 * m * n * k + m * n, (m * k + n * k + m * n + moved_sums(m, n, world, one_shot)) * itemsize)


def quantized_matmul_all_reduce_cost(m: int, n: int, k: int, world: int, itemsize: int, one_shot: bool) -> Cost:
    """As matmul_all_reduce_cost, with operands in blocks; itemsize: of sums."""
    product = quantized_matmul_cost(m, n, k, itemsize)
    return Cost(product.flops + m * n, product.bytes + moved_sums(m, n, world, one_shot) * itemsize)


def moved_sums(m: int, n: int, world: int, one_shot: bool) -> int:
    """Partial sums and sums that a rank writes and reads beside its result."""
    return 2 * world * m * n if one_shot else 4 * m * n

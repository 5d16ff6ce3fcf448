"""GEMM, then reduce-scatter and what follows it: the specification for all ranks in one process, and the cost; also of
matrices in blocks of e4m3 (format.py of quantize)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..cost import Cost
from ..dropout.reference import finish_forward
from ..finish import NOTHING, Finish
from ..operands import wide_dtype
from ..quantize.format import Blocks
from ..quantize.reference import dequantize, dequantize_weight
from ..quantized_matmul.reference import quantized_matmul_cost


def total_product(
    inputs: Sequence[Sequence[Tensor]], weights: Sequence[Sequence[Tensor]], b_transposed: bool
) -> Tensor:
    """The sum of A[r][i] B[r][i]^T over ranks r and pairs i, in at least float32, not rounded.

    Shapes: inputs[r][i] (M, K_i); weights[r][i] (N, K_i), or (K_i, N) if b_transposed; result (M, N).
    """
    wide = torch.promote_types(inputs[0][0].dtype, torch.float32)

    def partial_sum(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        return torch.stack([a.to(wide) @ (b if b_transposed else b.t()).to(wide) for a, b in pairs]).sum(0)

    return torch.stack([partial_sum(zip(a, b, strict=True)) for a, b in zip(inputs, weights, strict=True)]).sum(0)


def matmul_reduce_scatter_reference(
    inputs: Sequence[Sequence[Tensor]],
    weights: Sequence[Sequence[Tensor]],
    finishes: Sequence[Finish] | None = None,
    *,
    b_transposed: bool = False,
) -> list[Tensor]:
    """For every rank: its rows of finish(sum over ranks and i of A[r][i] B[r][i]^T), rounded once to the inputs' dtype.

    Shapes: inputs[r][i] (M, K_i), weights[r][i] (N, K_i), or (K_i, N) if b_transposed; results (M / t, N).
    """
    chunks = total_product(inputs, weights, b_transposed).chunk(len(inputs))
    finishes = finishes or [NOTHING] * len(inputs)
    return [finish_forward(chunk, f).to(inputs[0][0].dtype) for f, chunk in zip(finishes, chunks, strict=True)]


def quantized_matmul_reduce_scatter_reference(
    inputs: Sequence[Sequence[Blocks]],
    weights: Sequence[Sequence[Blocks]],
    finishes: Sequence[Finish] | None = None,
    *,
    dtype: torch.dtype,
) -> list[Tensor]:
    """matmul_reduce_scatter_reference of the numbers that blocks stand for, in this dtype.

    Shapes: inputs[r][i] blocks of rows (M, K_i), weights[r][i] of a weight (N, K_i); results (M / t, N).
    """
    results = matmul_reduce_scatter_reference(*numbers(inputs, weights, dtype), finishes)
    return [result.to(dtype) for result in results]


def numbers(
    inputs: Sequence[Sequence[Blocks]], weights: Sequence[Sequence[Blocks]], dtype: torch.dtype
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """The numbers that blocks of rows and of weights stand for, in at least float32."""
    wide = wide_dtype(dtype)
    rows = [[dequantize(a, wide) for a in each] for each in inputs]
    return rows, [[dequantize_weight(b, wide) for b in each] for each in weights]


def matmul_reduce_scatter_cost(m: int, n: int, k: int, world: int, itemsize: int, partial_itemsize: int = 2) -> Cost:
    """Of one rank, (M, K) x (K, N): the GEMM, a write of each partial, and a read of those that it receives."""
    nbytes = (m * k + n * k + m * n // world) * itemsize + 2 * m * n * partial_itemsize
    return Cost(2 * m * n * k + m * n, nbytes)


def quantized_matmul_reduce_scatter_cost(m: int, n: int, k: int, world: int, partial_itemsize: int = 2) -> Cost:
    """As matmul_reduce_scatter_cost, with operands in blocks, and a result as wide as partial sums."""
    product = quantized_matmul_cost(m, n, k, 0)  # of which nothing is written but partial sums
    return Cost(product.flops + m * n, product.bytes + (m * n // world + 2 * m * n) * partial_itemsize)

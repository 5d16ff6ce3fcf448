"""GEMM, then reduce-scatter and what follows it: the specification for all ranks in one process, and the cost."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..cost import Cost
from ..dropout.reference import finish_forward
from ..finish import NOTHING, Finish


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


def matmul_reduce_scatter_cost(m: int, n: int, k: int, world: int, itemsize: int, partial_itemsize: int = 2) -> Cost:
    """Of one rank, (M, K) x (K, N): the GEMM, a write of each partial, and a read of those that it receives."""
    nbytes = (m * k + n * k + m * n // world) * itemsize + 2 * m * n * partial_itemsize
    return Cost(2 * m * n * k + m * n, nbytes)

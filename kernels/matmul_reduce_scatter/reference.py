"""GEMM, then reduce-scatter and what follows it: the specification for all ranks in one process, and its cost."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cost import Cost
from ..finish import NOTHING, Finish


def partial_sum(inputs: Sequence[Tensor], weights: Sequence[Tensor], b_transposed: bool) -> Tensor:
    """sum_i A_i B_i^T of one rank (B_i stored (K, N) if b_transposed), in at least float32, not rounded."""
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    terms = [a.to(wide) @ (b if b_transposed else b.t()).to(wide) for a, b in zip(inputs, weights, strict=True)]
    return torch.stack(terms).sum(0)


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
    total = torch.stack([partial_sum(a, b, b_transposed) for a, b in zip(inputs, weights, strict=True)]).sum(0)
    chunks = total.chunk(len(inputs))
    finishes = finishes or [NOTHING] * len(inputs)
    return [f.apply(chunk).to(inputs[0][0].dtype) for f, chunk in zip(finishes, chunks, strict=True)]


def matmul_reduce_scatter_cost(m: int, n: int, k: int, world: int, itemsize: int, partial_itemsize: int = 2) -> Cost:
    """One rank, (M, K) x (K, N): the GEMM; every partial written once, this rank's received ones read once."""
    nbytes = (m * k + n * k + m * n // world) * itemsize + 2 * m * n * partial_itemsize
    return Cost(2 * m * n * k + m * n, nbytes)

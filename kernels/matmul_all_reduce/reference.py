"""GEMM, then all-reduce and what follows it: the specification for all ranks in one process, and the cost."""

from collections.abc import Sequence

from torch import Tensor

from ..cost import Cost
from ..dropout.reference import finish_forward
from ..finish import NOTHING, Finish
from ..matmul_reduce_scatter.reference import total_product


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


def matmul_all_reduce_cost(m: int, n: int, k: int, world: int, itemsize: int, one_shot: bool) -> Cost:
    """Of one rank, (M, K) x (K, N): the GEMM, and the partials that it writes and reads.

    One-shot: t partials of all rows. Two-shot: t partials of M / t rows each, then as many rows of sums.
    """
    moved = 2 * world * m * n if one_shot else 4 * m * n
    return Cost(2 * m * n * k + m * n, (m * k + n * k + m * n + moved) * itemsize)

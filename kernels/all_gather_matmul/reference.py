"""All-gather, then GEMMs: the specification for all ranks in one process (torch only), and the cost."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cost import Cost
from ..matmul.reference import matmul_derivative_reference, matmul_reference


def all_gather_matmul_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Sequence[Tensor]],
    biases: Sequence[Sequence[Tensor | None]] | None = None,
    *,
    activation: str | None = None,
    b_transposed: bool = False,
) -> list[list[Tensor]]:
    """For every rank r and weight i: act(concat(shards) W[r][i]^T + bias[r][i]), rounded once to the shards' dtype.

    Shapes: shards t of (M / t, K); weights[r][i] (N_i, K), or (K, N_i) if b_transposed; results (M, N_i).
    """
    gathered = torch.cat(list(shards))
    biases = biases or [[None] * len(row) for row in weights]
    return [
        [
            matmul_reference(gathered, weight, bias, activation=activation, b_transposed=b_transposed)
            for weight, bias in zip(row, row_biases, strict=True)
        ]
        for row, row_biases in zip(weights, biases, strict=True)
    ]


def all_gather_matmul_derivative_reference(
    shards: Sequence[Tensor],
    weights: Sequence[Tensor],
    xs: Sequence[Tensor],
    activation: str | None,
    gates: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """For every rank: matmul_derivative_reference of the gathered rows and of its own weight, x and gate.

    Shapes: shards t of (M / t, K); weights[r] (K, N); xs[r], gates[r] and results (M, N).
    """
    gathered = torch.cat(list(shards))
    gates = gates or [None] * len(xs)
    return [
        matmul_derivative_reference(gathered, weight, x, activation, gate)
        for weight, x, gate in zip(weights, xs, gates, strict=True)
    ]


def all_gather_matmul_cost(m: int, n: int, k: int, world: int, itemsize: int) -> Cost:
    """Of one rank with M gathered rows and N columns: the GEMM, and a write of the rows that it receives."""
    received = (world - 1) * m // world * k
    return Cost(2 * m * n * k, (m * k + n * k + m * n + received) * itemsize)

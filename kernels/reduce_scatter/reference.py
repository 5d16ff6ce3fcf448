"""reduce_scatter on a list of inputs in one process: the specification, its memory traffic and what crosses links."""

import torch
from torch import Tensor

from ..cost import Cost


def rank_order_sum(terms: list[Tensor]) -> Tensor:
    """The sum from zero on in list order, in at least float32, rounded once to the terms' dtype."""
    total = torch.zeros_like(terms[0], dtype=torch.promote_types(terms[0].dtype, torch.float32))
    for term in terms:
        total = total + term  # promotes: exact, and one rounding per addition
    return total.to(terms[0].dtype)


def reduce_scatter_reference(inputs: list[Tensor]) -> list[Tensor]:
    """Rank r's result: the sum over all ranks of the r-th of t equal chunks along dim 0, see rank_order_sum."""
    chunks = [x.chunk(len(inputs)) if x.shape[0] else [x] * len(inputs) for x in inputs]
    return [rank_order_sum([own[rank] for own in chunks]) for rank in range(len(inputs))]


def reduce_scatter_cost(numel: int, itemsize: int, world: int) -> Cost:
    """One rank, input of numel elements: adds t chunks; reads its input once, writes its result, and t - 1 chunks are
    written to its slots (by the peers) and read again."""
    chunk = numel // world
    return Cost((world - 1) * chunk, (numel + chunk + 2 * (world - 1) * chunk) * itemsize)


def reduce_scatter_bytes(nbytes: int, world: int) -> int:
    """What a rank sends over its links for an input of nbytes, flags not counted: every chunk but its own."""
    return nbytes // world * (world - 1)

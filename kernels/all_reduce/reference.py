"""all_reduce on a list of inputs in one process: the specification, its memory traffic and what crosses links."""

from torch import Tensor

from ..cost import Cost
from ..reduce_scatter.reference import rank_order_sum


def all_reduce_reference(inputs: list[Tensor]) -> list[Tensor]:
    """Every rank's result, the same bits on all: the sum in rank order in at least float32, rounded once."""
    total = rank_order_sum(inputs)
    return [total.clone() for _ in inputs]


def all_reduce_cost(numel: int, itemsize: int, world: int, two_shot: bool) -> Cost:
    """One rank reads its input, writes its result, and what arrives is written to its slots (by the peers) and read.

    One-shot: it adds everything, and t - 1 whole inputs arrive. Two-shot: it adds its own chunk, and t - 1 chunks
    arrive to be added, then t - 1 sums.
    """
    added = numel // world if two_shot else numel
    arrived = 2 * (world - 1) * (numel // world) if two_shot else (world - 1) * numel
    return Cost((world - 1) * added, (2 * numel + 2 * arrived) * itemsize)


def all_reduce_bytes(nbytes: int, world: int, two_shot: bool) -> int:
    """What a rank sends over its links, flags not counted: its input to every other rank, or one chunk to each (its
    terms) and then its own chunk to each (the sum)."""
    return 2 * (world - 1) * (nbytes // world) if two_shot else (world - 1) * nbytes

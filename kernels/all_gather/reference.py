"""all_gather on a list of shards in one process: the specification, its memory traffic and what crosses links."""

import torch
from torch import Tensor

from ..cost import Cost


def all_gather_reference(shards: list[Tensor]) -> list[Tensor]:
    """What each rank holds afterwards: every rank's shard, in rank order along dim 0. A copy: no numerics."""
    gathered = torch.cat(shards)
    return [gathered.clone() for _ in shards]


def all_gather_cost(nbytes: int, world: int) -> Cost:
    """One rank, shards of nbytes: reads its own once, writes the result, and each arrived shard is written to its slot
    (by the peer) and read again: (1 + t + 2 (t - 1)) * nbytes."""
    return Cost(0, (3 * world - 1) * nbytes)


def all_gather_bytes(nbytes: int, world: int) -> int:
    """What a rank sends over its links, flags not counted: its shard to every other rank."""
    return (world - 1) * nbytes

"""Sums of gradients over replicas by messages, in place of the library's all-reduce.

Belongs here: the Exchange that has FSDP2 call them. Which messages are sent is in reductions.py, what they cost in
algorithms.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import Layout, RunConfig
from tpformer.distributed.links import Link
from tpformer.exchange import NamedExchange

from .algorithms import HIERARCHICAL, all_reduce_seconds
from .reductions import reduce_by


def ranks_of_a_node(group: ProcessGroup) -> int:
    """How many ranks of the group, side by side in it, are on one machine. Those of torchrun know it from
    LOCAL_WORLD_SIZE; without it all ranks are on one. ValueError unless all machines have as many."""
    ranks = dist.get_process_group_ranks(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = [rank // local for rank in ranks]
    counts = {nodes.count(node) for node in nodes}
    if len(counts) > 1:
        raise ValueError(
            f"parallel.exchange='hierarchical' needs as many replicas on each machine, and the ranks {ranks} are on "
            f"the machines {nodes}: choose another exchange, or other degrees"
        )
    return counts.pop()


@dataclass
class AllReduce(NamedExchange):
    """The all-reduce of its name, among those of reductions.py.

    Communicates: what reduce_by says, for the elements of a unit's shards, once a step, but once a microbatch where
    stages 2 and 3 reduce in 16 bits.
    """

    sums_replicas = True

    def check(self, layout: Layout, run: RunConfig | None = None) -> None:
        """ValueError for a single replica."""
        self.check_replicas(layout)

    def unit(self, name: str, shapes: Sequence[tuple[int, ...]], group: ProcessGroup) -> Callable[[Tensor], object]:
        """reduce_by."""
        inside = ranks_of_a_node(group) if self.name == HIERARCHICAL else 1
        return partial(reduce_by, self.name, group=group, inside=inside)

    def seconds(self, nbytes: float, inside: int, nodes: int, fast: Link, slow: Link) -> float:
        """By the algorithm's formula."""
        return all_reduce_seconds(self.name, nbytes, inside, nodes, fast, slow)

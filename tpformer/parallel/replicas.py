"""Sums of gradients over replicas in another way than the library's all-reduce, called by FSDP2.

Belongs here: what replaces FSDP2's all-reduce over dp_replicate, for one of its units. zero.py installs it and says
which backward is the last. Which messages are sent is in tpformer/distributed/reductions.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import Layout
from tpformer.distributed.reductions import reduce_by

from .compression import compression_of


def ranks_of_a_node(group: ProcessGroup) -> int:
    """How many ranks of the group, side by side in it, are on one machine. Those of torchrun know it from
    LOCAL_WORLD_SIZE; without it all ranks are on one. ValueError unless all machines have as many."""
    ranks = dist.get_process_group_ranks(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    nodes = [rank // local for rank in ranks]
    counts = {nodes.count(node) for node in nodes}
    if len(counts) > 1:
        raise ValueError(
            f"parallel.all_reduce='hierarchical' needs as many replicas on each machine, and the ranks {ranks} are on "
            f"the machines {nodes}: choose another all_reduce, or other degrees"
        )
    return counts.pop()


class ReplicaSum:
    """FSDP2's all-reduce hook of one unit: adds up its gradient shards over the replicas, in place.

    last: whether replicas add up now; zero.prepare_backward sets it. Sums over microbatches wait here until then.
    shapes: of the shards of the unit's parameters, as FSDP2 pads them.
    Communicates: what reduce_by or the compression says, for the elements of the unit's shards, once a step, but once a
    microbatch where stages 2 and 3 reduce in 16 bits.
    """

    def __init__(self, layout: Layout, group: ProcessGroup, shapes: Sequence[tuple[int, ...]]) -> None:
        self.algorithm, self.group = layout.all_reduce, group
        self.compression = compression_of(layout, group, shapes)
        self.inside = ranks_of_a_node(group) if self.algorithm == "hierarchical" else 1
        self.last = True
        self._waiting: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        """x: (elements,) of the reduce dtype, which FSDP2 adds to the gradients afterwards."""
        if not self.last:
            self._waiting = x.clone() if self._waiting is None else self._waiting.add_(x)
            x.zero_()
            return
        if self._waiting is not None:
            x += self._waiting
            self._waiting = None
        if self.compression is None:
            reduce_by(self.algorithm, x, self.group, inside=self.inside)
        elif len(x) == self.compression.elements:
            self.compression.settle(x.new_zeros(()))  # a loop of one's own that has no skipped steps need not do it
            self.compression.add(x)
        else:
            raise RuntimeError(
                f"parallel.compression needs the gradients of all parameters of a unit, {self.compression.elements} "
                f"elements, and got {len(x)}: train all parameters, or leave it out"
            )

"""A parameter of which two pipeline stages hold a copy: adding up the copies' gradients keeps their values equal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer.distributed.collectives import all_reduce
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.mesh import DEFAULT_TIMEOUT, joining


class TiedParameter:
    """The copies of one parameter on the first and on the last stage of a pipeline.

    owners: this rank's modules whose `weight` is a copy: two if both stages are on this rank, none if neither is.
    mesh: the run's mesh. first_rank, last_rank: the pipeline ranks of the two stages.
    Constructing it is collective over the world. It makes a process group, with `timeout`, for each pair of ranks that
    hold the same shard.
    """

    def __init__(
        self,
        owners: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        first_rank: int,
        last_rank: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.owners = owners
        self.group: dist.ProcessGroup | None = None
        if first_rank != last_rank:
            ranks = mesh.mesh.flatten(start_dim=1)
            for pair in zip(ranks[first_rank].tolist(), ranks[last_rank].tolist(), strict=True):
                with joining():
                    group = dist.new_group(list(pair), timeout=timeout)
                if dist.get_rank() in pair:
                    self.group = group

    @property
    def local(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [owner.weight for owner in self.owners]

    @torch.no_grad()
    def reduce(self) -> None:
        """Give both copies the sum of their gradients. Call it after the reductions over other axes, before the norm.

        Communication: one all-reduce of this rank's shard between the two ranks, or none if both stages are on one.
        """
        found = [p.grad for p in self.local if p.grad is not None]  # a frozen table has no gradient, on either rank
        gradients = [local_part(grad) for grad in found]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        elif gradients:
            gradients[0].copy_(all_reduce(gradients[0], self.group))

"""The record of what pipeline ranks did and when, gathered on one clock. tpformer.planner draws it."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


class Action(NamedTuple):
    """One thing that a pipeline rank did. Times in seconds of time.perf_counter."""

    rank: int
    stage: int
    microbatch: int
    kind: str
    """F forward, B whole backward, I its input gradients, W its weight gradients, R reduction of gradients."""
    start: float
    end: float


def gather_actions(record: Sequence[Action], group: dist.ProcessGroup | None = None) -> list[Action] | None:
    """All ranks' actions on the group's first rank, on its clock; None on the others.

    Collective on `group`: a barrier and one gather of the pickled actions (about 60 bytes each). Ranks of one machine
    share a clock, as time.perf_counter counts from the machine's start. The times of another machine are shifted by the
    difference of the clocks after the barrier, as if it released all ranks at once (good to a network round-trip).
    """
    dist.barrier(group)
    mine = (_machine(), time.perf_counter(), list(record))
    gathered: list | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(mine, gathered, group=group, group_dst=0)
    if gathered is None:
        return None
    clocks: dict[str, float] = {}
    actions = []
    for machine, clock, recorded in gathered:
        shift = gathered[0][1] - clocks.setdefault(machine, clock)
        actions += [a._replace(start=a.start + shift, end=a.end + shift) for a in recorded]
    return actions


def _machine() -> str:
    """A name that processes with the same time.perf_counter share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else platform.node()

"""What a step communicates and multiplies: collectives by name with their bytes, point-to-point messages, GEMM FLOPs.

Belongs here: the counting of one rank, for anything that runs. Nothing about what should come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpformer.distributed.collectives import record_collectives

from .saved import Gemms

NAMES = {  # torch.distributed's operators; FSDP2 and the pipeline engine call them
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "partial all_reduce",  # functional: over tp, of partial gradients, before they are reduced
    "send": "send",
}
Calls = Counter[tuple[str, int]]


@dataclass
class StepCounts:
    """Number of calls by (name, bytes of the full tensor)."""

    layers: Calls = field(default_factory=Calls)
    """Collectives of tpformer.distributed: those of the layers, over the tp axis."""
    data: Calls = field(default_factory=Calls)
    """Collectives of FSDP2."""
    messages: Calls = field(default_factory=Calls)
    """What the pipeline engine sends to other ranks."""
    flops: int = 0
    """2 M N K of every matrix product but attention's."""

    def number(self, name: str) -> int:
        """Calls of FSDP2's collective of this name."""
        return sum(count for (other, _), count in self.data.items() if other == name)


class _Operators(TorchDispatchMode):
    """Counts torch.distributed's operators while it is the active mode."""

    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = NAMES.get(function.overloadpacket.__name__)
        if name is not None and function.namespace in ("c10d", "_c10d_functional"):
            size = max(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            calls = self.counts.messages if name == "send" else self.counts.data
            calls[name, size] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def count_step() -> Iterator[StepCounts]:
    """Counts what this rank does while the context is open."""
    counts = StepCounts()
    with record_collectives() as calls, Gemms() as gemms, _Operators(counts):
        yield counts
    counts.layers.update(calls)
    counts.flops = gemms.flops

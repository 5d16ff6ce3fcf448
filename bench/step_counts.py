"""What a step communicates and multiplies: collectives with their bytes, messages between pipeline ranks, GEMM FLOPs.

Belongs here: the counting of one rank, for anything that runs. Nothing about what should come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tpformer.distributed.collectives import record_collectives
from tpformer.planner.counting import SEND, Collective, CollectiveCounter

_ATEN = torch.ops.aten
GEMM_OPERANDS = {  # the position of the left operand among each product's arguments
    **dict.fromkeys((_ATEN.mm, _ATEN.bmm), 0),
    **dict.fromkeys((_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_), 1),
}


class Gemms(TorchDispatchMode):
    """Adds up 2 M N K of every matrix product while it is the active mode; attention's own products are no GEMMs here.

    torch's FlopCounterMode leaves out products that are added in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = GEMM_OPERANDS.get(function.overloadpacket)
        if first is not None:
            a, b = args[first : first + 2]
            self.flops += 2 * a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))


@dataclass
class StepCounts:
    """How often each call was made; bytes are those of the full tensor."""

    layers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Collectives of tpformer.distributed by (name, bytes): those of the layers, over the tp axis."""
    data: Counter[Collective] = field(default_factory=Counter)
    """Collectives of FSDP2, and DTensor's all-reduce of partial gradients over tp before them."""
    messages: int = 0
    """What the pipeline engine sends to other ranks."""
    flops: int = 0
    """2 M N K of every matrix product but attention's."""

    def number(self, operation: str) -> int:
        """FSDP2's collectives of this name."""
        return sum(times for call, times in self.data.items() if call.operation == operation and call.axis != "tp")


@contextmanager
def count_step(mesh: DeviceMesh) -> Iterator[StepCounts]:
    """Counts what this rank does while the context is open; complete when it closes."""
    counts = StepCounts()
    with record_collectives() as calls, Gemms() as gemms, CollectiveCounter(mesh) as others:
        yield counts
    counts.layers.update(calls)
    for call, times in others.take().items():
        if call.operation == SEND:
            counts.messages += times
        else:
            counts.data[call] += times
    counts.flops = gemms.flops

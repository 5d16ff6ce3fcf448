"""Counting on fake tensors: collectives by mesh axis, bytes that autograd keeps, bytes that are allocated.

Belongs here: the counters, for any model. What is built and run under them: dry_run.py.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from tpformer.distributed.mesh import AXES
from tpformer.models import GPT
from tpformer.ops.offload import SMALLEST

from .storages import Saved, live_storages, local, storages


class Collective(NamedTuple):
    """nbytes: of the full tensor, as distributed.record_collectives has them; of the message for send and receive."""

    axis: str
    operation: str
    nbytes: int


class StageCount(NamedTuple):
    """One stage of a rank, and bytes of one microbatch: saved by autograd, the stage's input too, of which offloaded to
    the host; output, which the pipeline keeps until the backward; queued for weight gradients, in schedules that
    split the backward."""

    stage: int
    layers: range
    saved: int
    offloaded: int
    output: int
    queued: int


SEND = "send"
# torch.distributed's operations -> (name, the argument that has the full tensor)
OPERATIONS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),  # the functional one, by which DTensor adds up partial gradients
    SEND: (SEND, 0),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts this process's collectives and sent messages while it is the active mode, those of FSDP2, DTensor and the
    pipeline engine included."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.axes = {mesh.get_group(axis).group_name: axis for axis in AXES if mesh[axis].size() > 1}
        self.calls: Counter[Collective] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            name, position = OPERATIONS.get(function.overloadpacket.__name__, (None, 0))
            if name is not None:
                full = args[position]
                full = full[0] if isinstance(full, list | tuple) else full
                self.calls[Collective(self._axis(args), name, full.numel() * full.dtype.itemsize)] += 1
        return function(*args, **(kwargs or {}))

    def _axis(self, arguments: Sequence[Any]) -> str:
        for argument in arguments:
            if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
                # the one group beside the mesh's: the two pipeline ranks of a tied embedding
                return self.axes.get(dist.ProcessGroup.unbox(argument).group_name, "pp")
        return "tp"  # a functional one, of the only axis that has partial gradients

    def take(self) -> Counter[Collective]:
        """What was counted since the last call."""
        taken, self.calls = self.calls, Counter()
        return taken


def live_bytes(mode: FakeTensorMode) -> int:
    """Of all storages that tensors of the mode refer to: what a real run would have allocated for them."""
    gc.collect()
    alive = live_storages(lambda x: type(x) is FakeTensor and x.fake_mode is mode)
    return sum(storage.nbytes() for storage in alive)


class SavedBytes(Saved):
    """What autograd keeps of one forward of a part, and which of it ops.Offload would move to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.units = 0  # that ops.Offload would move one after another: layers, or regions of several
        self.unit_of: dict[torch.UntypedStorage, int] = {}  # 0 before the first unit, 1 in it, ...
        self.gathered: list[int] = []
        """Bytes of the parameters that the part, and then each of FSDP2's units, had when its forward began."""

    def enter(self, module: nn.Module) -> None:
        """See Saved; and note how much is gathered."""
        super().enter(module)
        self.gathered.append(sum(storage.nbytes() for storage in storages(module.parameters())))

    def pack(self, x: Tensor) -> Tensor:
        """See Saved; and note the unit that keeps the storage first."""
        self.unit_of.setdefault(local(x).untyped_storage(), self.units)
        return super().pack(x)

    @contextmanager
    def layer(self, *_: nn.Module) -> Iterator[None]:
        """What ops.Offload has by this name. Its own hooks would hide what is saved."""
        self.units += 1
        yield

    @contextmanager
    def of_part(self, part: GPT) -> Iterator[None]:
        """Record a forward of the part, which does not offload meanwhile."""
        offload, part.offload = part.offload, lambda: self
        try:
            with self.recording(part):
                yield
        finally:
            part.offload = offload

    def totals(self) -> tuple[int, int]:
        """(all bytes, of which those that ops.Offload would move to the host)."""
        sizes, moved = self.sizes(), range(1, self.units)  # all units but the last; what the head keeps is with that
        offloaded = (size for each, size in sizes.items() if self.unit_of[each] in moved and size >= SMALLEST)
        return sum(sizes.values()), sum(offloaded)

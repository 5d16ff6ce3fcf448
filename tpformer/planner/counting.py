"""Counting on fake tensors: collectives by mesh axis, bytes that autograd keeps, bytes that are allocated.

Belongs here: the counters, for any model. What is built and run under them: dry_run.py.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpformer.distributed.mesh import AXES
from tpformer.models import GPT
from tpformer.ops.offload import SMALLEST


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


# torch.distributed's operations -> (name, the argument that has the full tensor)
OPERATIONS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),  # the functional one, by which DTensor adds up partial gradients
}


class CollectiveCounter(TorchDispatchMode):
    """Counts this process's collectives while it is the active mode, those of FSDP2 and DTensor included."""

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


def local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Of this rank's parts."""
    return sum(local(x).numel() * x.dtype.itemsize for x in tensors if x is not None)


def storages(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    return {local(x).untyped_storage() for x in tensors}


def live_bytes(mode: FakeTensorMode) -> int:
    """Of all storages that tensors of the mode refer to: what a real run would have allocated for them."""
    gc.collect()
    fakes = (each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is mode)
    return sum(storage.nbytes() for storage in {x.untyped_storage() for x in fakes})


class SavedBytes:
    """What autograd keeps of one forward of a part: each storage once and with its whole size, parameters left out."""

    def __init__(self, part: GPT) -> None:
        self.part = part
        self.kept: dict[torch.UntypedStorage, tuple[int, int]] = {}  # bytes; 0 before the first unit, 1 in it, ...
        self.units = 0  # that ops.Offload would move one after another: layers, or regions of several
        self.left_out: set[torch.UntypedStorage] = set()
        self.gathered: list[int] = []
        """Bytes of the parameters that each layer, and before them the whole part, had when its forward began."""

    def _before(self, module: nn.Module, _: Any) -> None:
        found = storages(module.parameters())  # now: FSDP2 replaces them when its unit is called
        self.left_out |= found
        self.gathered.append(sum(storage.nbytes() for storage in found))

    def _pack(self, x: Tensor) -> Tensor:
        storage = local(x).untyped_storage()
        self.kept.setdefault(storage, (storage.nbytes(), self.units))
        return x

    @contextmanager
    def layer(self, *_: nn.Module) -> Iterator[None]:
        """In the place of ops.Offload's, whose hooks would hide what is saved."""
        self.units += 1
        yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        modules: list[nn.Module] = [self.part, *self.part.layers.values()]
        hooks = [module.register_forward_pre_hook(self._before) for module in modules]
        self.part.offload = lambda: self
        try:
            with saved_tensors_hooks(self._pack, lambda x: x):
                yield
        finally:
            self.part.offload = None
            for hook in hooks:
                hook.remove()

    def totals(self, other: Iterable[Tensor] = ()) -> tuple[int, int]:
        """(all bytes, of which those that ops.Offload would move to the host), the storages of `other` left out."""
        left_out = self.left_out | storages(other)
        sizes = [size for storage, size in self.kept.items() if storage not in left_out]
        moved = range(1, self.units)  # all but the last, whose storages stay; what the head keeps is with it
        return sum(size for size, _ in sizes), sum(size for size, at in sizes if at in moved and size >= SMALLEST)

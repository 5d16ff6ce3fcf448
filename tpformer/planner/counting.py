"""Counters for a run on fake tensors: collectives by mesh axis, bytes that autograd keeps, bytes that are allocated.

Belongs here: the counters. dry_run.py builds what is counted, and runs it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpformer.distributed.mesh import expert_mesh
from tpformer.models import GPT
from tpformer.ops.offload import SMALLEST
from tpformer.ops.recompute import record_kept
from tpformer.parallel import Layout

from .states import exchanging_ranks
from .storages import Saved, live_storages, local, storages

EXPERT_AXES = ("ereplica", "eshard", "ep")  # of distributed.expert_mesh, whose names there have sizes in them


class Collective(NamedTuple):
    """A kind of collective or message. axis: of the mesh, or several, as named_axes joins them.

    nbytes: the bytes of the full tensor, as in distributed.record_collectives. For "send" and "receive" they are the
    bytes of the message; for OF_OWNERS, Muon's all-to-alls, what this rank sends of one in the mean.
    """

    axis: str
    operation: str
    nbytes: int


def named_axes(axes: Iterable[str]) -> str:
    """The name of some axes of a mesh, over all of whose ranks a group reaches, such as "dp_shard x cp"."""
    return " x ".join(axes)


class StageCount(NamedTuple):
    """One stage of a rank, and the bytes that it keeps for one microbatch.

    layers: the stage's layers. saved: what autograd saves, the stage's input included. offloaded: how much of `saved`
    waits in host memory. output: the stage's result, which the pipeline keeps until the backward. queued: what waits
    for the weight gradients, in schedules that split the backward.
    """

    stage: int
    layers: range
    saved: int
    offloaded: int
    output: int
    queued: int


SEND = "send"
OF_OWNERS = ("to_owners", "from_owners")
# operation of torch.distributed -> (its name here, the position of the argument that is the full tensor)
OPERATIONS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),  # functional: DTensor adds up partial gradients by it
    SEND: (SEND, 0),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts this process's collectives and sent messages while it is the active mode.

    It sees those of FSDP2, of DTensor and of torch's pipeline engine, too. layout: of a model on the mesh whose experts
    may exchange tokens; their axes then have the names EXPERT_AXES. Axes that have all ranks share the world's group:
    exchanges of tokens over it are told apart, all else counts as the mesh's own axis.
    """

    def __init__(self, mesh: DeviceMesh, layout: Layout | None = None) -> None:
        super().__init__()
        self.names, self.sizes = mesh.mesh_dim_names or (), tuple(mesh.shape)
        self.exchanging = ""  # the name of the group over which experts exchange tokens
        self.axes = {mesh.get_group(axis).group_name: axis for axis in self.names if mesh[axis].size() > 1}
        if layout is not None and (ep := exchanging_ranks(layout)) is not None:
            view = expert_mesh(mesh, layout.expert_replicas, ep)
            for name, axis in zip(EXPERT_AXES, view.mesh_dim_names or (), strict=True):
                if view[axis].size() > 1:
                    self.axes.setdefault(view.get_group(axis).group_name, name)
            self.exchanging = view.get_group(2).group_name
        self.calls: Counter[Collective] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            name, position = OPERATIONS.get(function.overloadpacket.__name__, (None, 0))
            if name is not None and (axis := self._axis(args, name)):  # one rank alone sends nothing
                full = args[position]
                full = full[0] if isinstance(full, list | tuple) else full
                self.calls[Collective(axis, name, full.numel() * full.dtype.itemsize)] += 1
        return function(*args, **(kwargs or {}))

    def _axis(self, arguments: Sequence[Any], operation: str) -> str:
        """The axes on which the ranks of a call's group differ. RuntimeError for a call that does not say its group."""
        for argument in arguments:
            if isinstance(argument, str) and argument in self.axes:  # a functional collective names its group
                return self.axes[argument]
            if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
                group = dist.ProcessGroup.unbox(argument)
                if group.group_name not in self.axes:
                    self.axes[group.group_name] = self._axes_of(dist.get_process_group_ranks(group))
                axis = self.axes[group.group_name]
                return "ep" if operation == "all_to_all" and self._exchanges(group, axis, arguments) else axis
        raise RuntimeError(f"a collective over none of the groups {', '.join(self.axes.values())}: {arguments[1:]}")

    def _exchanges(self, group: dist.ProcessGroup, axis: str, arguments: Sequence[Any]) -> bool:
        """Whether an all-to-all is of tokens for experts. Context-parallel ranks may share the group; they exchange
        equal parts of gradients, and experts parts of given sizes, and counts."""
        _, sent, _, sizes, *_ = arguments
        return group.group_name == self.exchanging and (axis != "cp" or bool(sizes) or not sent.is_floating_point())

    def _axes_of(self, ranks: Sequence[int]) -> str:
        """Of a group that is no axis of the mesh: FSDP2's over several axes, a tied table's on two pipeline ranks."""
        found: list[str] = []
        stride = 1
        for axis, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            if len({rank // stride % size for rank in ranks}) > 1:
                found.insert(0, axis)
            stride *= size
        return named_axes(found)

    def take(self) -> Counter[Collective]:
        """What was counted since the last call."""
        taken, self.calls = self.calls, Counter()
        return taken


def live_bytes(mode: FakeTensorMode) -> int:
    """Bytes of all storages that the mode's tensors refer to. A real run would have allocated as many."""
    gc.collect()
    alive = live_storages(lambda x: type(x) is FakeTensor and x.fake_mode is mode)
    return sum(storage.nbytes() for storage in alive)


class SavedBytes(Saved):
    """What autograd keeps of one forward of a part, and how much of it ops.Offload would move to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.units = 0  # how many units have begun: a unit is a layer, or a region of several, which moves as a whole
        self.moving: set[int] = set()  # units that Offload would move
        self.unit_of: dict[torch.UntypedStorage, int] = {}  # the unit that kept it first: 1, 2, ...; 0 before them
        self.gathered: list[int] = []
        """Bytes of the part's parameters when its forward began, then of each FSDP2 unit's when that one's began."""

    def enter(self, module: nn.Module) -> None:
        """Do as Saved does, and note how many bytes are gathered."""
        super().enter(module)
        self.gathered.append(sum(storage.nbytes() for storage in storages(module.parameters())))

    def pack(self, x: Tensor) -> Tensor:
        """Do as Saved does, and note which unit keeps the storage first."""
        self.unit_of.setdefault(local(x).untyped_storage(), self.units)
        return super().pack(x)

    @contextmanager
    def layer(self, *_: nn.Module, moves: bool = True) -> Iterator[None]:
        """Stand in for ops.Offload.layer, whose hooks would hide what is saved: begin a unit."""
        self.units += 1
        if moves:
            self.moving.add(self.units)
        yield

    @contextmanager
    def of_part(self, part: GPT) -> Iterator[None]:
        """Record a forward of the part, with what its regions keep. Meanwhile the part does not offload."""
        kept, part.keep = part.keep, replace(part.keep, offload=lambda: self)
        try:
            with self.recording(part), record_kept() as decisions:
                yield
            for x in tree_leaves(decisions):
                if isinstance(x, Tensor):  # not packed by autograd, so it stays on the device
                    self.unit_of.setdefault(x.untyped_storage(), 0)
                    self.pack(x)
        finally:
            part.keep = kept

    def totals(self) -> tuple[int, int]:
        """(all bytes, how many of them ops.Offload would move to the host)."""
        sizes = self.sizes()
        moved = self.moving - {self.units}  # not the last unit, nor the head, which counts as part of it
        offloaded = (size for each, size in sizes.items() if self.unit_of[each] in moved and size >= SMALLEST)
        return sum(sizes.values()), sum(offloaded)

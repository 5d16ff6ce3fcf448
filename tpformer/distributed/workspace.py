"""Workspaces: the shared memory through which one kind of collective of one group passes.

Belongs here: slots and their reuse, growth, agreement checks, the registry of groups. No arithmetic (collectives.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .shared_memory import DEFAULT_TIMEOUT, SharedMemory, host_key, is_available

if TYPE_CHECKING:
    from .kernel_workspace import KernelGroup

SLOT_MINIMUM = 1 << 20  # bytes
HEADER = 4096  # bytes at the start of each region; holds one agreement word per parity
CACHED_LAYOUTS = 512  # (shape, dtype) views kept per workspace; a training run has a few dozen
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce(sum)", "all_reduce(max)")
BACKENDS = ("gloo", "shared")


class Workspace:
    """Two slots per rank, used in turn (epoch parity), in memory that grows to the next power of two.

    Why two slots need no barrier. Operation k writes this rank's slot k % 2, signals all, waits for all, then reads
    all slots k % 2. A rank signals k + 1 only after it has finished k, reads included. So a rank that has passed the
    waits of k + 1 knows that everybody has finished reading k, and may write slot k % 2 again in operation k + 2.
    It holds because every operation waits for all ranks, and all ranks run the same operations in the same order.

    Memory: 2 * ranks * slot bytes per machine; a slot is a power of two from 1 MiB that holds the operation's input.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.epoch = 0
        self.capacity = 0
        self.memory: SharedMemory | None = None
        self._slots: dict[tuple[int, int, torch.dtype, int], list[list[torch.Tensor]]] = {}

    def slots(self, group: dist.ProcessGroup, numel: int, dtype: torch.dtype, parts: int) -> list[list[torch.Tensor]]:
        """Begin an operation: `slots[rank][part]`, flat views that split each rank's `numel` elements in parts.

        The parts are those of torch.tensor_split. Write to your own slot only. Collective over `group` when the
        memory has to grow: the same call on all ranks.
        """
        nbytes = numel * dtype.itemsize
        if nbytes > self.capacity or self.memory is None:
            self._grow(group, nbytes)
        self.epoch += 1
        key = (self.epoch & 1, numel, dtype, parts)
        views = self._slots.get(key)
        return self._make_views(*key) if views is None else views

    def _make_views(self, parity: int, numel: int, dtype: torch.dtype, parts: int) -> list[list[torch.Tensor]]:
        assert self.memory is not None
        if len(self._slots) >= CACHED_LAYOUTS:
            self._slots.clear()
        offset = HEADER + parity * self.capacity
        with torch.inference_mode(False):  # or the views could not be written outside of it
            slots = [self.memory.peer(rank, (numel,), dtype, offset) for rank in range(self.memory.size)]
            views = [list(slot.tensor_split(parts)) for slot in slots]
        self._slots[parity, numel, dtype, parts] = views
        return views

    def _grow(self, group: dist.ProcessGroup, nbytes: int) -> None:
        # Needs no drain of its own: the allocation is collective, and each rank drops only its own mapping.
        self._slots.clear()
        self.capacity = max(SLOT_MINIMUM, 1 << (nbytes - 1).bit_length())
        self.memory = SharedMemory(HEADER + 2 * self.capacity, group, self.timeout)
        words = memoryview(self.memory.buffer).cast("q")
        starts = [self.memory.region_offset(rank) // 8 for rank in range(self.memory.size)]
        self._words, self._starts = words, starts

    def exchange(self, operation: int, nbytes: int) -> None:
        """Publish this rank's slot and wait for all others; OPERATIONS[operation] with `nbytes` of input per rank.

        Raises RuntimeError if the ranks called different operations or sizes, TimeoutError if one does not come.
        """
        assert self.memory is not None
        parity, word = self.epoch & 1, nbytes << 2 | operation
        words, starts = self._words, self._starts
        words[starts[self.memory.rank] + parity] = word
        self.memory.exchange(OPERATIONS[operation])
        for start in starts:
            if words[start + parity] != word:
                self._disagree([words[start + parity] for start in starts])

    def _disagree(self, seen: Sequence[int]) -> None:
        calls = [f"rank {rank}: {OPERATIONS[word & 3]} of {word >> 2} bytes" for rank, word in enumerate(seen)]
        reason = "the ranks called different collectives: " + ", ".join(calls)
        assert self.memory is not None
        self.memory.fail(reason)
        raise RuntimeError(f"{reason}; every rank must call the same ones, in the same order, with equal shapes")


@dataclass
class GroupState:
    """How one process group communicates on CPU; holds no reference to the group, which is the registry's weak key."""

    rank: int
    size: int
    shared: bool
    gather: Workspace
    reduce: Workspace


@dataclass
class Registry:
    """The only module-level state of tpformer.distributed: groups in use, the step, and the recorders that listen."""

    groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = field(default_factory=weakref.WeakKeyDictionary)
    kernels: weakref.WeakKeyDictionary[dist.ProcessGroup, KernelGroup] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    timeout: float = DEFAULT_TIMEOUT
    """Seconds that operations of groups first used from now on wait for a peer."""
    step: int | None = None
    recorders: list[list[tuple[str, int]]] = field(default_factory=list)


REGISTRY = Registry()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The group's state; made at first use by a collective over the group (one all-gather of a small object)."""
    state = REGISTRY.groups.get(group)
    if state is None:
        shared = group.size() > 1 and why_not_shared(group) is None
        state = register(group, shared, REGISTRY.timeout)
    return state


def register(group: dist.ProcessGroup, shared: bool, timeout: float) -> GroupState:
    state = GroupState(group.rank(), group.size(), shared, Workspace(timeout), Workspace(timeout))
    REGISTRY.groups[group] = state
    return state


def why_not_shared(group: dist.ProcessGroup) -> str | None:
    """The reason why the group's CPU tensors cannot go through shared memory, None if they can.

    Collective over the group where its CPU backend is gloo: one all-gather of a small object.
    """
    if backend_of(group, "cpu") != "gloo":
        return f"the group's CPU backend is {backend_of(group, 'cpu')}, not gloo"
    keys: list[tuple[str, ...] | None] = [None] * group.size()
    dist.all_gather_object(keys, host_key() if is_available() else None, group=group)
    if None in keys:
        return f"rank {keys.index(None)} does not run Linux with POSIX semaphores"
    other = next((rank for rank, key in enumerate(keys) if key != keys[0]), None)
    if other is not None:
        return f"ranks 0 and {other} are not on one host: {keys[0]} and {keys[other]}"
    return None


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The group's torch.distributed backend for that device: "gloo", "nccl", ..., or "none"."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pair if len(pair) == 2 else (device_type, pair[0]) for pair in pairs).get(device_type, "none")


def use_backend(group: dist.ProcessGroup, backend: str, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Choose how the group's CPU collectives run, instead of the automatic choice. Collective over the group.

    backend: "shared" (shared memory; RuntimeError with the reason if the group cannot) or "gloo" (torch.distributed).
    timeout: seconds a shared-memory operation waits for a peer.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, not {backend!r}")
    if backend == "shared":
        reason = why_not_shared(group)
        if reason is not None:
            raise RuntimeError(f"the shared backend cannot serve this group: {reason}")
    register(group, backend == "shared", timeout)


def transport_of(group: dist.ProcessGroup, device_type: str = "cpu") -> str:
    """How collectives on tensors of that device run: "shared", or the torch.distributed backend ("gloo", "nccl").

    Collective over the group if it is the group's first use (see `state_of`).
    """
    if device_type == "cpu" and state_of(group).shared:
        return "shared"
    return backend_of(group, device_type)


def close(group: dist.ProcessGroup) -> None:
    """Forget the group and free its workspaces; destroying the process group does the same. Not collective."""
    REGISTRY.groups.pop(group, None)
    REGISTRY.kernels.pop(group, None)

"""What each process group has: its workspaces, its timeouts, and whether fused kernels can run for it.

Belongs here: the registry of groups and the functions that look a group up in it. The workspaces themselves are in
workspace.py (collectives of CPU tensors) and kernel_workspace.py (fused kernels).
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpformer.torch_private import stops_recomputation

from .calls import LAST, Calls
from .kernel_workspace import KernelState, KernelWorkspace, check_current_device, indexed
from .listeners import Listeners
from .shared_memory import TIMEOUT_SECONDS, SharedMemory, torch_backend, why_not_one_host, why_not_shared
from .sizes import PAGE
from .symmetric import allocate, why_not_symmetric
from .workspace import Workspace

BACKENDS = ("gloo", "shared")
KINDS = ("gather", "reduce")


@dataclass
class CollectiveState:
    """How one process group's collectives of CPU tensors run: through shared memory, or torch.distributed."""

    rank: int
    size: int
    shared: bool
    gather: Workspace
    reduce: Workspace


@dataclass
class Registry:
    """The only module-level state of tpformer.distributed. Groups are weak keys, and their states do not hold them."""

    collectives: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveState] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    kernels: weakref.WeakKeyDictionary[dist.ProcessGroup, KernelState] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    calls: weakref.WeakKeyDictionary[dist.ProcessGroup, Calls | None] = field(default_factory=weakref.WeakKeyDictionary)
    left: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = field(default_factory=weakref.WeakKeyDictionary)
    """Why groups without Calls cannot go on."""
    hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    timeout: float = TIMEOUT_SECONDS
    """Seconds that operations of groups first used from now on wait for a peer."""
    step: int | None = None
    """The step that groups first used from now on report."""
    beside: weakref.WeakSet[dist.ProcessGroup] = field(default_factory=weakref.WeakSet)
    """Groups of several ranks that a mesh's views have made, or that exchange tokens: while there are any, no group is
    alone on its devices."""
    recorded: Listeners[tuple[str, int]] = field(default_factory=Listeners)
    """Those who listen to collectives: (name, bytes) of each."""


REGISTRY = Registry()


class Inherited(weakref.WeakKeyDictionary):
    """What a forked child has in place of a registry's dict: it refuses the parent's groups.

    A child that took part would be taken for its parent. One that has left the parent's world has groups of its own.
    """

    def __init__(self, parents: object) -> None:
        super().__init__()
        self.parents = parents  # kept, because memory of the parent must not be freed here
        self.world = dist.group.WORLD

    def __getitem__(self, group: dist.ProcessGroup) -> Any:
        self._refuse()
        return super().__getitem__(group)

    def get(self, group: dist.ProcessGroup, default: Any = None) -> Any:
        self._refuse()
        return super().get(group, default)

    def _refuse(self) -> None:
        if self.world is dist.group.WORLD:
            raise RuntimeError(
                "this process was forked from a rank, and the group is its parent's: call the operation there, or "
                "destroy the process group here and make another one"
            )


def refuse_groups_of_parent() -> None:
    """Refuse the groups of a rank in a child that was forked from it."""
    if dist.is_initialized():
        for name in ("collectives", "kernels", "calls", "hosts"):
            setattr(REGISTRY, name, Inherited(getattr(REGISTRY, name)))


os.register_at_fork(after_in_child=refuse_groups_of_parent)


def check_group(group: object) -> None:
    """TypeError unless this is a process group. Asked where a group is first used, so later calls pay nothing."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r} is no process group: give a process group, as mesh.get_group(), or None for one rank "
            f"(torch's new_group gives a number to ranks that are not in the group: do not call the operation there)"
        )


def collective_state(group: dist.ProcessGroup) -> CollectiveState:
    """The state of the group's CPU collectives, made at first use; collective as `calls_of`."""
    state = REGISTRY.collectives.get(group)
    if state is None:
        check_group(group)
        shared = torch_backend(group, "cpu") == "gloo" and calls_of(group) is not None
        state = register(group, shared, REGISTRY.timeout)
    return state


def register(group: dist.ProcessGroup, shared: bool, timeout: float) -> CollectiveState:
    """Give the group a new state: with two empty workspaces, whose operations wait `timeout` seconds."""
    calls = calls_of(group) if shared else None
    state = CollectiveState(group.rank(), group.size(), shared, Workspace(timeout, calls), Workspace(timeout, calls))
    REGISTRY.collectives[group] = state
    return state


def use_backend(group: dist.ProcessGroup, backend: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Choose how the group's CPU collectives run, instead of the automatic choice. Collective over the group.

    backend: "shared" (memory that the ranks share) or "gloo" (torch.distributed).
    timeout: seconds that an operation through shared memory waits for a peer.
    Raises ValueError for another backend, RuntimeError with the reason if the group cannot share memory.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, not {backend!r}")
    if backend == "shared":
        reason = why_not_shared(group)
        if reason is not None:
            raise RuntimeError(f'the shared backend cannot serve this group: {reason}; use backend="gloo"')
    REGISTRY.calls.pop(group, None)
    register(group, backend == "shared", timeout)


def backend_of(group: dist.ProcessGroup, device_type: str = "cpu") -> str:
    """What carries collectives on tensors of that device: "shared", or torch.distributed's "gloo", "nccl", ...

    Collective over the group if this is its first use (see `collective_state`).
    """
    if device_type == "cpu" and collective_state(group).shared:
        return "shared"
    return torch_backend(group, device_type)


def close(group: dist.ProcessGroup) -> None:
    """Forget the group and free its workspaces; destroying the process group does the same. Not collective."""
    for states in (REGISTRY.collectives, REGISTRY.kernels, REGISTRY.calls):
        states.pop(group, None)
    REGISTRY.beside.discard(group)


def calls_of(group: dist.ProcessGroup) -> Calls | None:
    """What the group's ranks call, by which they see whether they agree; None where nobody compares.

    That is for one rank, for a dry run's group, and for ranks that cannot map one another's memory, as those of several
    hosts. Collective over the group at its first use, outside of CUDA-graph capture: small objects.
    """
    try:
        return REGISTRY.calls[group]
    except KeyError:
        pass
    check_group(group)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    calls = None
    if group.size() > 1 and torch_backend(group, "cpu") != "fake" and why_not_one_host(group) is None:
        ranks = dist.get_process_group_ranks(group)
        calls = Calls(SharedMemory(Calls.nbytes(), group), ranks)
    REGISTRY.calls[group] = calls
    return calls


@contextmanager
def unbroken(group: dist.ProcessGroup | None, operation: str) -> Iterator[None]:
    """Within, this rank and others exchange several messages: an exception makes the operation the group's last one.

    What this rank would send next, others would take for what they still wait for. So every later call of this rank
    raises RuntimeError with the reason, and on one host each peer's, too, also while it waits for an all-to-all.
    """
    try:
        yield
    except BaseException as error:
        if group is not None and group.size() > 1 and not stops_recomputation(error):
            _give_up(group, operation)
        raise


def note_call(group: dist.ProcessGroup, key: Hashable) -> None:
    """Tell the other ranks of a group of a call (Calls.note). RuntimeError if it is another one there, or comes after
    the group's last one."""
    calls = calls_of(group)
    if calls is not None:
        calls.note(key)
    elif (reason := REGISTRY.left.get(group)) is not None:
        raise RuntimeError(reason)


def _give_up(group: dist.ProcessGroup, operation: str) -> None:
    calls, rank = REGISTRY.calls.get(group), group.rank()
    named = str(rank) if calls is None else calls.named(rank)
    reason = f"{operation} was left by an exception on rank {named}; {LAST}"
    if calls is None:
        REGISTRY.left[group] = reason
    else:
        calls.fail(reason)


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A gloo group of the same ranks, for what their hosts tell one another beside the group's own operations.

    None for a group of a dry run, which has no other ranks. Collective over the group at first use.
    """
    if REGISTRY.hosts.get(group) is None and torch_backend(group, "cpu") != "fake":
        ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=REGISTRY.timeout)
        REGISTRY.hosts[group] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
    return REGISTRY.hosts.get(group)


def kernel_state(group: dist.ProcessGroup) -> KernelState:
    """The state of the group's fused kernels, made at first use; no communication."""
    state = REGISTRY.kernels.get(group)
    if state is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        state = REGISTRY.kernels[group] = KernelState(ranks, REGISTRY.timeout, REGISTRY.step)
    return state


def kernel_workspace(group: dist.ProcessGroup, kind: str, device: torch.device, epoch: int = 0) -> KernelWorkspace:
    """The group's workspace of that kind, "gather" or "reduce". Collective over the group at first use.

    epoch: where a new workspace starts to count (int32); tests start it just before the wrap.
    Raises RuntimeError with `why_no_kernels`'s reason if fused kernels cannot run, ValueError if the device is not the
    current one.
    """
    state = kernel_state(group)
    workspace = state.workspaces.get((kind, device))
    if workspace is None:
        device = indexed(device)
        workspace = state.workspaces.get((kind, device))
    if workspace is None or workspace.on_cuda:
        check_current_device(f"the {kind} workspace's tensors", device)
    if workspace is None:
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the {kind} workspace does not exist yet and cannot be made while a CUDA graph is captured: run the "
                "operation once outside of the capture, with its largest size"
            )
        reason = why_no_kernels(group, device)
        if reason is not None:
            raise RuntimeError(f"fused kernels cannot run for this group: {reason}")
        state.calls = calls_of(group)
        workspace = state.workspaces[kind, device] = KernelWorkspace(group, state, kind, device, epoch)
    return workspace


def why_no_kernels(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why fused kernels cannot run for the group on this device, None if they can; the same on all ranks.

    Collective over the group at its first use on the device (see `why_not_symmetric`); the answer is then kept.
    """
    reasons, device = kernel_state(group).reasons, indexed(device)
    if device not in reasons:
        # the first two reasons need no peers, and all ranks find the same
        reasons[device] = _why_not_on(device) or _why_not_here(device) or why_not_symmetric(group, device)
    return reasons[device]


def why_copied_flags(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why copy engines set the flags of fused gathers by copies (SymmetricMemory.copied_flags); None if they do not.

    The fused kernels must be able to run. Collective over the group at its first use on a CUDA device: it tries the
    flags in memory that is freed again. The answer is then kept; it is the same on all ranks. Under CUDA-graph capture
    nothing is tried.
    """
    if device.type != "cuda":
        return None
    state, device = kernel_state(group), indexed(device)
    if device not in state.copied_flags and not torch.cuda.is_current_stream_capturing():
        state.copied_flags[device] = allocate(PAGE, group, device, state.timeout).copied_flags
    return state.copied_flags.get(device)


def _why_not_on(device: torch.device) -> str | None:
    return None if device.type in ("cuda", "cpu") else f"there are no fused kernels for {device.type} devices"


def _why_not_here(device: torch.device) -> str | None:
    """Why Triton cannot run kernels on such a device in this process."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it exists for Linux): pip install triton"
    interpreted = "TRITON_INTERPRET" in os.environ  # without it, a CPU run hears its answer without importing triton
    if interpreted:
        from tpformer.kernels.launch import is_interpreted

        interpreted = is_interpreted()
    if device.type == "cpu" and not interpreted:
        return "on CPU Triton has only its interpreter, which is for tests (TRITON_INTERPRET=1)"
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET=1 copies CUDA tensors to the host, where peers' memory is not: unset it"
    return None


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """How long a fused operation of this group waits for a peer before it raises HangError.

    Kernels count polls, whose rate is measured on the device, so the time is approximate; and they count to 2**31, some
    twenty minutes on a GPU, at most. Not collective, but give all ranks the same.
    Raises ValueError unless seconds is positive.
    """
    if seconds <= 0:
        raise ValueError(f"a timeout must be positive, not {seconds}")
    state = kernel_state(group)
    state.timeout = seconds
    for workspace in state.workspaces.values():
        workspace.update_limit()


def check_all(step: int | None = None) -> None:
    """Raise HangError if a wait of any group has expired, or if a fused operation of it was begun and has not ended.

    RuntimeError if the ranks of a group are known to have made different calls. No synchronisation, no communication.
    step: reports name it for operations that begin from now on. The trainer calls this once a step.
    """
    states = list(REGISTRY.kernels.values())
    for state in states:
        state.check()
        state.check_ended()
    for calls in list(REGISTRY.calls.values()):
        if calls is not None:
            calls.check()
    if step is not None:
        REGISTRY.step = step
        for state in states:
            state.step = step

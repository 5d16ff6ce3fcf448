"""Workspaces of the fused kernels: the symmetric memory, flags and epoch behind a Channel.

Belongs here: their memory and its growth, the beginning of an operation, copies to peers, and the check for expired
waits. The kernels are in tpformer.kernels; groups.py looks a group's workspaces up.
"""

from __future__ import annotations

import functools
import os
import platform
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .calls import Calls
from .hang import Expired, HangError, Operation, Ring, describe
from .shared_memory import gather_objects
from .sizes import PAGE, power_of_two, round_up, slot_bytes
from .symmetric import OVERLAPPING, SymmetricMemory, allocate

if TYPE_CHECKING:
    from tpformer.kernels.protocol import Channel

WRITER_FLAGS_MINIMUM = 1024
FLAG_BYTES = 4
INTERPRETED_POLLS = 6_000  # of a wait in a second, in the interpreter with a core to itself
TIMED_POLLS, TIMINGS = 1 << 14, 5  # some 10 ms each
MAXIMUM_LIMIT = 2**31 - 16
# A flag that has not been set for 2**31 epochs would be taken for a later one. Half way there, all flags are made anew.
FLAG_AGE = 2**30
TARGETS = 64  # kinds of shards whose places at the peers are kept


class KernelWorkspace:
    """The symmetric memory of one kind of fused operation of one group, and its epoch.

    Each rank's region holds `world * writer_flags` int32 flags, rounded up to PAGE, then two slots of `capacity`
    bytes, for even and odd epochs. Memory per rank: 2 * capacity + 4 * world * writer_flags bytes. Capacity and
    writer_flags are powers of two, at least 1 MiB and 1024, and grow by a collective.
    Every operation waits for all ranks. All ranks begin the same operations in the same order, on one stream, and at
    most one is in flight (docs/kernels.md).
    epoch: where the count of operations starts; flags start there, too. Tests start it just before int32 wraps.
    """

    def __init__(self, group: dist.ProcessGroup, state: KernelState, kind: str, device: torch.device, epoch: int = 0):
        from tpformer.kernels.protocol import ERROR_WORDS, bump

        self.kind, self.device, self.state = kind, device, state
        self.rank, self.world = group.rank(), group.size()
        self.epoch = epoch
        """The epoch that `begin` has begun last. Once `captured`, the device's may be another."""
        self._born = epoch  # when the flags were last filled
        self.captured = False
        """Whether a CUDA graph holds operations of this workspace: its replays move the epoch without `begin`."""
        self.capacity = self.writer_flags = self._flag_bytes = 0
        self._group = weakref.ref(group)
        self.on_cuda = on_cuda = device.type == "cuda"
        self._copies_possible = os.environ.get(OVERLAPPING) != "1" if on_cuda else platform.machine() == "x86_64"
        with torch.inference_mode(False):
            self._epoch = torch.full((1,), epoch, dtype=torch.int32, device=device)
            self._stopped = torch.zeros(1, 2, dtype=torch.int32, device=device)
            self._error = torch.zeros(1, ERROR_WORDS.value, dtype=torch.int32, device="cpu", pin_memory=on_cuda)
        self._open: Operation | None = None  # begun, and not yet ended
        self.words = memoryview(self._error.numpy()[0])
        """The error word in host memory, read without synchronisation or dispatch."""
        self._copy_stream = torch.cuda.Stream(device) if on_cuda else None
        self._copying = False
        self._memory: SymmetricMemory | None = None
        self._channel: Channel | None = None
        self._kept: list[tuple[SymmetricMemory, Channel]] = []
        self._bump = bump
        self._targets: dict[tuple, list[torch.Tensor]] = {}

    @property
    def limit(self) -> int:
        """The polls after which a wait gives up.

        Always a multiple of 16: Triton compiles another kernel for other numbers, so that a new timeout would end in a
        compilation for which the peers wait.
        """
        polls = int(self.state.timeout * polls_per_second(self.device))
        return min(MAXIMUM_LIMIT, max(1, polls // 16) * 16)

    @property
    def copies_allowed(self) -> bool:
        """Whether `copy_gather` may serve the next operation; otherwise the kernel has to push.

        It may not under CUDA-graph capture or after one: a captured copy's target cannot change with the epoch.
        It may not if ranks share a device: a copy within a device may need an SM, and a waiting grid can hold them all.
        It may not on a CPU that could store the flag before the payload.
        """
        return self._copies_possible and not self.captured and not self._capturing()

    def _capturing(self) -> bool:
        return self.on_cuda and torch.cuda.is_current_stream_capturing()

    def begin(
        self,
        operation: str,
        nbytes: int,
        flags: int,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.uint8,
        more: Hashable = None,
    ) -> Channel:
        """Begin the next operation: moves the epoch on the current stream. Launch the operation's kernel there next,
        and `end` it. Whatever can raise comes before: peers wait for an operation that was begun, so if it does not
        come to its end, it is the group's last one.

        nbytes: what a rank's slot must hold, from all writers together. flags: how many flags each writer sets. Both
        are equal on all ranks. Collective over the group if one of them exceeds what earlier operations needed.
        shape, dtype: of what a rank sends or receives, equal on all ranks, for messages; by default the slot's bytes.
        more: what else is equal on all ranks.
        Raises HangError if a peer did not come to an earlier operation, or if an earlier one has not ended here;
        RuntimeError if the memory would have to grow under CUDA-graph capture, or if the ranks began different
        operations, shapes, dtypes or `more`.
        """
        state = self.state
        state.check()
        if self._open is not None:
            self.check_ended()
        call, calls = 0, state.calls
        if calls is not None:
            call = calls.note((operation, (nbytes,) if shape is None else shape, dtype, more))
        capturing = self._capturing()
        aged = (self.epoch - self._born) % 2**32 >= FLAG_AGE
        if self._channel is None or nbytes > self.capacity or flags > self.writer_flags or aged:
            if capturing:
                raise RuntimeError(
                    f"{operation} needs {nbytes} bytes and {flags} flags per writer, the {self.kind} workspace has "
                    f"{self.capacity} and {self.writer_flags}, and it cannot grow while a CUDA graph is captured: run "
                    "the operation once outside of the capture, with its largest size"
                )
            if calls is not None:
                calls.meet(call, state.timeout)
            self._grow(operation, nbytes, flags)
        self.captured |= capturing
        self.epoch = wrap(self.epoch + 1)
        epoch = None if self.captured else self.epoch
        self._open = state.ring.note(state.step, self.kind, operation, epoch)
        assert self._channel is not None
        self._bump(self._channel)
        return self._channel

    def _grow(self, operation: str, nbytes: int, flags: int) -> None:
        group = self._group()
        if group is None:
            raise RuntimeError(f"{operation}: the process group of this workspace is gone")
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
            self.state.check()
        # After this exchange all ranks have finished all earlier operations, and nobody writes to the old memory.
        wants = gather_objects((operation, nbytes, flags, int(self._epoch.item())), group)
        if any(want != wants[0] for want in wants):
            calls = ", ".join(
                f"rank {rank}: {name} of {size} bytes and {count} flags at epoch {epoch}"
                for rank, (name, size, count, epoch) in enumerate(wants)
            )
            raise RuntimeError(
                f"the ranks began different operations in the {self.kind} workspace: {calls}; every rank must call the "
                "same ones, in the same order, with equal shapes"
            )
        self.epoch = wants[0][3]
        if self.captured and self._memory is not None and self._channel is not None:
            self._kept.append((self._memory, self._channel))  # CUDA graphs hold its addresses
        capacity = max(self.capacity, slot_bytes(nbytes))
        writer_flags = max(WRITER_FLAGS_MINIMUM, self.writer_flags, power_of_two(flags))
        self._memory = self._channel = None
        self._targets.clear()
        self._born = self.epoch
        self.capacity = self.writer_flags = 0  # stays so if the allocation raises
        with torch.inference_mode(False):
            self._memory, self._channel = self._allocate(group, capacity, writer_flags)
        self.capacity, self.writer_flags = capacity, writer_flags

    def _allocate(self, group: dist.ProcessGroup, capacity: int, writer_flags: int) -> tuple[SymmetricMemory, Channel]:
        """New memory and its channel. All flags start at the present epoch, before that of any operation to come."""
        from tpformer.kernels.protocol import Channel

        flag_bytes = self._flag_bytes = round_up(self.world * writer_flags * FLAG_BYTES, PAGE)
        memory = allocate(flag_bytes + 2 * capacity, group, self.device, self.state.timeout)
        memory.peer(self.rank, (self.world * writer_flags,), torch.int32).fill_(self.epoch)
        memory.barrier()
        table = memory.pointers.view(1, self.world)
        self.state.copied_flags[self.device] = memory.copied_flags
        slots = [memory.peer(self.rank, (capacity,), torch.uint8, flag_bytes + parity * capacity) for parity in (0, 1)]
        channel = Channel(
            rank=self.rank,
            served=1,
            world=self.world,
            data=(table + flag_bytes).to(self.device),
            flags=table.to(self.device, copy=True),
            epoch=self._epoch,
            error=self._error,
            slots=(slots[0], slots[1]),
            parity_stride=capacity,
            capacity=capacity,
            writer_flags=writer_flags,
            limit=self.limit,
            stopped=self._stopped,
            counters=torch.zeros(1, self.world * writer_flags, dtype=torch.int32, device=self.device),
        )
        return memory, channel

    def copy_gather(self, shard: torch.Tensor, keep: bool = False) -> None:
        """Copy the contiguous `shard` to every peer, for the operation just begun; call `join` after its kernel.

        At each peer it goes to byte rank * shard.nbytes of the slot. Then flag 0 of this writer is set to the epoch
        (SymmetricMemory.set_flag).
        `shard` must not be written before all peers' flags have come. keep: this rank's own slot gets it, too.
        """
        assert self._memory is not None and self._channel is not None
        if self.captured or self._capturing():
            raise RuntimeError(
                f"copies cannot serve the {self.kind} workspace once a CUDA graph uses it: let the kernel push"
            )
        nbytes, parity = shard.nbytes, self.epoch & 1
        if not shard.is_contiguous() or nbytes * self.world > self.capacity:
            raise ValueError(
                f"a shard of shape {tuple(shard.shape)} must be contiguous, and {self.world} of its {nbytes} bytes "
                f"must fit a slot of {self.capacity} bytes: give begin() that size"
            )
        self._copying = True
        flag = self.rank * self.writer_flags * FLAG_BYTES
        own, *targets = self._targets_of(shard.shape, shard.dtype, parity)
        with torch.inference_mode():  # without autograd a copy takes the host a third less
            if self._copy_stream is None:
                self._send(shard, targets, flag)
            else:
                self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self._copy_stream):
                    self._send(shard, targets, flag)
            if keep:
                own.copy_(shard, non_blocking=True)

    def _send(self, shard: torch.Tensor, targets: list[torch.Tensor], flag: int) -> None:
        """Copy the shard to the targets, those of the peers in the order of the ring, and set the flag at each."""
        assert self._memory is not None
        peer, set_flag = self.rank, self._memory.set_flag
        for target in targets:
            peer = (peer - 1) % self.world
            target.copy_(shard, non_blocking=True)
            set_flag(peer, flag, self.epoch, self._epoch)

    def _targets_of(self, shape: torch.Size, dtype: torch.dtype, parity: int) -> list[torch.Tensor]:
        """The places of this rank's shard in each rank's slot: its own slot, then those of rank - 1, rank - 2, ...

        In this order each rank receives from one peer at a time. The views for TARGETS kinds of shards are kept.
        """
        key = shape, dtype, parity
        if key not in self._targets:
            assert self._memory is not None
            if len(self._targets) >= TARGETS:
                self._targets.clear()
            offset = self._flag_bytes + parity * self.capacity + self.rank * shape.numel() * dtype.itemsize
            with torch.inference_mode(False):
                ranks = [(self.rank - step) % self.world for step in range(self.world)]
                self._targets[key] = [self._memory.peer(rank, shape, dtype, offset) for rank in ranks]
        return self._targets[key]

    def join(self) -> None:
        """The operation's kernel has been launched: the current stream waits for the copies, if there were any, before
        its input may be reused. A stream under capture must not wait for one that is not.
        """
        if self._copy_stream is not None and self._copying:
            torch.cuda.current_stream(self.device).wait_stream(self._copy_stream)
        self._copying, self._open = False, None

    def end(self) -> None:
        """End an operation whose kernel has been launched: `join`, and HangError if a wait of the group has expired in
        a kernel that has finished; no synchronisation."""
        if self._copying:
            self.join()
        self._open = None
        self.state.check()

    def check_ended(self) -> None:
        """HangError, from now on for all operations of the group, if an operation was begun and has not ended."""
        if self._open is not None:
            self.state.fail(
                f"rank {self.rank} (global rank {self.state.global_ranks[self.rank]}) began {self._open.name} at "
                f"{self._open.place} and has not ended it, because of an exception, a gather that nobody waited for, "
                f"or another thread: the group's fused operations cannot go on, restart from the last checkpoint"
            )

    def expired(self) -> Expired | None:
        """What the error word says, without synchronisation: a kernel that still runs may set it later."""
        if not self.words[0]:
            return None
        _, peer, seen, wanted = self.words
        return Expired(self.kind, self.rank, peer, seen, wanted, self.limit, self.state.timeout)

    def update_limit(self) -> None:
        """Let kernels that are launched from now on wait as long as the group's timeout says."""
        if self._channel is not None:
            self._channel = replace(self._channel, limit=self.limit)


@dataclass
class KernelState:
    """What the fused kernels of one process group have in common; it holds no reference to the group."""

    global_ranks: tuple[int, ...]
    timeout: float
    """Seconds that an operation waits for a peer."""
    step: int | None = None
    """The step that operations begin in, for reports."""
    ring: Ring = field(default_factory=Ring)
    reasons: dict[torch.device, str | None] = field(default_factory=dict)
    copied_flags: dict[torch.device, str | None] = field(default_factory=dict)
    """SymmetricMemory.copied_flags of the devices on which memory was allocated."""
    workspaces: dict[tuple[str, torch.device], KernelWorkspace] = field(default_factory=dict)
    calls: Calls | None = None
    """What ranks compare their calls by (groups.calls_of); None if they cannot."""
    report: str | None = None
    """The first HangError's message; every later check raises it again."""

    def check(self) -> None:
        """Raise HangError if a wait in one of the group's workspaces has expired."""
        if self.report is not None:
            raise HangError(self.report)
        for workspace in self.workspaces.values():
            if workspace.words[0] and (expired := workspace.expired()):
                known = self.calls and self.calls.found()
                self.fail(describe(expired, self.ring, self.global_ranks) + (f"\n{known}" if known else ""))

    def fail(self, report: str) -> None:
        """Raise HangError, now and in all later operations. Peers of this host hear its first line in a later call."""
        self.report = report
        if self.calls is not None:
            self.calls.fail(report.partition("\n")[0])
        raise HangError(report)

    def check_ended(self) -> None:
        """HangError if an operation was begun in one of the group's workspaces and has not ended."""
        for workspace in self.workspaces.values():
            workspace.check_ended()


@functools.cache
def polls_per_second(device: torch.device) -> float:
    """How often a wait polls a flag of this device in a second. On CUDA it is measured, once per process.

    The fastest of several measurements counts, because the first may find the GPU's clock low, or another process
    there. Later waits poll no faster than that but for a clock that rises above it: they end at the timeout, or after
    it if links or other programs slow their polls down.
    """
    if device.type == "cpu":
        return INTERPRETED_POLLS
    return TIMED_POLLS / min(seconds_of_polls(device, TIMED_POLLS) for _ in range(TIMINGS))


def seconds_of_polls(device: torch.device, polls: int) -> float:
    """How long a CUDA device takes for a wait that gives up after so many polls; synchronises the current stream."""
    from tpformer.kernels.protocol import poll_in_vain

    flag = torch.zeros(1, dtype=torch.int32, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    poll_in_vain(flag, polls)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def check_current_device(what: str, device: torch.device) -> None:
    """ValueError for another GPU than the current one, because Triton launches on the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{what} on {device}, but Triton launches on the current device, which is cuda:"
            f"{torch.cuda.current_device()}: call torch.cuda.set_device({device.index}) first"
        )


def indexed(device: torch.device) -> torch.device:
    """The device with its index, so that "cuda" and "cuda:0" are one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def wrap(value: int) -> int:
    """value as int32 arithmetic leaves it."""
    return (value + 2**31) % 2**32 - 2**31

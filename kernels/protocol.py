"""How the kernels of a group's ranks talk through symmetric memory: flags, epochs, bounded waits.

Belongs here: what every communicating kernel uses; no tiles, no arithmetic, no process groups. Rules: docs/kernels.md.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .description import Lasting
from .launch import is_interpreted, packed_width
from .replay import launch, replayed

INTERPRETED = tl.constexpr(is_interpreted())
# A report is int32 words: 1 if a wait has expired, the peer it was for, the flag that it saw, the epoch it wanted.
ERROR_WORDS = tl.constexpr(4)
VIEWS = 64  # of a channel's slots, for which it need not be asked again


@dataclass(frozen=True, eq=False)
class Channel(Lasting):
    """One workspace as a launch sees it. A launch serves one rank, or all ranks of a group as virtual ranks.

    A rank's region has `writer_flags` int32 flags for each writer, and two slots of `capacity` bytes: slot 0 for even
    epochs, slot 1 for odd ones (the epoch's parity). The operation at epoch e writes only the slots of e's parity, sets
    flags to e, and waits until every rank's flags have reached e. Therefore a rank that reaches e + 2 knows that all
    ranks have finished e, and may overwrite the slots of that parity.
    """

    rank: int
    """The first rank that the launch serves. A program serves this rank + program_id(1)."""
    served: int
    """How many ranks the launch serves: 1, or world."""
    world: int
    data: Tensor
    """int64 (served, world): the address of each rank's slot of parity 0, as the served rank sees it."""
    flags: Tensor
    """int64 (served, world): the address of each rank's flags. Those of writer w begin at w * writer_flags."""
    epoch: Tensor
    """int32 (served,), device memory: the number of the operation in progress. Only `bump` changes it."""
    error: Tensor
    """int32 (served, ERROR_WORDS), host memory that kernels can write: the report of the first wait that expired. Its
    first word is written last."""
    stopped: Tensor
    """int32 (served, 2), device memory. First 1 once a wait has expired. In later operations that rank no longer waits
    for others, so it must not push or publish again: it would overwrite slots that others still read. Second what the
    first was when the operation in progress began. Only `bump` changes it."""
    slots: tuple[Tensor, Tensor]
    """The slots of parity 0 and of parity 1 into which the served ranks receive, as bytes (served * capacity)."""
    parity_stride: int
    """Bytes from a rank's slot of parity 0 to that of parity 1; a multiple of 16."""
    capacity: int
    """Bytes of one slot of one rank; a multiple of 16."""
    writer_flags: int
    """Flags of each writer."""
    limit: int
    """Polls after which a wait gives up."""
    counters: Tensor
    """int32 (served, world * writer_flags), device memory that only the rank itself uses; zeros between operations."""
    views: dict[tuple, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Views that `gathered` has returned, at most VIEWS of them."""

    def require(self, operation: str, nbytes: int, flags: int, sized_by: str | None = None) -> None:
        """ValueError if an operation needs larger slots or more flags than there are, and would write beyond them.

        sized_by: the function that gives both; unset, the operation's own.
        """
        if nbytes > self.capacity or flags > self.writer_flags:
            raise ValueError(
                f"{operation} needs {nbytes} bytes per slot and {flags} flags per writer, but the channel has "
                f"{self.capacity} and {self.writer_flags}: size it by {sized_by or operation + '_space'}"
            )

    def slot(self, parity: int, stride: int, like: Tensor) -> Tensor:
        """The served ranks' slots of a parity as one matrix with rows of `stride` elements of like's dtype."""
        total = self.served * self.capacity // (stride * like.element_size())
        return self.slots[parity].view(like.dtype)[: total * stride].view(total, stride)

    def gathered(self, parity: int, shard: Tensor) -> Tensor:
        """The rows (world * rows, K) that a gather of shards like this one left in the slot, without a copy.

        The channel must serve one rank, and the gather must have had keep=True. The workspace's next operation may
        overwrite the rows, so neither autograd nor the user may hold them.
        """
        key = parity, shard.shape, shard.dtype
        if key not in self.views:
            if len(self.views) >= VIEWS:
                self.views.clear()
            with torch.inference_mode(False):
                rows = self.slot(parity, packed_width(shard.shape[1], shard.element_size()), shard)
                self.views[key] = rows[: self.world * len(shard), : shard.shape[1]]
        return self.views[key]

    @cached_property
    def links(self) -> "Links":
        """All that a kernel takes of this channel, except the rank."""
        return Links(
            self.data, self.flags, self.epoch, self.error, self.stopped, self.counters,
            self.limit, self.parity_stride, self.writer_flags,
        )  # fmt: skip


class Links(NamedTuple):
    """The members of a Channel that every communicating kernel takes, as one argument. The rank is an argument of its
    own: inside of this one, Triton would compile a kernel for each kind of rank (arguments.py)."""

    data: Any
    flags: Any
    epoch: Any
    error: Any
    stopped: Any
    counters: Any
    limit: Any
    parity_stride: Any
    writer_flags: Any


class Served(NamedTuple):
    """The channel of the rank that a program serves, on the device."""

    data: Any
    """Pointer to int64 (world,): this rank's row of Channel.data."""
    flags: Any
    """Pointer to int64 (world,): this rank's row of Channel.flags."""
    epoch: Any
    """int32: the number of the operation in progress."""
    error: Any
    """Pointer to int32 (ERROR_WORDS,)."""
    stopped: Any
    """Pointer to int32 (2,)."""
    rank: Any
    world: Any
    counters: Any
    """Pointer to int32 (world * writer_flags,)."""
    parity_stride: Any
    writer_flags: Any


@triton.jit
def bump_kernel(epoch, stopped, served):
    """One program adds 1 to the epoch of each served rank, and notes whether the rank has given up."""
    for rank in range(served):
        tl.store(epoch + rank, tl.load(epoch + rank) + 1)
        tl.store(stopped + 2 * rank + 1, tl.load(stopped + 2 * rank))


@replayed
def bump(channel: Channel) -> None:
    """Begin an operation: a kernel adds 1 to the epoch, in stream order before the operation's own.

    It is a kernel of its own because a program of the operation would change words that others still read. The
    epoch is in device memory, so that a CUDA graph goes on counting when it is replayed.
    """
    launch(bump_kernel, (1,), channel.epoch, channel.stopped, channel.served, num_warps=1)


@triton.jit
def serve(links, rank, WORLD: tl.constexpr):
    """(Served, limit) of the rank that this program serves. The limit is 0 if that rank gave up in an earlier
    operation; code that pushes or publishes must check that it is not."""
    row = tl.program_id(1)
    # Another program of the rank may give up at this moment. Warps that load the word that it changes may disagree, and
    # then some wait at barriers that the others never reach. Hence all load the word that `bump` has written.
    stopped = links.stopped + 2 * row
    limit = tl.where(tl.load(stopped + 1) == 0, links.limit, 0)
    me = Served(
        links.data + row * WORLD, links.flags + row * WORLD, tl.load(links.epoch + row),
        links.error + row * ERROR_WORDS, stopped, rank + row, WORLD,
        links.counters + row * WORLD * links.writer_flags, links.parity_stride, links.writer_flags,
    )  # fmt: skip
    return me, limit


@triton.jit
def reach(limit, WORLD: tl.constexpr):
    """How many ranks to push to: WORLD, or none once this rank has given up."""
    return tl.where(limit > 0, WORLD, 0)


@triton.jit
def slot_of(me, rank, DTYPE: tl.constexpr):
    """Pointer to `rank`'s slot of this epoch's parity."""
    address = tl.load(me.data + rank) + (me.epoch & 1).to(tl.int64) * me.parity_stride
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)  # the hint is lost if given before the cast


@triton.jit
def slots_of(me, END: tl.constexpr, DTYPE: tl.constexpr):
    """slot_of the next END - 1 ranks of the ring, all loaded at once: of the peers if END is WORLD, and of this rank,
    too, if END is WORLD + 1."""
    slots = ()
    for step in tl.static_range(1, END):
        slots = slots + (slot_of(me, (me.rank + step) % me.world, DTYPE),)  # type: ignore[assignment]
    return slots


@triton.jit
def flags_of(me, rank, writer):
    """Pointer to the first flag that `writer` sets at `rank`."""
    return tl.load(me.flags + rank).to(tl.pointer_type(tl.int32)) + writer * me.writer_flags


@triton.jit
def barrier():
    """tl.debug_barrier, but in a loop that has to be pipelined: the compiler pipelines none with that."""
    if INTERPRETED:  # there is no inline assembly, and a program is one thread
        tl.debug_barrier()
    else:
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def publish(flag, epoch):
    """Set a flag. Whoever sees it also sees all earlier stores of this program, and what the program acquired.

    The barrier makes the release cover the other warps' stores; triton before 3.9 puts none there.
    """
    barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def announce(me, flag, END: tl.constexpr):
    """Set this rank's flag number `flag` at the next END - 1 ranks of the ring: at all peers if END is WORLD, and at
    this rank, too, if END is WORLD + 1. It is what `publish` at each of them would be, with one wait for the earlier
    stores to arrive instead of one for each flag.

    A release on one flag does not order the same stores before a relaxed store to another flag. A fence does: with a
    later relaxed store of the same thread it is a release pattern, whichever flag that store is to, and whoever
    acquires the flag also sees what came before the fence. The barrier puts the stores of the other warps there.
    """
    flags = ()
    for step in tl.static_range(1, END):
        flags = flags + (flags_of(me, (me.rank + step) % me.world, me.rank) + flag,)  # type: ignore[assignment]
    tl.debug_barrier()
    if INTERPRETED:  # there is no inline assembly
        for step in tl.static_range(1, END):
            tl.atomic_xchg(flags[step - 1], me.epoch, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [me.epoch], dtype=tl.int32, is_pure=False, pack=1
        )
        for step in tl.static_range(1, END):
            tl.atomic_xchg(flags[step - 1], me.epoch, sem="relaxed", scope="sys")


@triton.jit
def least(x, PEERS: tl.constexpr):
    """The smallest of a block of values, or the value if it is one."""
    if PEERS > 1:
        x = tl.min(x)
    return x


@triton.jit
def poll(flags, epoch, limit, PEERS: tl.constexpr = 1):
    """Spin until the flags have reached this epoch, at most `limit` times, and return their last values. PEERS > 1: a
    block of flags, which are asked for at the same time. Epochs may wrap."""
    seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
    polls = 0
    while (least(seen - epoch, PEERS) < 0) & (polls < limit):
        seen = tl.atomic_add(flags, 0, sem="acquire", scope="sys")
        polls += 1
    return seen


@triton.jit
def wait(me, flag, first, limit, PEERS: tl.constexpr = 1):
    """Spin until the flags of PEERS writers, from `first` on in the ring of ranks, have all reached this epoch, and
    return the limit for later waits. PEERS: 1, or all ranks. flag: pointer to that of writer 0.

    After `limit` polls it stops the rank, reports, and returns 0. With limit 0 a wait polls once and reports nothing,
    so the kernel comes to its end; code that reads what arrived must check the limit, as a peer may still write there.
    Call it in an outer loop: the software pipeliner moves loads to before a wait that stands in a pipelined loop.
    """
    peers = first
    if PEERS > 1:  # a block has a power of two of flags, so some are asked for twice
        peers = (first + tl.arange(0, triton.next_power_of_2(PEERS))) % me.world
    seen = poll(flag + peers * me.writer_flags, me.epoch, limit, PEERS)
    if (least(seen - me.epoch, PEERS) < 0) & (limit > 0):
        late = least(tl.where(seen - me.epoch < 0, peers, me.world), PEERS)
        give_up(me, late, least(tl.where(peers == late, seen, 2**31 - 1), PEERS))
        limit = 0
    return limit


@triton.jit
def give_up(me, peer, seen):
    """Stop the rank. The first of its programs to do so reports the peer that did not come, and what its flag was.

    The report's first word is written last, by a release: the host may look at any moment, and sees all of it or none.
    The peer that was waited for may have come, and itself wait for a third rank before it sends its sums. But every
    operation sets the flag 0 of each writer before it waits for anybody, so who has not set it is to be named.
    """
    if tl.atomic_xchg(me.stopped, 1, sem="relaxed", scope="sys") == 0:
        for step in range(1, me.world):
            other = (me.rank + step) % me.world
            first = tl.atomic_add(flags_of(me, me.rank, other), 0, sem="relaxed", scope="sys")
            if first - me.epoch < 0:
                peer = other
                seen = first
        tl.store(me.error + 1, peer)
        tl.store(me.error + 2, seen)
        tl.store(me.error + 3, me.epoch)
        publish(me.error, 1)


@triton.jit
def poll_in_vain_kernel(flag, limit):
    """Poll a flag that stays 0, as a wait does that gives up after `limit` polls."""
    poll(flag, 1, limit)


def poll_in_vain(flag: Tensor, limit: int) -> None:
    """Launch what a host times to learn how long polls take, with the fewest warps of all kernels that wait: more of
    them would take longer for a poll."""
    poll_in_vain_kernel[(1,)](flag, limit, num_warps=4)


@triton.jit
def order_tma_after_acquire(epoch, TMA: tl.constexpr):
    """Fence between an acquire and TMA loads: peers write through the generic proxy, TMA reads by the async one."""
    if TMA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1
        )

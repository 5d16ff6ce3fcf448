"""How the kernels of a group's ranks talk through symmetric memory: flags, epochs, bounded waits.

Belongs here: what every communicating kernel uses, on the device and on the host. No tiles, no arithmetic (tile.py),
no process groups. docs/kernels.md has the rules, and says why each is there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import packed_width

# A report is int32 words: 1 if a wait has expired, the peer it was for, the flag that it saw, the epoch it wanted.
ERROR_WORDS = tl.constexpr(4)


class Channel(NamedTuple):
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
    """int32 (served, ERROR_WORDS), host memory that kernels can write: the report of the first wait that expired."""
    stopped: Tensor
    """int32 (served,), device memory: 1 once a wait has expired. That rank no longer waits for others, so it must not
    push or publish again: it would overwrite slots that others still read."""
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

    def require(self, operation: str, nbytes: int, flags: int) -> None:
        """ValueError if an operation needs larger slots or more flags than there are, and would write beyond them."""
        if nbytes > self.capacity or flags > self.writer_flags:
            raise ValueError(
                f"{operation} needs {nbytes} bytes per slot and {flags} flags per writer, but the channel has "
                f"{self.capacity} and {self.writer_flags}: size it by {operation}_space"
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
        rows = self.slot(parity, packed_width(shard.shape[1], shard.element_size()), shard)
        return rows[: self.world * len(shard), : shard.shape[1]]

    @property
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
    """Pointer to one int32."""
    rank: Any
    counters: Any
    """Pointer to int32 (world * writer_flags,)."""
    parity_stride: Any
    writer_flags: Any


@triton.jit
def bump_kernel(epoch, served):
    """One program adds 1 to the epoch of each served rank."""
    for rank in range(served):
        tl.store(epoch + rank, tl.load(epoch + rank) + 1)


def bump(channel: Channel) -> None:
    """Begin an operation: a kernel adds 1 to the epoch, in stream order before the operation's own.

    It is a kernel of its own because a program of the operation would change the epoch while others still read it. The
    epoch is in device memory, so that a CUDA graph goes on counting when it is replayed.
    """
    bump_kernel[(1,)](channel.epoch, channel.served, num_warps=1)


@triton.jit
def serve(links, rank, WORLD: tl.constexpr):
    """(Served, limit) of the rank that this program serves. The limit is 0 once that rank has given up; code that
    pushes or publishes must check that it is not."""
    row = tl.program_id(1)
    limit = tl.where(tl.load(links.stopped + row) == 0, links.limit, 0)
    me = Served(
        links.data + row * WORLD, links.flags + row * WORLD, tl.load(links.epoch + row),
        links.error + row * ERROR_WORDS, links.stopped + row, rank + row,
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
def flags_of(me, rank, writer):
    """Pointer to the first flag that `writer` sets at `rank`."""
    return tl.load(me.flags + rank).to(tl.pointer_type(tl.int32)) + writer * me.writer_flags


@triton.jit
def publish(flag, epoch):
    """Set a flag. Whoever sees it also sees all earlier stores of this program, and what the program acquired.

    The barrier makes the release cover the other warps' stores; triton before 3.9 puts none there.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def wait(me, flag, peer, limit):
    """Spin until the peer's flag has reached this epoch, and return the limit for later waits. Epochs may wrap.

    After `limit` polls it writes the report and returns 0. With limit 0 a wait polls once and reports nothing, so the
    kernel comes to its end, and the report names the first peer that did not come.
    Call it in an outer loop: the software pipeliner moves loads to before a wait that stands in a pipelined loop.
    """
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen - me.epoch < 0) & (polls < limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
    if (seen - me.epoch < 0) & (limit > 0):
        if tl.load(me.error) == 0:
            tl.store(me.error + 1, peer)
            tl.store(me.error + 2, seen)
            tl.store(me.error + 3, me.epoch)
            tl.store(me.error, 1)
        tl.store(me.stopped, 1)
        limit = 0
    return limit


@triton.jit
def order_tma_after_acquire(epoch, TMA: tl.constexpr):
    """Fence between an acquire and TMA loads: peers write through the generic proxy, TMA reads by the async one."""
    if TMA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1
        )

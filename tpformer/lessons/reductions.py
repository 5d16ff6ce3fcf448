"""All-reduces of data parallelism as messages between ranks: the algorithms whose costs stand in algorithms.py.

Belongs here: who sends what to whom, and in which order sums are taken. They are for teaching, and for a comparison
with a library's all-reduce, which is faster. Works with any torch.distributed backend that can send tensors of the
device.

In each of them all ranks end with the same bits, every time: a sum is made by one rank and sent, or made by several
ranks in one order, or of two numbers, whose order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpformer.distributed.collectives import record

from .algorithms import HIERARCHICAL, levels

Message = tuple[int, Tensor]  # the other rank, by its place among the members, and what is sent, or written


@dataclass(frozen=True)
class Members:
    """Ranks of a group that exchange together, in this order. This rank is one of them. what: names it in an error."""

    what: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @cached_property
    def me(self) -> int:
        """The place of this rank."""
        return self.ranks.index(self.group.rank())

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> None:
        """One step: send and receive at the same time, and wait for all of it. Messages without values are left out.

        tag: keeps messages of several threads apart (gloo alone has it). Each message is recorded as a "send" by the
        rank that sends it.
        Errors: RuntimeError that names the rank, if one does not answer within the group's timeout or has died.
        """
        messages = [
            *((self.ranks[peer], dist.irecv, x) for peer, x in receives if x.numel()),
            *((self.ranks[peer], dist.isend, x) for peer, x in sends if x.numel()),
        ]
        for _, way, x in messages:
            if way is dist.isend:
                record("send", x.nbytes)
        # NCCL has to know messages that go both ways together; gloo takes them one by one, and tells which one failed
        together = any(x.is_cuda for _, _, x in messages)
        batches = [messages] if together else [[message] for message in messages]
        begun = [(batch, self._named(batch, partial(self._begin, batch, tag))) for batch in batches]
        for batch, works in begun:
            for work in works:
                self._named(batch, work.wait)

    def _begin(self, batch: Sequence[tuple[int, Callable, Tensor]], tag: int) -> list[dist.Work]:
        options: dict[str, Any] = {"group": self.group, "tag": tag}
        return dist.batch_isend_irecv([dist.P2POp(way, x, group_peer=rank, **options) for rank, way, x in batch])

    def _named(self, batch: Sequence[tuple[int, Callable, Tensor]], run: Callable[[], Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            ranks = sorted({rank for rank, _, _ in batch})
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {ranks}"
            raise RuntimeError(
                f"{self.what} failed on rank {self.group.rank()} of {self.group.size()}: {who} "
                f"has died, or did not answer in time ({str(error).splitlines()[0]})"
            ) from error


def driver(members: Members, x: Tensor) -> None:
    """All send to the first rank, which adds in rank order and sends the sum back, one message after the other."""
    others = range(1, len(members.ranks))
    if members.me:
        members.exchange([(0, x)], [])
        members.exchange([], [(0, x)])
        return
    part = x.new_empty(x.shape)
    for peer in others:
        members.exchange([], [(peer, part)])
        x += part
    for peer in others:
        members.exchange([(peer, x)], [])


def all_pairs(members: Members, x: Tensor) -> None:
    """Every rank sends its values to every other one, and adds all of them in rank order."""
    ranks, me = len(members.ranks), members.me
    parts = x.new_empty(ranks, len(x))
    parts[me] = x
    for distance in range(1, ranks):
        to, source = (me + distance) % ranks, (me - distance) % ranks
        members.exchange([(to, x)], [(source, parts[source])])
    x.copy_(parts[0])
    for part in parts[1:]:
        x += part


def ring_scatter(members: Members, x: Tensor) -> Tensor:
    """Partial sums go around a ring; the part of x returned, number `me`, is then the sum, and the others are not."""
    ranks, me = len(members.ranks), members.me
    chunks = x.tensor_split(ranks)
    for step in range(1, ranks):
        sent, added = chunks[(me - step) % ranks], chunks[(me - step - 1) % ranks]
        part = added.new_empty(added.shape)
        members.exchange([((me + 1) % ranks, sent)], [((me - 1) % ranks, part)])
        added += part
    return chunks[me]


def ring_gather(members: Members, x: Tensor) -> None:
    """Each rank's part, number `me`, goes around the ring to all others."""
    ranks, me = len(members.ranks), members.me
    chunks = x.tensor_split(ranks)
    for step in range(ranks - 1):
        sent, received = chunks[(me - step) % ranks], chunks[(me - step - 1) % ranks]
        members.exchange([((me + 1) % ranks, sent)], [((me - 1) % ranks, received)])


def ring(members: Members, x: Tensor) -> None:
    """A reduce-scatter around the ring, then an all-gather."""
    ring_scatter(members, x)
    ring_gather(members, x)


def tree(members: Members, x: Tensor) -> None:
    """Sums go up a binary tree, from whose root the sum comes down. Rank i has the children 2 i + 1 and 2 i + 2."""
    me = members.me
    children = [child for child in (2 * me + 1, 2 * me + 2) if child < len(members.ranks)]
    parts = [x.new_empty(x.shape) for _ in children]
    members.exchange([], list(zip(children, parts, strict=True)))
    for part in parts:
        x += part
    if me:
        members.exchange([((me - 1) // 2, x)], [])
        members.exchange([], [((me - 1) // 2, x)])
    members.exchange([(child, x) for child in children], [])


def folded(members: Members, x: Tensor, run: Callable[[int], None]) -> None:
    """run(doublings) on the first 2**doublings ranks. Each later rank gives them its values, and gets the sum."""
    doublings, extra = levels(len(members.ranks))
    core, me = 1 << doublings, members.me
    if me >= core:
        members.exchange([(me - core, x)], [])
        members.exchange([], [(me - core, x)])
        return
    if me < extra:
        part = x.new_empty(x.shape)
        members.exchange([], [(me + core, part)])
        x += part
    run(doublings)
    if me < extra:
        members.exchange([(me + core, x)], [])


def butterfly(members: Members, x: Tensor) -> None:
    """Recursive doubling: partners at a distance of 1, 2, 4, ... exchange all of their sums, and both add."""

    def run(doublings: int) -> None:
        part = x.new_empty(x.shape)
        for level in range(doublings):
            partner = members.me ^ (1 << level)
            members.exchange([(partner, x)], [(partner, part)])
            x.add_(part)

    folded(members, x, run)


def halving_doubling(members: Members, x: Tensor) -> None:
    """Partners exchange half of what they still add up, at distances from P / 2 to 1; then the halves come back."""

    def run(doublings: int) -> None:
        halves, whole = [], x
        for level in reversed(range(doublings)):
            bit = 1 << level
            partner, upper = members.me ^ bit, bool(members.me & bit)
            kept, sent = (half for half in whole.tensor_split(2)[:: -1 if upper else 1])
            part = kept.new_empty(kept.shape)
            members.exchange([(partner, sent)], [(partner, part)])
            kept += part
            halves.append((partner, kept, sent))
            whole = kept
        for partner, kept, sent in reversed(halves):
            members.exchange([(partner, kept)], [(partner, sent)])

    folded(members, x, run)


def hierarchical(members: Members, x: Tensor, inside: int) -> None:
    """Rings in the nodes, of `inside` neighbouring ranks each, add up; rings across the nodes add the parts."""
    node, place = divmod(members.me, inside)
    own = range(node * inside, (node + 1) * inside)
    here = Members(members.what, members.group, tuple(members.ranks[each] for each in own))
    across = Members(members.what, members.group, members.ranks[place::inside])
    ring(across, ring_scatter(here, x))
    ring_gather(here, x)


RUNS: dict[str, Callable[[Members, Tensor], None]] = {
    run.__name__: run for run in (driver, all_pairs, ring, tree, butterfly, halving_doubling)
}
RUNNABLE = (*RUNS, HIERARCHICAL)


def reduce_by(algorithm: str, x: Tensor, group: dist.ProcessGroup, *, inside: int = 1) -> Tensor:
    """Add up x, of any shape, over the ranks of the group, in place and by this algorithm; returns x.

    algorithm: one of RUNNABLE. In "hierarchical", `inside` neighbouring ranks are one node.
    Numerics: in x's dtype, so use one that can add up; all ranks end with the same bits.
    Communicates: messages, each recorded as a "send"; how many, and of how many values, is in algorithms.py.
    Errors: ValueError for an unknown algorithm, an x that is not contiguous, and ranks that `inside` does not divide;
    RuntimeError that names a rank which has died or does not answer in time.
    """
    if algorithm not in RUNNABLE:
        raise ValueError(f"there is no all-reduce {algorithm!r}: choose one of {', '.join(RUNNABLE)}")
    if not x.is_contiguous():
        raise ValueError(
            f"reduce_by works in place on contiguous memory, and x has strides {x.stride()}: copy it first"
        )
    size = group.size()
    if size % inside:
        raise ValueError(f"{size} ranks are not whole nodes of {inside}: choose a divisor of {size}")
    members, flat = Members(f"the {algorithm} all-reduce", group, tuple(range(size))), x.detach().view(-1)
    if algorithm == HIERARCHICAL:
        hierarchical(members, flat, inside)
    else:
        RUNS[algorithm](members, flat)
    return x

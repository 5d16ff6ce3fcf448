"""Which tokens of a sample each context-parallel rank has, and which keys their queries see.

Belongs here: the order of tokens, segments of documents, and in which parts keys are gathered. What attends is in
context_attention.py.
The order is that of zigzag ring attention (github.com/zhuzilin/ring-flash-attention).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_context_length
from tpformer.words import shown

Made = TypeVar("Made")
TOLD = 31  # numbers by which ranks compare documents, few, as each makes a text of its own (distributed/calls.py)

# An example: one sample of 16 tokens on 2 ranks, in 4 chunks of 4. Rank 0 has the chunks 0 and 3, the tokens 0 1 2 3
# 12 13 14 15; rank 1 has the chunks 1 and 2, the tokens 4 to 11. With one document every rank's queries see as many
# keys: (1 + 2 + 3 + 4) + (13 + 14 + 15 + 16) = 68, and 5 + ... + 12 = 68.
# Let a second document begin at token 6. Rank 1's segments are then
#     rows 0 1 of its chunk 1, at positions 4 and 5, of the document that begins at 0: keys 0 to 5
#     rows 2 3, at positions 6 and 7, of the document that begins at 6: keys 6 and 7
#     rows 4 to 7, its chunk 2, at positions 8 to 11, of the same document: keys 6 to 11
# A query sees the keys of its segment up to itself.
# Where keys come in halves, the chunks 0 and 1 come first, the tokens 0 to 7. Rows of the last segment then see keys 6
# and 7, and once the chunks 2 and 3 are there, keys 8 to 11 up to themselves.


class Context(NamedTuple):
    """The context-parallel ranks, which share the tokens of every sample. size: of several; rank: of this one."""

    group: ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup) -> Self | None:
        """Of a process group; None for one rank."""
        return cls(group, group.size(), group.rank()) if group.size() > 1 else None

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # a copy is of the same ranks


class Segment(NamedTuple):
    """Consecutive queries of one document: `length` rows from `row` on, at positions from `position` on. They see the
    keys from position `first` on, where the document begins, up to themselves.

    Of a part of the keys: until, where this part ends, if that is before all of these queries; earlier, how many of the
    rows, the first ones, have attended to keys of an earlier part.
    """

    row: int
    length: int
    position: int
    first: int
    until: int | None = None
    earlier: int = 0

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)

    @property
    def end(self) -> int:
        """The position after its last query's."""
        return self.position + self.length

    @property
    def keys(self) -> slice:
        """The positions of all keys that any of its queries sees, without a window."""
        return slice(self.first, self.end if self.until is None else self.until)


class Part(NamedTuple):
    """Keys and values that are gathered at once: of some heads, and of one or both of every rank's chunks.

    queries: the heads of q that they serve; heads: those of k; places: which of a rank's chunks, (0, 1), (0,) or (1,).
    """

    queries: slice
    heads: slice
    places: tuple[int, ...]

    def rows(self, own: int) -> slice:
        """Of a rank's `own` tokens of a sample those whose keys it sends."""
        return slice(self.places[0] * own // 2, (self.places[-1] + 1) * own // 2)

    def positions(self, seq_length: int) -> slice:
        """Those of the gathered keys: the first chunks of all ranks are the first half of a sample."""
        return self.rows(seq_length)


# The parts in which keys and values come, those of the next one gathered while one attends. A CPU computes nothing
# beside a collective. On CUDA four is a choice that nobody has measured: three quarters of the gather may hide, and
# parts are still large.
PARTS = {"cpu": 1, "cuda": 4}


def parts(heads: int, shared: int, device: str) -> list[Part]:
    """How a rank's `shared` key-value heads, which serve `heads` of queries, are cut on a type of device.

    By heads; if half as many parts are all that heads make, by halves of the sample, too.
    """
    wanted = PARTS.get(device, 1)
    n = max(1, min(wanted, shared))
    halves = [(0,), (1,)] if 2 * n <= wanted else [(0, 1)]
    ends, each = [shared * part // n for part in range(n + 1)], heads // max(1, shared)
    return [Part(slice(each * a, each * b), slice(a, b), places) for a, b in pairwise(ends) for places in halves]


def own_chunks(size: int, rank: int) -> tuple[int, int]:
    """Which two of the 2 * size chunks of a sample a rank has, in the order of its rows: an early and a late one."""
    return rank, 2 * size - 1 - rank


def chunk_owners(size: int) -> list[tuple[int, int]]:
    """(rank, which of its two chunks it is) of each chunk of a sample."""
    return [(rank, 0) for rank in range(size)] + [(rank, 1) for rank in reversed(range(size))]


def own_tokens(seq_length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """The positions in a sample of a rank's tokens, (seq_length / size,) int64, in the order of its rows.

    They are those of own_chunks, so all ranks' queries see equally many keys of a sample that is one document, without
    a window. ValueError for a length that 2 * size does not divide.
    """
    check_context_length(seq_length, size)
    chunk = seq_length // (2 * size)
    own = [torch.arange(each * chunk, (each + 1) * chunk, device=device) for each in own_chunks(size, rank)]
    return torch.cat(own)


def segments(starts: Sequence[int], seq_length: int, size: int, rank: int) -> list[Segment]:
    """A rank's segments of one sample, in the order of its rows. starts: where documents begin, ascending from 0."""
    chunk, found = seq_length // (2 * size), []
    for place, index in enumerate(own_chunks(size, rank)):
        low, high = index * chunk, (index + 1) * chunk
        for begin, end in zip(starts, [*starts[1:], seq_length], strict=True):
            first, last = max(low, begin), min(high, end)
            if first < last:
                found.append(Segment(place * chunk + first - low, last - first, first, begin))
    return found


def within(found: Sequence[Segment], keys: slice, window: int | None) -> list[Segment]:
    """What a rank's segments see of the keys at these positions, which begin and end with chunks; positions of the
    result count from the first of these keys."""
    low, high = keys.start, keys.stop

    def seeing(segment: Segment, end: int) -> int:
        """How many of its rows, the first ones, see keys before `end`, where no query is."""
        if segment.first >= end:
            return 0
        return segment.length if window is None else max(0, min(segment.length, end + window - 1 - segment.position))

    seen = []
    for segment in found:
        until = None if segment.position < high else high - low
        length = segment.length if until is None else seeing(segment, high)
        if segment.end > low and length:
            first = max(segment.first, low) - low
            seen.append(Segment(segment.row, length, segment.position - low, first, until, seeing(segment, low)))
    return seen


class RankSegments:
    """A context-parallel rank's segments of every sample of a batch, and what is computed from them, each once: a
    forward makes one for all of its layers, and their backwards.

    starts: where each sample's documents begin, ascending from 0, below seq_length. told: the words by which ranks
    compare them. ValueError for others.
    """

    def __init__(self, starts: Sequence[Sequence[int]], seq_length: int, size: int, rank: int) -> None:
        check_context_length(seq_length, size)
        # numbers, as elements of a tensor have another hash on each rank
        starts = [[*map(operator.index, each)] for each in starts]
        if any(s[:1] != [0] or s != sorted(set(s)) or s[-1] >= seq_length for s in starts):
            raise ValueError(
                f"documents of {len(starts)} samples begin at {shown(starts)}: give for each sample ascending "
                f"positions from 0 to below {seq_length}"
            )
        self.samples, self.place = len(starts), (seq_length, size, rank)
        self.told = f"documents {hash(tuple(map(tuple, starts))) % TOLD}"
        self._segments = [segments(each, seq_length, size, rank) for each in starts]
        self._made: dict[Hashable, Any] = {}

    def seen(self, keys: slice, window: int | None) -> list[list[Segment]]:
        """What each sample's segments see of the keys at these positions: `within`."""
        return self.made(
            ("segments", keys.start, keys.stop, window),
            lambda: [within(found, keys, window) for found in self._segments],
        )

    def made(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What was made under this key, or is made now and kept."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@lru_cache(maxsize=64)
def undivided(samples: int, seq_length: int, size: int, rank: int) -> RankSegments:
    """Those of samples that are one document each."""
    return RankSegments([[0]] * samples, seq_length, size, rank)


def context_balance(documents: Sequence[Sequence[int]], seq_length: int, size: int, window: int | None = None) -> float:
    """Pairs of a query and a key on the busiest of `size` context-parallel ranks, over their mean: 1 for one document.

    documents: where each sample's documents begin, ascending from 0. Ranks wait for the busiest one at every layer, and
    short documents are not shared evenly, because the order of tokens does not depend on data. ValueError for a length
    that 2 * size does not divide.
    """
    check_context_length(seq_length, size)

    def pairs(tokens: int) -> int:
        """Of the first tokens of a document."""
        whole = min(tokens, window or tokens)
        return whole * (whole + 1) // 2 + (tokens - whole) * whole

    found = [
        sum(
            pairs(each.end - each.first) - pairs(each.position - each.first)
            for starts in documents
            for each in segments(starts, seq_length, size, rank)
        )
        for rank in range(size)
    ]
    return max(found) * size / sum(found)

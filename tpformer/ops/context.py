"""Which tokens of a sample each context-parallel rank has, and which keys their queries see.

Belongs here: the order of tokens, and segments of documents. What attends is in context_attention.py.
The order is that of zigzag ring attention (github.com/zhuzilin/ring-flash-attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_context_length

# An example: one sample of 16 tokens on 2 ranks, in 4 chunks of 4. Rank 0 has the chunks 0 and 3, the tokens 0 1 2 3
# 12 13 14 15; rank 1 has the chunks 1 and 2, the tokens 4 to 11. With one document every rank's queries see as many
# keys: (1 + 2 + 3 + 4) + (13 + 14 + 15 + 16) = 68, and 5 + ... + 12 = 68.
# Let a second document begin at token 6. Rank 1's segments are then
#     rows 0 1 of its chunk 1, at positions 4 and 5, of the document that begins at 0: keys 0 to 5
#     rows 2 3, at positions 6 and 7, of the document that begins at 6: keys 6 and 7
#     rows 4 to 7, its chunk 2, at positions 8 to 11, of the same document: keys 6 to 11
# A query sees the keys of its segment up to itself.


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
    keys from position `first` on, where the document begins, up to themselves."""

    row: int
    length: int
    position: int
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.length)

    @property
    def end(self) -> int:
        """The position after its last query's, where its keys end, too."""
        return self.position + self.length


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

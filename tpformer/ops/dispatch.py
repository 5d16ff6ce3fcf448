"""Which rows a rank's experts take: the tokens that are routed to them, sorted by expert and then by token.

Belongs here: indices on the device, and how many rows there are on the host. Nothing here communicates.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .route import Routing


class Sent(NamedTuple):
    """The R rows of this rank's E experts, from T tokens with K experts each: what is kept of them for a backward."""

    slots: Tensor
    """(R,) int32: token * K + j for a row that is the token's j-th expert. Rows are sorted by expert, then by token."""
    weights: Tensor
    """(R,) in at least float32."""
    counts: Tensor
    """(parts, E) int32: the rows of each expert from each part of the tokens. A part has the tokens of one rank with
    sequence shards; without them there is one part."""
    sizes: tuple[int, ...]
    """Rows of each part, on the host."""
    n_tokens: int
    k: int


class Dispatch:
    """What follows from a Sent, made when it is asked for."""

    def __init__(self, sent: Sent) -> None:
        self.slots, self.weights, self.counts, self.sizes, self.n_tokens, self.k = sent

    @cached_property
    def tokens(self) -> Tensor:
        """(R,) int32: the token of each row."""
        return self.slots // self.k

    @cached_property
    def offsets(self) -> Tensor:
        """(E + 1,) int32: where each expert's rows begin, and where the last one's end."""
        return _offsets(self.counts.sum(0))

    @cached_property
    def positions(self) -> Tensor:
        """(T, K) int32: the rows of each token in ascending order of experts; -1 for an expert of another rank."""
        return positions(self.slots, self.n_tokens, self.k)

    def spread(self, values: Tensor) -> Tensor:
        """(T, K) from a value (R,) of each row, 0 for experts of other ranks."""
        return values.new_zeros(self.n_tokens * self.k).scatter_(0, self.slots.long(), values).view(-1, self.k)

    @cached_property
    def parts(self) -> list[Part]:
        """The rows of each part of the tokens."""
        if len(self.sizes) == 1:
            rows = torch.arange(len(self.slots), device=self.slots.device)
            return [Part(rows, self)]
        share = self.n_tokens // len(self.sizes)
        order = (self.tokens // share).argsort(stable=True).split(list(self.sizes))
        found = []
        for part, rows in enumerate(order):
            slots = self.slots[rows] - part * share * self.k
            one = Sent(slots, self.weights[rows], self.counts[part : part + 1], (len(rows),), share, self.k)
            found.append(Part(rows, Dispatch(one)))
        return found


class Part(NamedTuple):
    """Rows of a Dispatch that come from one part of the tokens: their indices, and the Dispatch of the part alone."""

    rows: Tensor
    dispatch: Dispatch


def positions(slots: Tensor, tokens: int, k: int) -> Tensor:
    """(tokens, k) int32: the row that has slot token * k + j, of rows with these slots; -1 where there is none."""
    found = torch.full((tokens * k,), -1, dtype=torch.int32, device=slots.device)
    rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return found.scatter_(0, slots.long(), rows).view(tokens, k)


def _offsets(counts: Tensor) -> Tensor:
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])


@torch.no_grad()
def dispatch(routing: Routing, first: int, experts: int, n_experts: int, parts: int) -> Sent:
    """The rows for the experts first ... first + experts - 1 of n_experts. parts: into how many the tokens are divided.

    On a GPU the host waits once, for the number of rows of each part, except where this rank has all experts. On fake
    tensors, which have no values, the experts get equal numbers of tokens.
    """
    tokens, k = routing.experts.shape
    own = routing.experts - first
    mine = (own >= 0) & (own < experts)
    expert = torch.where(mine, own, experts).long()
    part = torch.arange(tokens, device=expert.device)[:, None] // max(1, tokens // parts)
    index = (part * (experts + 1) + expert).reshape(-1)
    counts = torch.zeros(parts * (experts + 1), dtype=torch.int64, device=expert.device)
    counts = counts.scatter_add_(0, index, torch.ones_like(index)).view(parts, experts + 1)[:, :experts]
    counts = counts.to(torch.int32)
    if experts == n_experts and parts == 1:
        sizes = [tokens * k]
    elif type(counts) is not Tensor or counts.is_meta:
        sizes = [tokens * k * experts // n_experts // parts] * parts
    else:
        sizes = counts.sum(1).tolist()
    slots = expert.reshape(-1).argsort(stable=True)[: sum(sizes)]
    weights = routing.weights.reshape(-1)[slots]
    return Sent(slots.to(torch.int32), weights, counts, tuple(sizes), tokens, k)

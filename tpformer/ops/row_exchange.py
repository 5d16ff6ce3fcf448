"""How rows of tokens travel to the ranks that have their experts, and back: the plan of an exchange, and its ways.

Belongs here: indices on the device, numbers of rows on the host, and the all-to-alls of rows and of weights. What is
computed with the rows that have arrived is in exchanged_experts.py; which experts a token takes, in route.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_to_all, start_all_to_all

from .dispatch import Dispatch, Sent, positions
from .implementation import implementation
from .route import Routing
from .transports.products import Factor, Products

Numbers = tuple[int, ...]


class Sizes(NamedTuple):
    """What the host knows of a plan. Of each rank, how many go there and how many come from there."""

    tokens: int
    """T, of this rank."""
    k: int
    """The experts of a token."""
    width: int
    """How many experts of this rank an arrived row is for, at most; a given routing may repeat one."""
    slots_to: Numbers
    """One expert of one token is a slot."""
    slots_from: Numbers
    rows_to: Numbers
    rows_from: Numbers


class Plan(NamedTuple):
    """Where the T tokens of this rank go, and which rows come: what is kept of it for a backward.

    N rows leave: a token's row for each rank that has experts of it, or for each of its K experts. U rows arrive, of
    which R are made for this rank's E experts.
    """

    order: Tensor
    """(T K,) int32: the slots token * K + j of own tokens, by the rank of their expert, then by token; fewer where some
    have no expert."""
    leaving: Tensor
    """(N,) int32: the first slot that each row which leaves is for, in the order of `order`."""
    slots: Tensor
    """(R,) int32: row * width + i, for the i-th expert of this rank that an arrived row is for. By expert, then by
    source rank, then by token there: in the order in which one process has the rows."""
    weights: Tensor
    """(R,) in at least float32."""
    counts: Tensor
    """(1, E) int32: the rows of each expert of this rank."""
    sizes: Sizes

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return self[:5]


class RowExchange:
    """What follows from a Plan, and its ways over the ranks of a group; None, and a group of one rank, send nothing."""

    def __init__(self, plan: Plan, group: ProcessGroup | None) -> None:
        self.plan, self.sizes = plan, plan.sizes
        self.group = None if group is None or group.size() == 1 else group

    @cached_property
    def arrived(self) -> Dispatch:
        """The rows of this rank's experts, where what arrives has the part of tokens."""
        _, _, slots, weights, counts, sizes = self.plan
        return Dispatch(Sent(slots, weights, counts, (len(slots),), sum(sizes.rows_from), sizes.width))

    @cached_property
    def tokens(self) -> Tensor:
        """(N,) int32: the token of each row that leaves."""
        return self.plan.leaving // self.sizes.k

    @cached_property
    def positions(self) -> Tensor:
        """(T, K) int32: the rows of each token that have left, in the order of ranks; -1 where there is none."""
        return positions(self.plan.leaving, self.sizes.tokens, self.sizes.k)

    def start(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to send own tokens' rows (T, H) out; what it returns waits for what arrives, (U, H)."""
        if self.group is None:
            return lambda: rows
        return start_all_to_all(rows[self.tokens], self.group, self.sizes.rows_to, self.sizes.rows_from)

    def start_factor(self, rows: Factor, products: Products) -> Callable[[], Factor]:
        """As `start`, of rows that are multiplied where they arrive: they travel as `products` sends them."""
        if self.group is None:
            return lambda: products.factor(rows)
        wait = self.start(products.sent(rows))
        return lambda: products.received(wait())

    def home(self, rows: Tensor) -> Tensor:
        """Each own token's sum (T, H) of what becomes of its rows on all ranks, from this rank's part of them (U, H).

        Numerics: in the order of ranks, which is that of experts, in at least float32, rounded once.
        """
        if self.group is None:
            return rows
        back = all_to_all(rows, self.group, self.sizes.rows_from, self.sizes.rows_to)
        return implementation("combine", back).combine(back, self.tokens, self.positions)

    def weights_home(self, values: Tensor) -> Tensor:
        """(T, K): what the ranks have for each expert of own tokens, from a value (R,) of each row of this rank's."""
        in_order = values[self.plan.slots.argsort()]  # by source rank, token and expert, as their weights came
        back = all_to_all(in_order, self.group, self.sizes.slots_from, self.sizes.slots_to)
        slots = back.new_zeros(self.sizes.tokens * self.sizes.k)
        return slots.scatter_(0, self.plan.order.long(), back).view(-1, self.sizes.k)


@torch.no_grad()
def plan_exchange(routing: Routing, n_experts: int, group: ProcessGroup | None, once_a_rank: bool) -> Plan:
    """The plan for own tokens that go to experts of n_experts, of which each rank has an equal part, in rank order.

    Communication, per rank: one all-to-all of 16 bytes for each rank, for which the host waits, and one of 8 bytes for
    each of its T K slots (16 with float64 weights). A slot with a number that no expert has, such as -1, goes nowhere.
    On fake tensors, which have no values, ranks send as much to one another as they do on average where each set of K
    experts is as likely as any other.
    """
    tokens, k = routing.experts.shape
    ranks = 1 if group is None else group.size()
    own, once_a_rank = n_experts // ranks, once_a_rank or ranks == 1
    flat = routing.experts.reshape(-1).long()
    holder = torch.where((flat >= 0) & (flat < n_experts), flat // own, ranks)  # no rank's is the last one
    order = holder.argsort(stable=True)
    to, token = holder[order], order // k
    leaves = (to < ranks).long()
    if once_a_rank:  # with its first expert of a rank; a token's experts of a rank are neighbours here
        group_of = to * tokens + token
        leaves *= group_of.diff(prepend=group_of.new_full((1,), -1)) != 0
    sizes = _sizes(to, leaves, (tokens, k, k if once_a_rank else 1), n_experts, group)
    order, to, leaves = (each[: sum(sizes.slots_to)] for each in (order, to, leaves))
    expert, weights, order = flat[order], routing.weights.reshape(-1)[order], order.to(torch.int32)
    leaving = order[(1 - leaves).argsort(stable=True)[: sum(sizes.rows_to)]] if once_a_rank else order
    integer = torch.int64 if weights.dtype == torch.float64 else torch.int32
    told = torch.stack([((expert - to * own) * 2 + leaves).to(integer), weights.view(integer)], 1)
    code, weights = all_to_all(told, group, sizes.slots_to, sizes.slots_from).t().contiguous()
    comes, index = (code & 1).long(), torch.arange(len(code), device=code.device)
    first = torch.where(comes == 1, index, 0).cummax(0).values  # the slot with which a slot's row has come
    slots = (comes.cumsum(0) - 1) * sizes.width + index - first
    by_expert = (code >> 1).argsort(stable=True)
    counts = torch.zeros(own, dtype=torch.int64, device=code.device)
    counts = counts.scatter_add_(0, (code >> 1).long(), torch.ones_like(index))
    return Plan(
        order, leaving, slots[by_expert].to(torch.int32), weights.view(routing.weights.dtype)[by_expert],
        counts.to(torch.int32)[None], sizes,
    )  # fmt: skip


def _sizes(
    to: Tensor, leaves: Tensor, options: tuple[int, int, int], n_experts: int, group: ProcessGroup | None
) -> Sizes:
    """to, leaves: of each slot, its rank, and 1 where a row leaves with it. options: the first three of Sizes."""
    tokens, k, _ = options
    if group is None or group.size() == 1:
        return Sizes(*options, (tokens * k,), (tokens * k,), (tokens,), (tokens,))
    ranks = group.size()
    both = torch.stack([torch.ones_like(to), leaves], 1)
    numbers = torch.zeros(ranks + 1, 2, dtype=torch.int64, device=to.device)
    numbers = numbers.scatter_add_(0, to[:, None].expand(-1, 2), both)[:ranks]
    came = all_to_all(numbers, group)
    if type(numbers) is not Tensor or numbers.is_meta:
        slots = [tokens * k * (rank + 1) // ranks - tokens * k * rank // ranks for rank in range(ranks)]
        rows = [min(each, round(tokens * share_of_rank(k, n_experts, ranks))) for each in slots]
        rows = rows if options[2] > 1 else slots
        mine = [(of[group.rank()],) * ranks for of in (slots, rows)]
        return Sizes(*options, tuple(slots), mine[0], tuple(rows), mine[1])
    sent, received = torch.stack([numbers, came]).transpose(1, 2).tolist()  # the one wait of the host
    return Sizes(*options, tuple(sent[0]), tuple(received[0]), tuple(sent[1]), tuple(received[1]))


def share_of_rank(k: int, n_experts: int, ranks: int) -> float:
    """The share of tokens that a rank has an expert of, where each set of K experts is as likely as any other."""
    return 1 - comb(n_experts - n_experts // ranks, k) / comb(n_experts, k)

"""Which experts a token goes to, and with which weights: a program decides for a few tokens, each within one warp.

Letters: M tokens, E experts, K of them for each token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation.formulas import sigmoid
from ..launch import launch_options
from ..replay import launch, replayed
from . import reference
from .reference import Policy, check_gradients, check_operands, shares

__all__ = ["route_backward", "route_forward", "shares"]

ELEMENTS = 8  # scores for each thread
LEAST_SUM = tl.constexpr(reference.LEAST_SUM)
INFINITY = tl.constexpr(0x7F800000)  # the bits of a float32
ABSENT, TAKEN = tl.constexpr(-(2**31) + 1), tl.constexpr(-(2**31))  # less than the order of any value


class Form(NamedTuple):
    """How a program's scores are laid out: powers of two, at least as large as the numbers that they hold."""

    rows: int
    """Tokens."""
    groups: int
    size: int
    """Experts of a group."""
    choices: int
    """Experts of a token."""


@triton.jit
def order_of(values):
    """An int32 for each float32, in the order of torch.sort: -0 equals 0, and NaN is larger than all numbers."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > INFINITY, INFINITY + 1, order)


@triton.jit
def value_of(order):
    """The float32 of which order_of made an int32; -0 became 0."""
    magnitude = tl.abs(order).to(tl.float32, bitcast=True)
    return tl.where(order < 0, -magnitude, magnitude)


@triton.jit
def take_largest(order, places):
    """(the largest of each row, its place, the row with TAKEN there). Of equal ones it is that in the first place."""
    largest = tl.max(order, 1)
    first = tl.min(tl.where(order == largest[:, None], places, 0x7FFFFFFF), 1)
    return largest, first, tl.where(places == first[:, None], TAKEN, order)


@triton.jit
def take_places(order, places, scores, K: tl.constexpr, PADDED: tl.constexpr):
    """(places, scores) of the K largest of each row, as in take_largest, in ascending order of places.

    Both have PADDED columns, a power of two, those after the K-th without a meaning.
    """
    choices = tl.arange(0, PADDED)[None, :]
    pairs = tl.full((order.shape[0], PADDED), 0x7FFFFFFFFFFFFFFF, tl.int64)  # a place, and below it a score's bits
    bits = scores.to(tl.int32, bitcast=True)
    for j in tl.static_range(K):
        _, place, order = take_largest(order, places)
        found = tl.max(tl.where(places == place[:, None], bits, TAKEN), 1)
        pair = (place.to(tl.int64) << 32) | found.to(tl.uint32, bitcast=True).to(tl.int64)
        pairs = tl.where(choices == j, pair[:, None], pairs)
    pairs = tl.sort(pairs, 1)
    return (pairs >> 32).to(tl.int32), pairs.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def leave_groups(order, POLICY: tl.constexpr, FORM: tl.constexpr):
    """The order with that of -inf outside of the top_groups whose two best experts have the largest sums."""
    GROUPS: tl.constexpr = POLICY.top_groups
    members = tl.reshape(order, (FORM.rows * FORM.groups, FORM.size))
    first, _, rest = take_largest(members, tl.arange(0, FORM.size)[None, :])
    best = value_of(first)
    if FORM.size > 1:
        best += value_of(tl.max(rest, 1))
    group = tl.arange(0, FORM.groups)[None, :]
    groups = tl.where(group < POLICY.groups, order_of(tl.reshape(best, (FORM.rows, FORM.groups))), ABSENT)
    for _ in tl.static_range(GROUPS):
        _, _, groups = take_largest(groups, group)
    groups = tl.broadcast_to(groups[:, :, None], (FORM.rows, FORM.groups, FORM.size))
    groups = tl.reshape(groups, (FORM.rows, FORM.groups * FORM.size))
    return tl.where((groups == TAKEN) | (order == ABSENT), order, -INFINITY)


@triton.jit
def score_tile(logits, exists, POLICY: tl.constexpr):
    """Scores of a tile of logits. Where no expert exists there may be anything."""
    if POLICY.score == "softmax":
        logits = tl.where(exists, logits, float("-inf"))
        exponentials = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = exponentials / tl.sum(exponentials, 1)[:, None]
    else:
        scores = sigmoid(logits)
    return scores


@triton.jit(do_not_specialize=["m"])
def route_forward_kernel(
    logits, bias, experts, weights, scores, m, EXPERTS: tl.constexpr, POLICY: tl.constexpr, FORM: tl.constexpr
):
    """experts, weights and scores of FORM.rows tokens."""
    LIMITED: tl.constexpr = POLICY.top_groups < POLICY.groups
    SIZE: tl.constexpr = EXPERTS // POLICY.groups if LIMITED else FORM.size
    rows = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    places = tl.arange(0, FORM.groups * FORM.size)[None, :]
    columns = places // FORM.size * SIZE + places % FORM.size
    exists = (places % FORM.size < SIZE) & (columns < EXPERTS)
    mask = (rows < m)[:, None] & exists
    at = rows.to(tl.int64)[:, None] * EXPERTS + columns
    score = score_tile(tl.load(logits + at, mask=mask, other=0.0), exists, POLICY)
    tl.store(scores + at, score, mask=mask)
    by = score
    if bias is not None:
        by += tl.load(bias + columns, mask=exists, other=0.0)
    order = tl.where(exists, order_of(by), ABSENT)
    if LIMITED:
        order = leave_groups(order, POLICY, FORM)
    place, weight = take_places(order, places, score, POLICY.k, FORM.choices)
    choices = tl.arange(0, FORM.choices)[None, :]
    if POLICY.normalised:
        weight /= tl.sum(tl.where(choices < POLICY.k, weight, 0.0), 1)[:, None] + LEAST_SUM
    at = rows.to(tl.int64)[:, None] * POLICY.k + choices
    mask = (rows < m)[:, None] & (choices < POLICY.k)
    tl.store(experts + at, place // FORM.size * SIZE + place % FORM.size, mask=mask)
    tl.store(weights + at, weight * POLICY.scale, mask=mask)


@triton.jit(do_not_specialize=["m"])
def route_backward_kernel(
    dweights, experts, scores, dshares, dlogits, m,
    EXPERTS: tl.constexpr, POLICY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dlogits of ROWS tokens."""
    K: tl.constexpr = POLICY.k
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < m)[:, None] & (columns < EXPERTS)
    at = rows.to(tl.int64)[:, None] * EXPERTS + columns
    score = tl.load(scores + at, mask=mask, other=0.0)
    dscores = tl.zeros((ROWS, COLUMNS), tl.float32)
    chosen = tl.zeros((ROWS, COLUMNS), tl.int1)
    for j in tl.static_range(K):
        place = rows.to(tl.int64) * K + j
        here = tl.load(experts + place, mask=rows < m, other=-1)[:, None] == columns
        gradient = tl.load(dweights + place, mask=rows < m, other=0.0) * POLICY.scale
        dscores = tl.where(here, gradient[:, None], dscores)
        chosen |= here
    if POLICY.normalised:
        total = tl.sum(tl.where(chosen, score, 0.0), 1)[:, None] + LEAST_SUM
        mean = tl.sum(dscores * score, 1)[:, None] / total
        dscores = tl.where(chosen, (dscores - mean) / total, 0.0)
    if dshares is not None:
        gradient = tl.load(dshares + at, mask=mask, other=0.0)
        total = tl.sum(score, 1)[:, None] + LEAST_SUM
        dscores += (gradient - tl.sum(gradient * score, 1)[:, None] / total) / total
    if POLICY.score == "softmax":
        result = score * (dscores - tl.sum(dscores * score, 1)[:, None])
    else:
        result = dscores * score * (1.0 - score)
    tl.store(dlogits + at, result, mask=mask)


def form_of(experts: int, groups: int, k: int) -> Form:
    """The form of a program for so many experts in so many groups: one warp, ELEMENTS for each thread."""
    groups, size, choices = map(triton.next_power_of_2, (groups, experts // groups, k))
    return Form(max(1, 32 * ELEMENTS // (groups * size)), groups, size, choices)


@replayed
def route_forward(logits: Tensor, policy: Policy, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(experts, weights, scores) of each token.

    Math:     route_forward of reference.py
    Shapes:   logits (M, E), bias (E,) float32; any M, K <= E <= 512, K up to 16; experts (M, K) int32 in ascending
              order; weights (M, K), scores (M, E) float32
    Numerics: float32. The choice is that of the reference for the scores that are returned, with ties and NaN; scores
              differ from torch's in the last bits, so near ties may be decided otherwise
    Traffic:  route_cost, in one pass. The choice is K rounds over all scores in registers: with many K and E it takes
              longer than the traffic
    Order:    a token's scores lie in one warp, which reduces them by shuffles; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(logits, policy, bias)
    logits = logits.contiguous()
    m, e = logits.shape
    experts = torch.empty(m, policy.k, dtype=torch.int32, device=logits.device)
    weights, scores = logits.new_empty(m, policy.k), torch.empty_like(logits)
    if m:
        form = form_of(e, policy.groups if policy.top_groups < policy.groups else 1, policy.k)
        launch(
            route_forward_kernel, (triton.cdiv(m, form.rows),),
            logits, None if bias is None else bias.contiguous(), experts, weights, scores, m,
            EXPERTS=e, POLICY=policy, FORM=form, **launch_options(1, 1),
        )  # fmt: skip
    return experts, weights, scores


@replayed
def route_backward(
    dweights: Tensor, experts: Tensor, scores: Tensor, policy: Policy, dshares: Tensor | None = None
) -> Tensor:
    """The gradient of the logits (M, E), from those of the weights (M, K) and of each score's share of its row's sum.

    Math:     route_backward of reference.py
    Shapes:   dweights (M, K) float32, dshares (M, E) float32 or None; experts and scores as route_forward gives them
    Numerics: float32
    Traffic:  route_cost with backward=True, and dshares if they are given, in one pass
    Order:    as in route_forward
    Source:   as in reference.py
    """
    check_gradients(dweights, experts, scores, policy, dshares)
    dweights, experts, scores = dweights.contiguous(), experts.contiguous(), scores.contiguous()
    m, e = scores.shape
    dlogits = torch.empty_like(scores)
    if m:
        form = form_of(e, 1, policy.k)
        launch(
            route_backward_kernel, (triton.cdiv(m, form.rows),),
            dweights, experts, scores, None if dshares is None else dshares.contiguous(), dlogits, m,
            EXPERTS=e, POLICY=policy, ROWS=form.rows, COLUMNS=form.size, **launch_options(1, 1),
        )  # fmt: skip
    return dlogits

"""Rows of tokens that travel to the ranks of their experts, for any module that multiplies them there, and come back.

Belongs here: what autograd knows of both ways. exchanged_experts.py sends rows, too, and computes its own experts; what
a plan is, and how rows travel by it, is in row_exchange.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.torch_private import Function

from .calls import called
from .first_derivative import first_derivative
from .implementation import implementation
from .recompute import once
from .route import Routing, wide
from .row_exchange import RowExchange, plan_exchange
from .uncompiled import uncompiled


class Decision:
    """Where a forward's tokens went. It lives as long as the graph that the forward recorded.

    experts: (T, K).
    """

    def __init__(self, experts: Tensor) -> None:
        self.experts = experts

    def is_among(self, others: Iterable[Decision]) -> bool:
        """Whether another forward's tokens went to the same experts. The host waits for the device."""
        return any(self.experts.equal(each.experts) for each in others)


class Visit(NamedTuple):
    """What a rank has between both ways: the R rows of its experts, by expert, then in the order of all tokens."""

    rows: Tensor
    """(R, H)"""
    weights: Tensor
    """(R,), in the dtype of the weights that were sent."""
    experts: Tensor
    """(R,) int64: which of this rank's experts a row is for."""
    own: list[Tensor]
    """The tensors that entered."""
    exchange: RowExchange


def _summed(rows: Tensor, exchange: RowExchange) -> Tensor:
    """(U, H) from rows (R, H): what this rank's experts make of each row that has arrived, in the order of experts."""
    arrived = exchange.arrived
    return implementation("combine", rows).combine(rows.contiguous(), arrived.tokens, arrived.positions)


class _Out(Function):
    """Rows (R, H) and weights (R,) of this rank's experts, from own tokens x (T, H) and weights (T, K).

    forward   rows out; weights came with the plan
    backward  rows back, summed for each token; weights' gradients back. The gradients of what this rank's experts are
              made of times `share`, and zero where nothing used it.
    """

    @staticmethod
    def forward(ctx, exchange: RowExchange, share: float, decision: Decision, x, weights, *own):
        ctx.exchange, ctx.share, ctx.decision = exchange, share, decision
        rows = exchange.start(x)()[exchange.arrived.tokens]
        return rows, exchange.arrived.weights.to(weights.dtype), *(each.view_as(each) for each in own)

    @staticmethod
    @first_derivative
    def backward(ctx, drows, dweights, *downs):
        exchange, (_, _, _, wants_x, wants_weights, *wants) = ctx.exchange, ctx.needs_input_grad
        dx = exchange.home(_summed(drows, exchange)) if wants_x else None
        sent = exchange.weights_home(dweights.to(wide(dweights.dtype))) if wants_weights else None
        scaled = (d * ctx.share if wanted else None for d, wanted in zip(downs, wants, strict=True))
        return None, None, None, dx, None if sent is None else sent.to(dweights.dtype), *scaled


class _Home(Function):
    """Y (T, H) of own tokens: the sum over a token's experts of their rows y (R, H).

    forward   a rank's sum for each row that has arrived, back, and the sum over ranks
    backward  dy out. What entered gets no gradient here, but _Out's backward runs on every rank.
    """

    @staticmethod
    def forward(ctx, y, entered, exchange: RowExchange):
        ctx.exchange = exchange
        return exchange.home(_summed(y, exchange))

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return ctx.exchange.start(dy.contiguous())()[ctx.exchange.arrived.tokens], None, None


@uncompiled
def send_rows(
    x: Tensor, routing: Routing, own: Sequence[Tensor], decision: Decision, *, n_experts: int,
    group: ProcessGroup | None, share: float = 1.0,
) -> Visit:  # fmt: skip
    """Send own tokens' rows to the ranks of their experts; `bring_home` takes what these make of them.

    Shapes:  x (T, H); routing: experts (T, K) of any integer dtype and weights (T, K), of own tokens. T may be 0, and
             differ between ranks. own: tensors of any shapes that this rank's n_experts / ep experts are made of, those
             of rank r of ep being the r-th part. Each gets a gradient that is `share` times its sum.
    Numerics: a token's rows are added in the order of experts, in at least float32; what travels is rounded before.
    Saves:   of each of T K slots and of R rows some integers and a weight; the graph keeps `decision`.
    Communication, per rank, all-to-alls of what it sends, as the forward of ops.exchanged_experts: 16 bytes for each
             rank, for which the host waits; 8 for each of T K experts of tokens (16 with float64 weights); N rows out,
             one for each rank that has experts of a token. Backward: N rows back, and 4 bytes (8) for each of R. Every
             rank joins in each, whatever it has. A region of torch's checkpoint sends all of the forward again.
    Errors:  RuntimeError where ranks are known to call with other options.
    """
    of_weights = (routing.weights, *own)
    called(group, "send_rows", x.shape[1:], x.dtype, True, (x,), of_weights, n_experts, routing.experts.shape[1])
    given = Routing(routing.experts.detach(), routing.weights.detach().to(wide(routing.weights.dtype)))
    exchange = RowExchange(once(lambda: plan_exchange(given, n_experts, group, True)), group)
    rows, weights, *entered = _Out.apply(exchange, share, decision, x, routing.weights, *own)
    counts = exchange.plan.counts[0].long()
    experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
    return Visit(rows, weights, experts, entered, exchange)


@uncompiled
def bring_home(y: Tensor, visit: Visit) -> Tensor:
    """Each own token's sum Y (T, H) of y (R, H), what the ranks' experts have made of its rows.

    Communication, per rank: forward a row back for each that has come; backward N rows out.
    """
    return _Home.apply(y, visit.rows, visit.exchange)

"""experts: [norm ->] [route ->] gather -> grouped GEMM -> activation times weight -> grouped GEMM -> reduction.

Belongs here: the one autograd Function of a layer of experts. Decisions are in route.py, indices in dispatch.py, the
communication in transports/experts.py. No expert is cut over ranks: its part's GEMMs would be thin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.distributed.collectives import all_reduce, reduce_scatter
from tpformer.kernels.finish import Dropout, Finish
from tpformer.torch_private import Function

from .autocast import autocast_dtype, without_autocast
from .calls import called
from .dispatch import Dispatch, Sent, dispatch
from .dropout import check_starts, told
from .expert_gradients import norm_gradients, norm_rebuilt, routing_gradients
from .expert_operands import ExpertWeights, check_operands, check_options, check_routing, in_autocast, within
from .first_derivative import first_derivative, trace
from .implementation import implementation
from .norm import Norm, Normed, check_normed, normalised, parameters, restored
from .packing import keep, kept
from .recompute import leaves_out_end, made, once
from .route import Decided, Router, Routing, decide, wide
from .transports.experts import experts_reduce, gather_experts, weight_gradient
from .transports.interface import Transport
from .transports.products import Factor, held
from .transports.sequential import LOCAL
from .uncompiled import uncompiled
from .unsaved import versions
from .weight_gradients import Deferred, GradientSink, check_sinks


class _Call(NamedTuple):
    """What the Function takes that is no tensor to differentiate."""

    transport: Transport
    norm: Norm | None
    router: Router | None
    experts: Tensor | None
    activation: str
    n_experts: int
    dropout: Dropout | None
    carry: bool  # whether x is the residual, too
    skip: bool  # whether this is the end of a region's second run, whose result nobody reads
    private: bool
    deferred: Deferred | None


class ExpertsFunction(Function):
    """Y = Z + drop(R(sum over a token's experts e of A_e D_e^T)), A_e = w_e act(X' G_e^T) (X' U_e^T), X' = G(norm(X)).

    T tokens on t ranks; each rank has E / t of the experts and computes the rows that are routed to them. G gathers
    rows and R reduces them, as in column_linear and row_linear. The shared expert is a dense MLP on the same rows.
        forward  X' = G(norm(X)); gate and up of the dispatched rows; A; Y = Z + drop(R(combine(A D^T)))
        dgrad    dA = G(drop(dY)) D; dgate, dup and dw from dA, gate and up; dnorm(X) = R(combine(dgate G + dup U))
        wgrad    dD = G(drop(dY))^T A; dG, dU from dgate, dup and X' (gathered again)
        router   dlogits from all ranks' dw; dnorm(X) += dlogits W; dW = dlogits^T norm(X)
    The backward rebuilds norm(X) and A, but no decision of the router.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        norm_weight,
        norm_bias,
        normed: Normed | None,
        residual,
        router_weight,
        weights,
        call: _Call,
        *matrices,
    ):
        own = ExpertWeights(*matrices)
        rows, mean, rstd = normalised(x, call.norm, normed)
        decided, routed = once(lambda: _sent(rows, router_weight, weights, call, len(own.gate_up)))
        sent = Dispatch(routed)
        given = None if weights is None else trace(weights)
        hidden, gathered = gather_experts(call.transport, rows, sent, own.gate_up)
        products = call.transport.products
        shared = [
            None if each is None else products.linear(gathered, each) for each in (own.shared_gate, own.shared_up)
        ]
        ctx.call, ctx.deferred, ctx.sizes = call, call.deferred, routed[3:]
        ctx.versions = None if call.dropout is None else versions(call.dropout.start)
        ctx.set_materialize_grads(False)
        keep(
            ctx, x, *shared, norm_weight, norm_bias, mean, rstd, router_weight, given, hidden, sent.slots, sent.weights,
            sent.counts, *((None,) * 4 if decided is None else decided.saved), *matrices, readable=3,
        )  # fmt: skip
        loss = None if decided is None or decided.balance_loss is None else decided.balance_loss.clone()
        if call.skip:
            return torch.empty_like(x), loss
        a = implementation("weighted_activation", hidden).weighted_activation_forward(
            hidden, call.activation, sent.weights
        )
        dense = []
        if own.shared_down is not None:
            dense = [(products.activated(shared[1], call.activation, shared[0]), own.shared_down)]
        finish = Finish(None, call.dropout, x if call.carry else residual)
        y = experts_reduce(
            call.transport, products.factor(a), sent, own.down, dense, transposed=False, finish=finish
        )  # fmt: skip
        return y, loss

    @staticmethod
    @first_derivative
    def backward(ctx, dy, dbalance):
        saved = _Saved(ctx)
        check_starts(ctx.call.dropout, ctx.versions)
        with without_autocast(saved.x):
            return _backward(saved, dy, dbalance)


def _sent(
    rows: Tensor, router_weight: Tensor | None, weights: Tensor | None, call: _Call, experts: int
) -> tuple[Decided | None, Sent]:
    """What the router decides, unless the routing is given, and the rows for this rank's experts."""
    group, sharded = call.transport.group, call.transport.sequence_parallel
    rank = 0 if group is None else group.rank()
    decided = None
    if router_weight is not None:
        assert call.router is not None
        decided = decide(rows, router_weight, call.router, group, sharded)
        routing = decided.routing
        decided = decided._replace(routing=None)  # what is kept is this rank's own
    else:
        assert call.experts is not None and weights is not None
        routing = within(Routing(call.experts, weights.detach()), call.n_experts)
    assert routing is not None
    return decided, dispatch(routing, rank * experts, experts, call.n_experts, call.transport.sharing)


class _Saved:
    """What the forward saved, under its names."""

    def __init__(self, ctx) -> None:
        tensors = kept(ctx)
        self.call: _Call = ctx.call
        self.x, self.shared_gate, self.shared_up, norm_weight, norm_bias, self.mean, self.rstd = tensors[:7]
        self.router_weight, _, self.hidden, slots, weights, counts = tensors[7:13]
        own_experts, scores, slopes, own_sample = tensors[13:17]
        self.own = ExpertWeights(*tensors[17:])
        self.norm = restored(self.call.norm, norm_weight, norm_bias)
        self.sent = Dispatch(Sent(slots, weights, counts, *ctx.sizes))
        self.decided = None if scores is None else Decided(None, own_experts, scores, slopes, own_sample)
        (
            self.wants_x, self.wants_norm_weight, self.wants_norm_bias, _, self.wants_residual, self.wants_router,
            self.wants_weights, _, *wants_matrices,
        ) = ctx.needs_input_grad  # fmt: skip
        self.wants = ExpertWeights(*wants_matrices)

    @property
    def wants_rows(self) -> bool:
        """Whether norm(x) needs a gradient."""
        return self.wants_x or self.wants_norm_weight or self.wants_norm_bias

    def rows(self) -> Tensor:
        """norm(x), made again."""
        return norm_rebuilt(self.x, self.norm, (self.mean, self.rstd))


def _backward(saved: _Saved, dy: Tensor | None, dbalance: Tensor | None) -> tuple:
    """The gradients of ExpertsFunction's inputs."""
    call, sent, own, products = saved.call, saved.sent, saved.own, saved.call.transport.products
    dresidual, dcarried = dy if saved.wants_residual else None, dy if call.carry else None
    if dy is None:
        dy = saved.x.new_empty(*saved.x.shape).zero_()
    dy, _ = products.finish_gradient(dy, call.dropout, False)
    keep = call.deferred is not None
    da, whole = gather_experts(call.transport, dy, sent, own.down, transposed=True, keep=keep)
    dhidden, a, dw = implementation("weighted_activation", da).weighted_activation_backward(
        da, saved.hidden, call.activation, sent.weights
    )
    dhidden, a = products.factor(dhidden), products.factor(a)
    dshared: list[Factor] = []  # of the shared expert's gate and up
    activated = None
    if own.shared_down is not None:
        dactivated = products.product(whole, products.right(own.shared_down, False))
        given = dactivated, saved.shared_up, call.activation, saved.shared_gate
        dup, dgate, activated = products.derivative(*given)
        dshared = [products.factor(dgate), products.factor(dup)]
    rows = saved.rows()
    downs = _down_gradients(saved, whole, a, activated)
    start = None
    if call.deferred is None and any((saved.wants.gate_up, saved.wants.shared_gate, saved.wants.shared_up)):
        start = call.transport.gathering.start_gather(rows)
    drows = None
    if saved.wants_rows:
        factors = [] if own.shared_gate is None else [own.shared_gate, own.shared_up]
        drows = experts_reduce(
            call.transport, dhidden, sent, own.gate_up, list(zip(dshared, factors, strict=True)), transposed=True
        )  # fmt: skip
    drows, drouter, dweights = _routing_gradients(saved, rows, drows, dw, dbalance)
    private = call.private and saved.wants_x
    of_input = norm_gradients(drows, dcarried, saved.x, saved.norm, (saved.mean, saved.rstd), products, private)
    ups = _up_gradients(saved, rows, dhidden, dshared, None if start is None else start())
    gradients = ExpertWeights(ups[0], downs[0], ups[1], ups[2], downs[1])
    return *of_input, None, dresidual, drouter, dweights, None, *gradients


def _routing_gradients(
    saved: _Saved, rows: Tensor, drows: Tensor | None, dw: Tensor, dbalance: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(drows with the router's part, gradient of the router's weight, gradient of given weights (T, K))."""
    call, sent, transport = saved.call, saved.sent, saved.call.transport
    if saved.decided is None or saved.router_weight is None:
        return drows, None, all_reduce(sent.spread(dw), transport.group) if saved.wants_weights else None
    if not (saved.wants_router or saved.wants_rows):
        return drows, None, None
    assert call.router is not None
    own = (reduce_scatter if transport.sequence_parallel else all_reduce)(sent.spread(dw), transport.group)
    given = dbalance, saved.decided, rows, saved.router_weight, call.router.policy
    return *routing_gradients(own, drows, *given), None


def _down_gradients(saved: _Saved, whole: Factor, a: Factor, activated: Factor | None) -> tuple:
    """Gradients of (down, shared_down) from the gathered rows of dy; (None, None) if a queue makes them later."""
    sent, wants, deferred = saved.sent, saved.wants, saved.call.deferred
    matrix = partial(saved.call.transport.products.matrix, dtype=saved.own.down.dtype)

    def make() -> Iterator[Tensor | None]:
        dy = matrix(whole)
        yield weight_gradient(dy, matrix(a), sent, dy_of_tokens=True) if wants.down else None
        yield dy.t() @ matrix(activated) if wants.shared_down else None

    if not (wants.down or wants.shared_down):
        return None, None
    if deferred is None:
        return tuple(make())
    deferred.queue.add(lambda: _sunk(make(), deferred.sinks[1::3]), *held(whole, a, activated))
    return None, None


def _sunk(gradients: Iterator[Tensor | None], sinks: Sequence[GradientSink]) -> None:
    """Give each gradient that is wanted to its sink, before the next one is made."""
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            sinks[place](gradient)


def _up_gradients(saved: _Saved, rows: Tensor, dhidden: Factor, dshared: list[Factor], whole: Factor | None) -> tuple:
    """Gradients of (gate_up, shared_gate, shared_up) from the gathered rows `whole`; a queue gathers them later."""
    call, sent, wants = saved.call, saved.sent, saved.wants
    shared = (wants.shared_gate, wants.shared_up)
    matrix = partial(call.transport.products.matrix, dtype=rows.dtype)

    def make(gathered: Factor) -> Iterator[Tensor | None]:
        x = matrix(gathered)
        yield weight_gradient(matrix(dhidden), x, sent, x_of_tokens=True) if wants.gate_up else None
        for index, wanted in enumerate(shared):
            yield matrix(dshared[index]).t() @ x if wanted else None

    if whole is not None:
        return tuple(make(whole))
    if call.deferred is not None and (wants.gate_up or any(shared)):
        sinks, transport = [call.deferred.sinks[0], *call.deferred.sinks[2:4]], call.transport.gathering
        factor = transport.products.factor(rows)
        # without the call, whose router has each token's sample
        call.deferred.queue.add(
            lambda: _sunk(make(transport.start_gather(factor)()), sinks), *held(factor, dhidden, *dshared)
        )
    return None, None, None


def _applied(
    of_input: tuple, normed: Normed | None, inside: Tensor | None, of_router: tuple, call: _Call,
    matrices: ExpertWeights,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """ExpertsFunction, once the ranks have been told of the call."""
    rows, router = of_input[0], call.router
    if normed is not None:
        check_normed(rows, call.norm, normed)
    local = call.activation, told(call.dropout), call.norm and call.norm[::3]
    agreed = call.n_experts, *call.transport.agreed, None if router is None else router.policy, *local
    called(call.transport.group, "experts", rows.shape, rows.dtype, True, of_input + of_router, matrices, *agreed)
    with without_autocast(rows):
        return ExpertsFunction.apply(*of_input, normed, inside, *of_router, call, *matrices)


@uncompiled
def experts(
    x: Tensor,
    matrices: ExpertWeights,
    *,
    router_weight: Tensor | None = None,
    router: Router | None = None,
    routing: Routing | None = None,
    n_experts: int,
    activation: str,
    norm: Norm | None = None,
    normed: Normed | None = None,
    residual: Tensor | None = None,
    dropout: Dropout | None = None,
    transport: Transport | None = None,
    deferred: Deferred | None = None,
    private: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(Y, balance loss or None): Y = residual + dropout(sum over a token's experts of weight * expert(norm(x))).

    Shapes:  x, residual and Y (tokens / t, H) with sequence_parallel, else (tokens, H), equal on all ranks. matrices:
             of this rank's n_experts / t experts, those of rank r being the r-th part, and its columns of the shared
             expert. Any expert may have no token. transport: as in column_linear, from TensorParallel.column_transport
             with `grouped`; t is the number of its ranks.
             Either router_weight (n_experts, H) and router, or `routing`, in which op `route` decided before.
             activation: "silu" (SwiGLU) or "gelu_tanh" (GeGLU). normed, private: as column_linear; dropout: row_linear.
    Saves:   x before the norm, gate and up of the dispatched rows (and of the shared expert), and the routing: 8 bytes
             for each dispatched row, 4 K + 4 E for each own token. The backward rebuilds everything else.
    Communication, per rank, B = tokens * H * itemsize. Sequence parallel: forward all-gather B and reduce-scatter B,
             backward all-gather B twice (dy, and x again for the weights) and reduce-scatter B; and for the routing
             8 K bytes a token gathered in the forward, 4 K scattered in the backward. Otherwise: an all-reduce of B in
             the forward and in the backward, and one of 4 K bytes a token in the backward.
             With `routing` its weights' gradient is all-reduced instead, and so is equal on all ranks.
    deferred: its queue takes the gradients of matrices; it has a sink for each.
    With sequence_parallel the gradients of the norm's parameters and of router_weight are partial sums, over this
    rank's rows. Under torch.autocast as column_linear and row_linear; the router computes in float32 always.
    Errors:  ValueError unless exactly one of router and routing is given, for a routing of other tokens than x, an
             unknown activation, operands of another number of experts, shape, dtype or device, and on a CPU for an
             expert outside of [0, n_experts). On a GPU that check would wait: there the token's row is NaN.
    Source:  Lepikhin et al. 2020 (arXiv:2006.16668); dropless: MegaBlocks (arXiv:2211.15841)
    """
    transport = LOCAL if transport is None else transport
    check_options(activation, dropout, routing, n_experts, len(matrices.gate_up), transport.group)
    check_routing(len(x), router_weight, router, routing, transport.sharing)
    autocast = autocast_dtype(x)
    rows, inside = x, None if (carry := residual is x and autocast is None) else residual
    if deferred is not None:
        check_sinks(deferred, sum(each is not None for each in matrices))
    if autocast is not None:
        rows, matrices, deferred = in_autocast(autocast, rows, matrices, norm, deferred)
        norm = normed = inside = None
    check_operands(rows, matrices, routing, router_weight, Finish(None, dropout, residual), n_experts, autocast)
    call = _Call(
        transport, norm, router, None if routing is None else routing.experts, activation,
        n_experts, dropout, carry, leaves_out_end(), private, deferred,
    )  # fmt: skip
    of_input = rows, *parameters(norm)
    of_router = router_weight, None if routing is None else routing.weights.to(wide(rows.dtype))
    y, loss = _applied(of_input, normed, inside, of_router, call, matrices)
    y = y if autocast is None or residual is None else residual + y
    return made(y), loss

"""exchanged_experts: [norm ->] [route ->] rows out -> grouped GEMM -> weighted activation -> grouped GEMM -> rows back.

Belongs here: the autograd Function of a layer of experts whose ranks have tokens of their own. How rows travel is in
row_exchange.py. experts.py has the layer whose tensor-parallel ranks gather and reduce the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.groups import unbroken
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.operands import FLOATS, require
from tpformer.torch_private import Function

from .autocast import autocast_dtype, without_autocast
from .autocast import cast as autocast_to
from .calls import called
from .dropout import check_starts, told
from .expert_gradients import norm_gradients, norm_rebuilt, routing_gradients
from .expert_operands import ExpertWeights, check_operands, check_options, check_routing, in_autocast, within
from .first_derivative import first_derivative, trace
from .implementation import implementation
from .norm import Norm, Normed, check_normed, normalised, parameters, restored
from .packing import keep, kept
from .recompute import leaves_out_end, made, once
from .route import Decided, Router, Routing, decide, wide
from .row_exchange import Plan, RowExchange, plan_exchange
from .transports.experts import expert_product, experts_reduce, weight_gradient
from .transports.interface import Transport, finish_rows
from .transports.products import PLAIN, Factor, held
from .transports.sequential import LOCAL
from .uncompiled import uncompiled
from .unsaved import versions
from .weight_gradients import Deferred, check_sinks


class _Call(NamedTuple):
    """What the Function takes that is no tensor to differentiate."""

    group: ProcessGroup | None
    norm: Norm | None
    router: Router | None
    routing: Routing | None  # one that was given, until the rows have been sent
    n_experts: int
    activation: str
    dropout: Dropout | None
    once_a_rank: bool
    carry: bool  # whether x is the residual, too
    private: bool
    deferred: Deferred | None
    transport: Transport  # of one rank
    skip: bool = False  # whether this is the end of a region's second run, whose result nobody reads


class _Begun(NamedTuple):
    """What has been made before the Function, so that something else can run while rows travel."""

    mean: Tensor | None
    rstd: Tensor | None
    decided: Decided | None
    plan: Plan
    arriving: Callable[[], Factor]  # waits for the rows (U, H)


class ExchangedExpertsFunction(Function):
    """Y = Z + drop(S + C(A_e D_e^T)), A_e = w_e act(X' G_e^T) (X' U_e^T) for each token's experts e, X' = E(norm(X)).

    Each rank has T tokens of its own and its part of the experts. E sends rows to the ranks of their experts, and C
    sends what these make of them back and adds it up. S is what is added, such as the shared expert's.
        forward  X' = E(norm(X)); gate and up of each expert's rows; A; Y = Z + drop(S + C(A D^T))
        dgrad    dA = E(drop(dY)) D; dgate, dup and dw from dA, gate and up; dnorm(X) = C(dgate G + dup U)
        wgrad    dD = E(drop(dY))^T A; dG, dU from dgate, dup and X' (sent again)
        router   dlogits from dw, which the ranks send back; dnorm(X) += dlogits W; dW = dlogits^T norm(X)
    The backward rebuilds norm(X) and A, but no decision of the router, and it repeats no plan.
    """

    @staticmethod
    def forward(
        ctx, x, norm_weight, norm_bias, residual, added, router_weight, weights, call: _Call, begun: _Begun, *matrices
    ):
        exchange, own, decided = RowExchange(begun.plan, call.group), ExpertWeights(*matrices), begun.decided
        products = call.transport.products
        hidden = expert_product(products, begun.arriving(), exchange.arrived, own.gate_up)
        ctx.call, ctx.deferred, ctx.sizes = call, call.deferred, begun.plan.sizes
        ctx.versions = None if call.dropout is None else versions(call.dropout.start)
        ctx.set_materialize_grads(False)
        given = None if weights is None else trace(weights)
        keep(
            ctx, x, norm_weight, norm_bias, begun.mean, begun.rstd, router_weight, given, hidden, *begun.plan.saved,
            *((None,) * 4 if decided is None else decided.saved), *matrices, readable=1,
        )  # fmt: skip
        loss = None if decided is None or decided.balance_loss is None else decided.balance_loss.clone()
        if call.skip:
            return torch.empty_like(x), loss
        a = implementation("weighted_activation", hidden).weighted_activation_forward(
            hidden, call.activation, exchange.arrived.weights
        )
        a = products.factor(a)
        y = exchange.home(experts_reduce(call.transport, a, exchange.arrived, own.down, transposed=False))
        if added is not None:
            y += added
        y, _ = finish_rows(y, Finish(None, call.dropout, x if call.carry else residual))
        return y, loss

    @staticmethod
    @first_derivative
    def backward(ctx, dy, dbalance):
        saved = _Saved(ctx)
        with unbroken(ctx.call.group, "the backward of exchanged_experts"), without_autocast(saved.x):
            check_starts(ctx.call.dropout, ctx.versions)
            return _backward(saved, dy, dbalance)


class _Saved:
    """What the forward saved, under its names."""

    def __init__(self, ctx) -> None:
        tensors = kept(ctx)
        self.call: _Call = ctx.call
        self.x, norm_weight, norm_bias, self.mean, self.rstd, self.router_weight, _, self.hidden = tensors[:8]
        order, leaving, slots, weights, counts = tensors[8:13]
        self.exchange = RowExchange(Plan(order, leaving, slots, weights, counts, ctx.sizes), self.call.group)
        own_experts, scores, slopes, own_sample = tensors[13:17]
        self.own = ExpertWeights(*tensors[17:])
        self.norm = restored(self.call.norm, norm_weight, norm_bias)
        self.decided = None if scores is None else Decided(None, own_experts, scores, slopes, own_sample)
        (
            self.wants_x, wants_norm_weight, wants_norm_bias, self.wants_residual, self.wants_added, self.wants_router,
            self.wants_weights, _, _, *wants_matrices,
        ) = ctx.needs_input_grad  # fmt: skip
        self.wants = ExpertWeights(*wants_matrices)
        self.wants_rows = self.wants_x or wants_norm_weight or wants_norm_bias

    def rows(self) -> Tensor:
        """norm(x), made again."""
        return norm_rebuilt(self.x, self.norm, (self.mean, self.rstd))


def _backward(saved: _Saved, dy: Tensor | None, dbalance: Tensor | None) -> tuple:
    """The gradients of ExchangedExpertsFunction's inputs. Which exchanges there are does not depend on the rows."""
    call, exchange, own, products = saved.call, saved.exchange, saved.own, saved.call.transport.products
    dresidual, dcarried = dy if saved.wants_residual else None, dy if call.carry else None
    if dy is None:
        dy = saved.x.new_empty(*saved.x.shape).zero_()
    # in blocks only if nobody but the exchange reads it
    dy, _ = (PLAIN if saved.wants_added else products).finish_gradient(dy, call.dropout, False)
    dadded = dy if saved.wants_added else None
    arrived = exchange.start_factor(dy, products)()
    rows = saved.rows()
    arriving = exchange.start_factor(rows, products) if call.deferred is None and saved.wants.gate_up else None
    da = expert_product(products, arrived, exchange.arrived, own.down, transposed=True)
    dhidden, a, dw = implementation("weighted_activation", da).weighted_activation_backward(
        da, saved.hidden, call.activation, exchange.arrived.weights
    )
    dhidden = products.factor(dhidden)
    ddown = _down_gradient(saved, arrived, products.factor(a))
    drows = None
    if saved.wants_rows:
        drows = exchange.home(experts_reduce(call.transport, dhidden, exchange.arrived, own.gate_up, transposed=True))
    drouter = dweights = None
    if saved.decided is None:
        dweights = exchange.weights_home(dw) if saved.wants_weights else None
    elif saved.wants_router or saved.wants_rows:
        assert call.router is not None and saved.router_weight is not None
        given = dbalance, saved.decided, rows, saved.router_weight, call.router.policy
        drows, drouter = routing_gradients(exchange.weights_home(dw), drows, *given)
    private = call.private and saved.wants_x
    of_input = norm_gradients(drows, dcarried, saved.x, saved.norm, (saved.mean, saved.rstd), products, private)
    dgate_up = _gate_up_gradient(saved, rows, dhidden, arriving)
    return *of_input, dresidual, dadded, drouter, dweights, None, None, dgate_up, ddown


def _down_gradient(saved: _Saved, arrived: Factor, a: Factor) -> Tensor | None:
    """The gradient of `down` from the rows of dy that have arrived; None if it is made later, or not wanted."""
    matrix = partial(saved.call.transport.products.matrix, dtype=saved.own.down.dtype)
    deferred, dispatch = saved.call.deferred, saved.exchange.arrived

    def gradient() -> Tensor:
        return weight_gradient(matrix(arrived), matrix(a), dispatch, dy_of_tokens=True)

    if not saved.wants.down:
        return None
    if deferred is None:
        return gradient()
    deferred.queue.add(lambda: deferred.sinks[1](gradient()), *held(arrived, a))
    return None


def _gate_up_gradient(
    saved: _Saved, rows: Tensor, dhidden: Factor, arriving: Callable[[], Factor] | None
) -> Tensor | None:
    """The gradient of `gate_up` from norm(x), which is arriving; a queue sends it later."""
    exchange, deferred, products = saved.exchange, saved.call.deferred, saved.call.transport.products
    dtype = rows.dtype

    def gradient(arrived: Factor) -> Tensor:
        dy, x = (products.matrix(each, dtype) for each in (dhidden, arrived))
        return weight_gradient(dy, x, exchange.arrived, x_of_tokens=True)

    if arriving is not None:
        return gradient(arriving())
    if deferred is not None and saved.wants.gate_up:
        factor = products.factor(rows)

        def run() -> None:  # without the call, whose router has each token's sample
            with unbroken(exchange.group, "the backward of exchanged_experts"):
                arrived = exchange.start_factor(factor, products)()
            deferred.sinks[0](gradient(arrived))

        deferred.queue.add(run, *held(factor, dhidden))
    return None


@torch.no_grad()
def _begin(rows: Tensor, normed: Normed | None, router_weight: Tensor | None, call: _Call) -> _Begun:
    """Decide where own rows go, unless the routing is given, and send them."""
    rows, mean, rstd = normalised(rows, call.norm, normed)
    exchanging = partial(unbroken, call.group, "exchanged_experts")

    def plan(routing: Routing) -> Plan:
        with exchanging():
            return plan_exchange(routing, call.n_experts, call.group, call.once_a_rank)

    def decision() -> tuple[Decided | None, Plan]:
        if router_weight is None:
            assert call.routing is not None
            return None, plan(within(call.routing, call.n_experts))
        assert call.router is not None
        decided = decide(rows, router_weight, call.router, None, False)
        assert decided.routing is not None
        return decided._replace(routing=None), plan(decided.routing)

    decided, planned = once(decision)
    with exchanging():
        arriving = RowExchange(planned, call.group).start_factor(rows, call.transport.products)
        return _Begun(mean, rstd, decided, planned, arriving)


def _applied(
    of_input: tuple, normed: Normed | None, inside: Tensor | None, added: Tensor | Callable[[], Tensor] | None,
    of_router: tuple, call: _Call, matrices: ExpertWeights, added_dtypes: Sequence[torch.dtype],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """ExchangedExpertsFunction, once the ranks have been told of the call. What is added is made while rows travel."""
    rows, router, routing = of_input[0], call.router, call.routing

    def check(x: Tensor | None) -> None:
        require("exchanged_experts", rows, ("added", x, rows.shape, added_dtypes))

    if isinstance(added, Tensor):
        check(added)
    if normed is not None:
        check_normed(rows, call.norm, normed)
    chosen = None if router is None else router.policy, None if routing is None else routing.experts.shape[1]
    local = call.activation, told(call.dropout), call.norm and call.norm[::3]
    agreed = call.n_experts, call.once_a_rank, *call.transport.agreed, *chosen, *local
    called(
        call.group, "exchanged_experts", rows.shape[1:], rows.dtype, True, of_input + of_router, matrices, *agreed
    )  # fmt: skip
    exchanging = partial(unbroken, call.group, "exchanged_experts")
    with without_autocast(rows):
        begun = _begin(rows, normed, of_router[0], call)
    private = None  # what nobody else reads
    if added is not None and not isinstance(added, Tensor):
        with exchanging():
            added = private = added()
        try:
            check(private)
        except ValueError:
            begun.arriving()  # as on all ranks, so that they can go on
            raise
    call = call._replace(routing=None, skip=leaves_out_end(private))
    with exchanging(), without_autocast(rows):
        inputs = *of_input, inside, autocast_to(added, rows.dtype), *of_router
        return ExchangedExpertsFunction.apply(*inputs, call, begun, *matrices[:2])


@uncompiled
def exchanged_experts(
    x: Tensor, matrices: ExpertWeights, *, router_weight: Tensor | None = None, router: Router | None = None,
    routing: Routing | None = None, n_experts: int, activation: str, norm: Norm | None = None,
    normed: Normed | None = None, residual: Tensor | None = None, added: Tensor | Callable[[], Tensor] | None = None,
    dropout: Dropout | None = None, group: ProcessGroup | None = None, once_a_rank: bool = True,
    transport: Transport = LOCAL, deferred: Deferred | None = None, private: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(Y, balance loss or None): Y = residual + dropout(added + sum over a token's experts of weight * E(norm(x))).

    Shapes:  x, residual, added and Y (T, H): own tokens, whose rows travel to the ranks of `group` that have their
             experts. T may be 0, and differ between ranks. matrices: of this rank's n_experts / ep experts, those of
             rank r of ep being the r-th part; without a shared expert, whose result is `added`, or a function that
             makes it while rows travel, and reads it no more (skip_end of `recompute`). Either router_weight
             (n_experts, H) and router, or `routing` of own tokens, in which op `route` decided before. group: None is
             one rank. activation, normed, dropout, private: as in `experts`. transport: one of one rank, which says
             what is multiplied, and so as what rows travel out.
    once_a_rank: a token's row goes once to a rank that has several experts of it, and one row comes back, the sum of
             what these make of it. Otherwise a row goes and comes for each expert.
    Numerics: a token's rows are added in the order of experts, in at least float32; what travels is rounded before.
    Saves:   x before the norm, gate and up of the R rows that this rank's experts take, and the routing: 8 bytes for
             each of these, 8 K + 4 E for each own token, and once_a_rank 4 for each of the N rows that leave. The
             backward rebuilds everything else. A recomputed region keeps the decision and the plan.
    Communication, per rank, all-to-alls of what it sends. Forward: 16 bytes for each rank, for which the host waits; 8
             for each of T K experts of tokens (16 in float64); N rows out, at most T K; a row back for each that has
             come. Backward: N rows out twice (dy, and x again for gate_up), rows back once, and 4 bytes (8) for each of
             R. Every rank joins in each, whatever it has.
    deferred: its queue takes the gradients of matrices; it has a sink for each. x is sent again when it runs.
    The balance loss and the router's load are those of own tokens; the ranks that share the tokens of samples are the
    groups of the router's Balance. Gradients of the norm's parameters and of router_weight are partial sums over own
    rows, those of experts without rows are zero. Under torch.autocast as `experts`.
    Errors:  ValueError as `experts`, and for a shared expert among the matrices. RuntimeError where ranks are known to
             call with other options, and after an exception between two exchanges, also of the backward: the group
             cannot be used any more, since other ranks would take what comes next for what they wait for.
    Source:  Lepikhin et al. 2020 (arXiv:2006.16668); once a rank: as once a node in DeepSeek-V3 (arXiv:2412.19437)
    """
    check_options(activation, dropout, routing, n_experts, len(matrices.gate_up), group)
    check_routing(len(x), router_weight, router, routing, 1)
    if any(each is not None for each in matrices[2:]):
        raise ValueError("exchanged_experts takes no shared expert among its matrices: give its result as `added`")
    autocast = autocast_dtype(x)
    rows, inside = x, None if (carry := residual is x and autocast is None) else residual
    if deferred is not None:
        check_sinks(deferred, 2)
    if autocast is not None:
        rows, matrices, deferred = in_autocast(autocast, rows, matrices, norm, deferred)
        norm = normed = inside = None
    check_operands(rows, matrices, routing, router_weight, Finish(None, dropout, residual), n_experts, autocast)
    if routing is not None:
        routing = Routing(routing.experts, routing.weights.to(wide(rows.dtype)))
    call = _Call(
        group, norm, router, routing, n_experts, activation, dropout, once_a_rank, carry, private, deferred, transport
    )
    of_input, of_router = (rows, *parameters(norm)), (router_weight, None if routing is None else routing.weights)
    dtypes = (rows.dtype,) if autocast is None else FLOATS
    y, loss = _applied(of_input, normed, inside, added, of_router, call, matrices, dtypes)
    y = y if autocast is None or residual is None else residual + y
    return made(y), loss

"""row_linear: [activation ->] GEMM -> reduction [-> bias, dropout, residual], the exit of a tensor-parallel region."""

from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.config import check_choice, check_range
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.norm.reference import NORMS
from tpformer.kernels.operands import FLOATS, require, unknown
from tpformer.torch_private import Function

from .autocast import autocast_dtype, cast, cast_back
from .calls import SCATTERED, called
from .dropout import check_starts, told
from .first_derivative import first_derivative
from .norm import Norm, Normed, parameters, written
from .packing import keep, kept, unpacked
from .recompute import leaves_out_end, made
from .sequence import flat_rows, with_leading_dims
from .transports.interface import Transport
from .transports.products import held
from .transports.sequential import LOCAL
from .uncompiled import uncompiled
from .unsaved import versions
from .weight_gradients import Deferred, check_sinks


class _Call(NamedTuple):
    """What the Function takes that is no tensor."""

    transport: Transport
    activation: str | None
    dropout: Dropout | None
    skip: bool  # whether this is the end of a region's second run, whose result nobody reads
    private: bool
    deferred: Deferred | None


class RowLinearFunction(Function):
    """Y = Z + drop(R(A W^T) + b) with A = act(X) or act(gate) * X. R sums over ranks, its transpose G gathers.

    t ranks, M rows in total, K input features on this rank, N output features:
        X, gate, A (M, K); W (N, K); b (N,); residual Z, Y and dY (M / t, N) with sequence parallelism, else (M, N)
        forward  Y = Z + drop(R(A W^T) + b)     R: reduce-scatter, (M, N) -> (M / t, N); without it all-reduce, (M, N)
        dgrad    dA = G(drop(dY)) W             G: all-gather, (M / t, N) -> (M, N); without it nothing
        wgrad    dW = G(drop(dY))^T A, db = drop(dY)^T 1, dZ = dY
    R adds what the ranks made of their features, so each rank needs the gradient of all rows: that is G. Without
    sequence parallelism Y and dY are equal on all ranks, and nothing has to be gathered. drop is its own transpose.
    Then dX = dA act'(X), or with a gate dX = dA act(gate) and dgate = dA X act'(gate). The backward rebuilds A from X
    and gate.
    """

    @staticmethod
    def forward(ctx, x, gate, weight, bias, residual_shard, next_norm: Norm | None, call: _Call):
        ctx.call, ctx.deferred = call, call.deferred
        ctx.versions = None if call.dropout is None else versions(call.dropout.start)
        keep(ctx, x, gate, weight, readable=0 if call.activation is None else 2)
        if call.skip:
            return x.new_empty(len(x) // call.transport.sharing, len(weight))
        products = call.transport.products
        a = products.factor(x) if call.activation is None else products.activated(x, call.activation, gate)
        finish = Finish(bias, call.dropout, residual_shard, next_norm)
        y_shard, normed = call.transport.matmul_reduce([a], [weight], transposed=True, finish=finish)
        if normed is None:
            return y_shard
        ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient
        ctx.mark_non_differentiable(*(part for part in normed if part is not None))
        return y_shard, *normed[:3]

    @staticmethod
    @first_derivative
    def backward(ctx, dy_shard, *_):
        x, gate, weight = kept(ctx)
        call: _Call = ctx.call
        wants_x, wants_gate, wants_weight, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        dresidual_shard = dy_shard if wants_residual else None
        check_starts(call.dropout, ctx.versions)
        dtype, gathering = dy_shard.dtype, call.transport.gathering
        dy_shard, dbias = gathering.products.finish_gradient(dy_shard, call.dropout, wants_bias)
        dx = dgate = dweight = dy_gathered = None
        if wants_x or wants_gate:
            dx, dgate, a, dy_gathered = gathering.gather_matmul_derivative(
                dy_shard, weight, x, gate, call.activation, keep=call.deferred is not None
            )
            if not call.private:
                call.transport.products.show(dx, dgate)
        elif wants_weight:
            a = call.transport.products.activated(unpacked(x), call.activation, unpacked(gate))

        # what a queue keeps alive: one of the two
        dy_held = dy_shard if dy_gathered is None else dy_gathered

        def weight_gradient() -> Tensor:
            dy = gathering.start_gather(dy_held)() if dy_gathered is None else dy_held
            matrix = call.transport.products.matrix
            return matrix(dy, dtype).t() @ matrix(a, dtype)

        if call.deferred is not None and wants_weight:
            queue, (sink,) = call.deferred
            queue.add(lambda: sink(weight_gradient()), *held(dy_held, a))
        elif wants_weight:
            dweight = weight_gradient()
        return dx, dgate, dweight, dbias, dresidual_shard, None, None


def _check_operands(
    rows: Tensor, weight: Tensor, gate: Tensor | None, finish: Finish, sharing: int, autocast: torch.dtype | None
) -> None:
    """ValueError unless all operands are as row_linear says, of rows (tokens, K / t). sharing: ranks that divide the
    result's rows."""
    (bias, dropout, residual, norm), shape, dtype, device = finish, rows.shape, rows.dtype, rows.device
    own, dtypes = (dtype,), (dtype,) if autocast is None else FLOATS
    n, k, m = weight.shape[0], shape[-1], shape[0] // sharing
    if (
        len(shape) != 2 or dtype not in FLOATS
        or weight.shape != (n, k) or weight.dtype != dtype or weight.device != device
        or (gate is not None and (gate.shape != shape or gate.dtype != dtype or gate.device != device))
        or (bias is not None and (bias.shape != (n,) or bias.dtype != dtype or bias.device != device))
        or (residual is not None and (
            residual.shape != (m, n) or residual.dtype not in dtypes or residual.device != device
        ))
    ):  # fmt: skip
        require(
            "row_linear", rows, ("x", rows, (shape[0], k), FLOATS), ("weight", weight, (n, k), own),
            ("gate", gate, shape, own), ("bias", bias, (n,), own), ("residual", residual, (m, n), dtypes),
        )  # fmt: skip
    if dropout is not None:
        require("row_linear", rows, ("dropout's start", dropout.start, (m,), (torch.int64,)))
    if norm is not None:
        scale, shift = parameters(norm)
        of_norm = ("next_norm's weight", scale, (n,), FLOATS), ("next_norm's bias", shift, (n,), FLOATS)
        require("row_linear", rows, *of_norm)


def _check_options(
    activation: str | None,
    gate: Tensor | None,
    dropout: Dropout | None,
    next_norm: Norm | None,
    autocast: torch.dtype | None,
    deferred: Deferred | None,
) -> None:
    if deferred is not None:
        check_sinks(deferred, 1)
    if activation is not None:
        check_choice("activation", activation, ACTIVATIONS)
    if gate is not None and activation is None:
        raise ValueError("a gate needs an activation: give one, for act(gate) * x")
    if dropout is not None:
        check_range("model.dropout", dropout.p, "dropout")
    if next_norm is not None and next_norm.kind not in NORMS:
        raise unknown("norm", next_norm.kind, NORMS)
    if next_norm is not None and autocast is not None:
        raise ValueError("next_norm would be made in autocast's dtype: call ops.norm, which makes it in float32")


@uncompiled
def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dropout: Dropout | None = None,
    next_norm: Norm | None = None,
    transport: Transport | None = None,
    deferred: Deferred | None = None,
    private: bool = False,
) -> Tensor | tuple[Tensor, Normed]:
    """Y = residual + dropout(reduce(act(x) W^T) + b) for a weight sharded by input feature.

    Shapes:  x (tokens, K / t), before the activation; gate like x (SwiGLU: act(gate) * x); weight (N, K / t);
             bias (N,), added once, after the reduction; residual and result (tokens / t, N) with sequence_parallel,
             else (tokens, N), equal on all ranks. The result has x's dtype.
             transport: as in column_linear; TensorParallel.row_transport opens one.
             activation: None, "gelu" (erf), "gelu_tanh", "silu" or "relu2".
             next_norm: the norm before the next linear. The pass that adds bias, dropout and residual applies it, too,
             and the result is (Y, Normed). Give both to the next column_linear, Y as x and Normed as normed.
             Leading dims of x, gate and residual are flattened to rows; Y has x's again if it has as many rows.
             private: no hook can see x and gate, or write their gradients, which in FP8 then have blocks beside.
    Saves:   x and gate as given. The backward rebuilds act(x) and draws dropout's mask again.
    Communication, per rank, B = tokens * N * itemsize:
             sequence parallel: forward reduce-scatter B; backward all-gather B (dy, used for dx and dW)
             otherwise:         forward all-reduce B; backward none
             deferred: its queue takes the weight gradient and the gathered dy; it has one sink.
    With sequence_parallel the bias gradient is a partial sum, over own rows. At t = 1 all is F.linear's, bit by bit.
    Under torch.autocast all but the residual have autocast's dtype; the residual keeps its own, and is added last.
    Errors:  ValueError for an unknown activation, a gate without one, dropout outside [0, 1), tokens not divisible by t
             (with sequence_parallel), next_norm under autocast, and operands of other shapes, dtypes or devices:
             nothing is broadcast; x, gate, weight, bias and, but for autocast, the residual have one dtype.
             TypeError for a transport that is not an opened one.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198)
    """
    transport, autocast = LOCAL if transport is None else transport, autocast_dtype(x)
    _check_options(activation, gate, dropout, next_norm, autocast, deferred)
    rows, added = x, residual
    if x.dim() != 2:
        rows, gate, added = (None if each is None else flat_rows(each) for each in (x, gate, residual))
    if autocast is not None:
        deferred = cast_back(deferred, [weight])
        rows, gate, weight, bias = (cast(each, autocast) for each in (rows, gate, weight, bias))
    _check_operands(rows, weight, gate, Finish(bias, dropout, added, next_norm), transport.sharing, autocast)
    call = _Call(transport, activation, dropout, next_norm is None and leaves_out_end(), private, deferred)
    if transport.untold is not None:
        needing = ((rows, gate), (weight,), SCATTERED) if transport.sequence_parallel else ((), ())
        alike = *transport.agreed, activation, told(dropout), next_norm and next_norm[::3]
        called(transport.untold, "row_linear", (rows.shape[0], weight.shape[0]), rows.dtype, True, *needing, *alike)
    outputs = RowLinearFunction.apply(rows, gate, weight, bias, added if autocast is None else None, next_norm, call)
    y, *of_norm = (outputs,) if next_norm is None else outputs
    if autocast is not None and added is not None:
        y = added + y
    result = y if x.dim() == 2 else with_leading_dims(y, x)
    if next_norm is None:
        return made(result)
    return result, Normed(*[*of_norm, (y, next_norm, written(y, next_norm))])

"""row_linear: [activation ->] GEMM -> reduction [-> bias, dropout, residual], the exit of a tensor-parallel region."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config import check_dropout
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.finish import Dropout, Finish

from .autocast import autocast_dtype, cast, cast_back, without_autocast
from .first_derivative import first_derivative
from .implementation import implementation
from .norm import Norm, Normed
from .recompute import running_again
from .transport import LOCAL, open_transport, row_request
from .transports.interface import Transport
from .uncompiled import uncompiled
from .weight_gradients import Deferred


class _Layout(NamedTuple):
    transport: Transport
    sequence_parallel: bool
    activation: str | None
    dropout: Dropout | None
    skip: bool
    deferred: Deferred | None


class RowLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, bias, residual, next_norm: Norm | None, layout: _Layout):
        ctx.layout, ctx.deferred = layout, layout.deferred
        ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
        ctx.save_for_backward(x, gate, weight)
        if layout.skip:
            return x.new_empty(_result_rows(x, layout), len(weight))
        a = implementation("activation", x).activation_forward(x, layout.activation, gate)
        finish = Finish(bias, layout.dropout, residual, next_norm)
        y, normed = layout.transport.matmul_reduce(
            [a], [weight], transposed=True, scatter=layout.sequence_parallel, finish=finish
        )
        if normed is None:
            return y
        ctx.set_materialize_grads(False)  # no zeros for outputs that have no gradient
        ctx.mark_non_differentiable(*(part for part in normed if part is not None))
        return y, *normed

    @staticmethod
    @first_derivative
    def backward(ctx, dy, *_):
        x, gate, weight = ctx.saved_tensors
        layout: _Layout = ctx.layout
        dresidual = dy if ctx.has_residual else None
        dy, dbias = implementation("dropout", dy).finish_backward(dy, layout.dropout, ctx.has_bias)
        gathering = layout.transport if layout.sequence_parallel else LOCAL
        dx, dgate, a, gathered = gathering.gather_matmul_derivative(
            dy, weight, x, gate, layout.activation, keep=layout.deferred is not None
        )
        dweight = None
        if layout.deferred is not None and ctx.needs_input_grad[2]:
            queue, (sink,) = layout.deferred
            queue.add(lambda: sink(gathered.t() @ a))
        elif ctx.needs_input_grad[2]:
            dweight = gathered.t() @ a
        return dx, dgate, dweight, dbias, dresidual, None, None


def _result_rows(x: Tensor, layout: _Layout) -> int:
    group = layout.transport.group
    return len(x) // group.size() if layout.sequence_parallel and group is not None else len(x)


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
    ends_region: bool = False,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    transport: str | Transport = "auto",
    deferred: Deferred | None = None,
) -> Tensor | tuple[Tensor, Normed]:
    """Y = residual + dropout(reduce(act(x) W^T) + b) for a weight sharded by input feature.

    Shapes:  x (tokens, K / t), before the activation; gate like x (SwiGLU: act(gate) * x); weight (N, K / t);
             bias (N,), added once, after the reduction; residual and result (tokens / t, N) with sequence_parallel,
             else (tokens, N), equal on all ranks. t = group.size(); group None is one rank.
             activation: None, "gelu" (erf), "gelu_tanh", "silu" or "relu2".
             next_norm: of the linear that comes next: the result is (Y, Normed of norm(Y)) for its `normed`, made in
             the pass that adds bias, dropout and residual. ends_region: it is the last of a recomputed region.
    Saves:   x and gate as given. act(x) is rebuilt in the backward; dropout's mask is drawn again.
    Communication, per rank, B = tokens * N * itemsize:
             sequence parallel: forward reduce-scatter B; backward all-gather B (dy, used for dx and dW)
             otherwise:         forward all-reduce B; backward none
             transport: how (choose_transport), or the Transport that was opened for this shape, as in column_linear.
             deferred: the weight gradient is queued for its one sink, and gathered dy kept until then.
    The bias gradient is a partial sum over this rank's rows under sequence_parallel.
    At t = 1 every output and gradient is bit-identical to F.linear's.
    Under torch.autocast all but the residual has autocast's dtype, and the residual, added last, its own.
    Errors:  ValueError for an unknown activation, a gate without one, dropout outside [0, 1), tokens not divisible by t
             (with sequence_parallel), a transport that cannot run, or a next_norm under autocast.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198)
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if gate is not None and activation is None:
        raise ValueError("a gate needs an activation: act(gate) * x")
    if dropout is not None:
        check_dropout(dropout.p)
    if next_norm is not None and ends_region:
        raise ValueError("next_norm and ends_region exclude each other: nothing follows the end of a region")
    if (dtype := autocast_dtype(x)) is not None:
        if next_norm is not None:
            raise ValueError("next_norm would be made in autocast's dtype: call ops.norm, which makes it in float32")
        with without_autocast(x):
            y = row_linear(
                cast(x, dtype),
                cast(weight, dtype),
                cast(bias, dtype),
                activation=activation,
                gate=cast(gate, dtype),
                dropout=dropout,
                ends_region=ends_region,
                group=group,
                sequence_parallel=sequence_parallel,
                transport=transport,
                deferred=cast_back(deferred, [weight]),
            )
        return y if residual is None else residual + y
    if isinstance(transport, str):
        k, n = x.shape[1], len(weight)
        transport = open_transport(row_request(len(x), k, n, x.dtype, x.device, group, sequence_parallel, transport))
    skip = ends_region and running_again()
    layout = _Layout(transport, sequence_parallel, activation, dropout, skip, deferred)
    y = RowLinearFunction.apply(x, gate, weight, bias, residual, next_norm, layout)
    return y if next_norm is None else (y[0], Normed(*y[1:]))

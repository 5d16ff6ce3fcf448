"""column_linear: [norm ->] gather -> GEMM(s), the entry of a tensor-parallel region."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.kernels.norm.reference import norm_backward, norm_forward

from .norm import Norm
from .transport import LOCAL, column_request, open_transport
from .transports.interface import Transport
from .weight_gradients import Deferred


class _Layout(NamedTuple):
    transport: Transport
    sequence_parallel: bool
    norm_kind: str | None
    eps: float
    deferred: Deferred | None

    @property
    def gathering(self) -> Transport:
        """Carries the gathers; without sequence parallelism there are none."""
        return self.transport if self.sequence_parallel else LOCAL


class ColumnLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, layout: _Layout, *weights_and_biases):
        n = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:n], weights_and_biases[n:]
        normed, (mean, rstd) = x, (None, None)
        if layout.norm_kind:
            normed, (mean, rstd) = norm_forward(x, norm_weight, norm_bias, layout.norm_kind, layout.eps)
        ctx.layout, ctx.has_bias = layout, [bias is not None for bias in biases]
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, rstd, *weights)
        return tuple(layout.gathering.gather_matmul(normed, weights, biases))

    @staticmethod
    def backward(ctx, *dys):
        x, norm_weight, norm_bias, mean, rstd, *weights = ctx.saved_tensors
        layout: _Layout = ctx.layout
        dx = dnorm_weight = dnorm_bias = None
        normed = x
        if layout.norm_kind:
            # the norm's output was not kept: one cheap pass over x against 2 bytes per element held since the forward
            normed, _ = norm_forward(x, norm_weight, norm_bias, layout.norm_kind, layout.eps)
        gather = layout.gathering.start_gather
        gathered = gather(normed) if layout.deferred is None else None
        if ctx.needs_input_grad[0] or layout.norm_kind:
            dx = layout.transport.matmul_reduce(dys, weights, transposed=False, scatter=layout.sequence_parallel)
        if layout.norm_kind:
            dx, dnorm_weight, dnorm_bias = norm_backward(dx, x, (mean, rstd), norm_weight, norm_bias, layout.norm_kind)
        dbiases = [dy.sum(0) if has_bias else None for dy, has_bias in zip(dys, ctx.has_bias, strict=True)]
        if gathered is not None:
            rows = gathered()
            dweights = [dy.t() @ rows for dy in dys]
        else:
            dweights = [None] * len(dys)
            _defer(layout, normed, dys, ctx.needs_input_grad[4:])
        return dx, dnorm_weight, dnorm_bias, None, *dweights, *dbiases


def _defer(layout: _Layout, normed: Tensor, dys: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    """Queue the weight gradients; the gather they need waits with them."""
    assert layout.deferred is not None
    queue, sinks = layout.deferred
    gather = layout.gathering.start_gather
    pairs = [pair for pair, wants in zip(zip(sinks, dys, strict=True), wanted, strict=False) if wants]

    def make() -> None:
        rows = gather(normed)()
        for sink, dy in pairs:
            sink(dy.t() @ rows)

    if pairs:
        queue.add(make)


def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    transport: str = "auto",
    width: int | None = None,
    deferred: Deferred | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Y = gather(norm(x)) W^T + b for weights sharded by output feature: one gather, one GEMM per weight.

    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K) and equal on all ranks; weight (N / t, K), or a
             sequence of such weights sharing the gather; bias (N / t,) or None, one per weight; result (tokens, N / t),
             or a tuple. t = group.size(); group None is one rank.
    Saves:   x before the norm and two statistics a row. The norm's output and the gathered input are rebuilt.
    Communication, per rank, B = tokens * K * itemsize:
             sequence parallel: forward all-gather B; backward reduce-scatter B (dx), all-gather B (x again, for dW)
             otherwise:         forward none; backward all-reduce B (dx)
             transport: how (choose_transport); width: where ranks differ, N / t of all weights on the rank that has
             most, so that "auto" chooses alike. deferred: weight gradients are queued, one sink per weight, and the
             second all-gather with them.
    Gradients of the norm's parameters are partial sums over this rank's rows under sequence_parallel.
    At t = 1 every output and gradient is bit-identical to F.linear's.
    Errors:  ValueError for a transport that cannot run, or a bias sequence of another length than weight's.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), sequence parallelism
    """
    several = not isinstance(weight, Tensor)
    weights: Sequence[Tensor] = weight if several else (weight,)
    biases = (bias if several and bias is not None else (bias,) * len(weights)) if several else (bias,)
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(biases)} biases: pass one bias (or None) per weight")
    width = width or sum(map(len, weights))
    request = column_request(len(x), x.shape[1], width, x.dtype, x.device, group, sequence_parallel, transport)
    kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
    layout = _Layout(open_transport(request), sequence_parallel, kind, eps, deferred)
    outputs = ColumnLinearFunction.apply(x, norm_weight, norm_bias, layout, *weights, *biases)
    return outputs if several else outputs[0]

"""column_linear: [norm ->] gather -> GEMM(s), the entry of a tensor-parallel region."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .autocast import autocast_dtype, cast, cast_back, without_autocast
from .first_derivative import first_derivative
from .implementation import implementation
from .norm import Norm, Normed
from .norm import norm as normalise
from .transport import LOCAL, column_request, open_transport
from .transports.interface import Transport
from .uncompiled import uncompiled
from .weight_gradients import Deferred


class _Layout(NamedTuple):
    transport: Transport
    sequence_parallel: bool
    norm: tuple[str, float | None] | None  # kind, eps
    carry: bool
    deferred: Deferred | None

    @property
    def gathering(self) -> Transport:
        """Carries the gathers; without sequence parallelism there are none."""
        return self.transport if self.sequence_parallel else LOCAL


class ColumnLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, layout: _Layout, normed: Normed | None, *weights_and_biases):
        n = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:n], weights_and_biases[n:]
        mean = rstd = None
        rows = x
        if normed is not None:
            rows, mean, rstd = normed
        elif layout.norm is not None:
            norm = _norm(layout, norm_weight, norm_bias)
            rows, (mean, rstd) = implementation("norm", x).norm_forward(x, norm)
        ctx.layout, ctx.deferred = layout, layout.deferred
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, rstd, *weights)
        outputs = tuple(layout.gathering.gather_matmul(rows, weights, biases))
        return (*outputs, x) if layout.carry else outputs

    @staticmethod
    @first_derivative
    def backward(ctx, *dys):
        x, norm_weight, norm_bias, mean, rstd, *weights = ctx.saved_tensors
        layout: _Layout = ctx.layout
        norm = _norm(layout, norm_weight, norm_bias)
        dys, dcarried = (dys[:-1], dys[-1]) if layout.carry else (dys, None)
        rows = x
        if norm is not None:
            # the norm's output was not kept: one cheap pass over x against 2 bytes per element held since the forward
            rows, _ = implementation("norm", x).norm_forward(x, norm)
        wanted = ctx.needs_input_grad[5 : 5 + len(weights)]
        gathered = layout.gathering.start_gather(rows) if layout.deferred is None and any(wanted) else None
        dx = dnorm_weight = dnorm_bias = None
        if ctx.needs_input_grad[0] or norm is not None:
            dx, _ = layout.transport.matmul_reduce(dys, weights, transposed=False, scatter=layout.sequence_parallel)
        if norm is not None:
            dx, dnorm_weight, dnorm_bias = implementation("norm", x).norm_backward(dx, x, (mean, rstd), norm, dcarried)
        elif dcarried is not None and dx is not None:
            dx += dcarried
        dbiases = [dy.sum(0) if has_bias else None for dy, has_bias in zip(dys, ctx.has_bias, strict=True)]
        dweights = [None] * len(dys)
        if gathered is not None:
            whole = gathered()
            dweights = [dy.t() @ whole if wants else None for dy, wants in zip(dys, wanted, strict=True)]
        elif layout.deferred is not None:
            _defer(layout, rows, dys, wanted)
        return dx, dnorm_weight, dnorm_bias, None, None, *dweights, *dbiases


def _norm(layout: _Layout, weight: Tensor, bias: Tensor | None) -> Norm | None:
    return None if layout.norm is None else Norm(layout.norm[0], weight, bias, layout.norm[1])


def _defer(layout: _Layout, normed: Tensor, dys: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    """Queue the weight gradients; the gather they need waits with them."""
    assert layout.deferred is not None
    queue, sinks = layout.deferred
    gather = layout.gathering.start_gather
    pairs = [pair for pair, wants in zip(zip(sinks, dys, strict=True), wanted, strict=True) if wants]

    def make() -> None:
        rows = gather(normed)()
        for sink, dy in pairs:
            sink(dy.t() @ rows)

    if pairs:
        queue.add(make)


@uncompiled
def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
    normed: Normed | None = None,
    carry: bool = False,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    transport: str | Transport = "auto",
    deferred: Deferred | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Y = gather(norm(x)) W^T + b for weights sharded by output feature: one gather, one GEMM per weight.

    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K) and equal on all ranks; weight (N / t, K), or a
             sequence of such weights sharing the gather; bias (N / t,) or None, one per weight; result (tokens, N / t),
             or a tuple. t = group.size(); group None is one rank.
             normed: norm(x), where row_linear has made it with x. carry: x is one more output, the last, for the
             residual path around the linears: its gradient is then added inside the norm's backward.
    Saves:   x before the norm and two statistics a row. The norm's output and the gathered input are rebuilt.
    Communication, per rank, B = tokens * K * itemsize:
             sequence parallel: forward all-gather B; backward reduce-scatter B (dx), all-gather B (x again, for dW)
             otherwise:         forward none; backward all-reduce B (dx)
             transport: how (choose_transport), or the Transport that was opened for this shape, whose group counts
             then. Where ranks differ in N / t, open it for the largest, so that "auto" chooses alike on all.
             deferred: weight gradients are queued, one sink per weight, and the second all-gather with them.
    Gradients of the norm's parameters are partial sums over this rank's rows under sequence_parallel.
    At t = 1 every output and gradient is bit-identical to F.linear's.
    Under torch.autocast the norm is made in float32, and saved; gather and GEMMs have autocast's dtype.
    Errors:  ValueError for a transport that cannot run, a bias sequence of another length than weight's, or `normed`
             without `norm`.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), sequence parallelism
    """
    several = not isinstance(weight, Tensor)
    weights: Sequence[Tensor] = weight if several else (weight,)
    biases = (bias if several and bias is not None else (bias,) * len(weights)) if several else (bias,)
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(biases)} biases: pass one bias (or None) per weight")
    if normed is not None and norm is None:
        raise ValueError("normed rows need their norm as well: its gradients are made here")
    if (dtype := autocast_dtype(x)) is not None:
        rows = x if norm is None else normalise(x, norm)
        with without_autocast(x):
            outputs = column_linear(
                cast(rows, dtype),
                [cast(w, dtype) for w in weights],
                [cast(b, dtype) for b in biases],
                group=group,
                sequence_parallel=sequence_parallel,
                transport=transport,
                deferred=cast_back(deferred, weights),
            )
        outputs = (*outputs, x) if carry else outputs
        return outputs if several or carry else outputs[0]
    if isinstance(transport, str):
        width = sum(map(len, weights))
        request = column_request(len(x), x.shape[1], width, x.dtype, x.device, group, sequence_parallel, transport)
        transport = open_transport(request)
    prologue = None if norm is None else (norm.kind, norm.eps)
    layout = _Layout(transport, sequence_parallel, prologue, carry, deferred)
    parameters = (None, None) if norm is None else (norm.weight, norm.bias)
    outputs = ColumnLinearFunction.apply(x, *parameters, layout, normed, *weights, *biases)
    return outputs if several or carry else outputs[0]

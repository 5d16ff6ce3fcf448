"""row_linear: [activation ->] GEMM -> reduction [-> bias, dropout, residual], the exit of a tensor-parallel region."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.activation.reference import ACTIVATIONS, activation_backward, activation_forward

from .dropout import Dropout
from .transport import resolve_transport


class _Layout(NamedTuple):
    group: ProcessGroup | None
    sequence_parallel: bool
    activation: str | None
    dropout: Dropout | None


class RowLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, bias, residual, layout):
        a = activation_forward(x, layout.activation, gate)
        if layout.group is None:
            y = F.linear(a, weight, bias)  # bias inside the GEMM: bit-identical to nn.Linear
        else:
            y = (reduce_scatter if layout.sequence_parallel else all_reduce)(a @ weight.t(), layout.group)
            if bias is not None:
                y += bias
        if layout.dropout is not None:
            y = layout.dropout.apply(y)
        if residual is not None:
            y += residual
        ctx.layout, ctx.has_bias, ctx.has_residual = layout, bias is not None, residual is not None
        ctx.save_for_backward(x, gate, weight)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, gate, weight = ctx.saved_tensors
        layout: _Layout = ctx.layout
        dresidual = dy if ctx.has_residual else None
        if layout.dropout is not None:
            dy = layout.dropout.apply(dy)
        dbias = dy.sum(0) if ctx.has_bias else None
        gathered = all_gather(dy, layout.group) if layout.sequence_parallel else dy
        dx, dgate, a = activation_backward(gathered @ weight, x, layout.activation, gate)
        return dx, dgate, gathered.t() @ a, dbias, dresidual, None


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    dropout: Dropout | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    transport: str = "auto",
) -> Tensor:
    """Y = residual + dropout(reduce(act(x) W^T) + b) for a weight sharded by input feature.

    Shapes:  x (tokens, K / t), before the activation; gate like x (SwiGLU: act(gate) * x); weight (N, K / t);
             bias (N,), added once, after the reduction; residual and result (tokens / t, N) with sequence_parallel,
             else (tokens, N), equal on all ranks. t = group.size(); group None is one rank.
             activation: None, "gelu" (erf), "gelu_tanh" or "silu".
    Saves:   x and gate as given. act(x) is rebuilt in the backward; dropout's mask is drawn again.
    Communication, per rank, B = tokens * N * itemsize:
             sequence parallel: forward reduce-scatter B; backward all-gather B (dy, used for dx and dW)
             otherwise:         forward all-reduce B; backward none
    The bias gradient is a partial sum over this rank's rows under sequence_parallel.
    At t = 1 every output and gradient is bit-identical to F.linear's.
    Errors:  ValueError for an unknown activation, a gate without one, tokens not divisible by t (with
             sequence_parallel), or a transport that cannot run.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198)
    """
    if resolve_transport(transport, group) == "local":
        group = None
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if gate is not None and activation is None:
        raise ValueError("a gate needs an activation: act(gate) * x")
    layout = _Layout(group, sequence_parallel, activation, dropout)
    return RowLinearFunction.apply(x, gate, weight, bias, residual, layout)

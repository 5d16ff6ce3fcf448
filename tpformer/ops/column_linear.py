"""column_linear: [norm ->] gather -> GEMM(s), the entry of a tensor-parallel region."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.norm.reference import norm_backward, norm_forward

from .norm import Norm
from .transport import resolve_transport


class _Layout(NamedTuple):
    group: ProcessGroup | None
    sequence_parallel: bool
    norm_kind: str | None
    eps: float


class ColumnLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, norm_bias, layout, *weights_and_biases):
        n = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:n], weights_and_biases[n:]
        normed, (mean, rstd) = x, (None, None)
        if layout.norm_kind:
            normed, (mean, rstd) = norm_forward(x, norm_weight, norm_bias, layout.norm_kind, layout.eps)
        gathered = all_gather(normed, layout.group) if layout.sequence_parallel else normed
        ctx.layout, ctx.has_bias = layout, [bias is not None for bias in biases]
        ctx.save_for_backward(x, norm_weight, norm_bias, mean, rstd, *weights)
        return tuple(F.linear(gathered, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *dys):
        x, norm_weight, norm_bias, mean, rstd, *weights = ctx.saved_tensors
        layout: _Layout = ctx.layout
        dx = dnorm_weight = dnorm_bias = None
        if ctx.needs_input_grad[0] or layout.norm_kind:
            dx = dys[0] @ weights[0]
            for dy, weight in zip(dys[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            dx = (reduce_scatter if layout.sequence_parallel else all_reduce)(dx, layout.group)
        normed = x
        if layout.norm_kind:
            # the norm's output was not kept: one cheap pass over x against 2 bytes per element held since the forward
            normed, _ = norm_forward(x, norm_weight, norm_bias, layout.norm_kind, layout.eps)
            dx, dnorm_weight, dnorm_bias = norm_backward(dx, x, (mean, rstd), norm_weight, norm_bias, layout.norm_kind)
        gathered = all_gather(normed, layout.group) if layout.sequence_parallel else normed
        dweights = [dy.t() @ gathered for dy in dys]
        dbiases = [dy.sum(0) if has_bias else None for dy, has_bias in zip(dys, ctx.has_bias, strict=True)]
        return dx, dnorm_weight, dnorm_bias, None, *dweights, *dbiases


def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    transport: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Y = gather(norm(x)) W^T + b for weights sharded by output feature: one gather, one GEMM per weight.

    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K) and equal on all ranks; weight (N / t, K), or a
             sequence of such weights sharing the gather; bias (N / t,) or None, one per weight; result (tokens, N / t),
             or a tuple. t = group.size(); group None is one rank.
    Saves:   x before the norm and two statistics a row. The norm's output and the gathered input are rebuilt.
    Communication, per rank, B = tokens * K * itemsize:
             sequence parallel: forward all-gather B; backward reduce-scatter B (dx), all-gather B (x again, for dW)
             otherwise:         forward none; backward all-reduce B (dx)
    Gradients of the norm's parameters are partial sums over this rank's rows under sequence_parallel.
    At t = 1 every output and gradient is bit-identical to F.linear's.
    Errors:  ValueError for a transport that cannot run, or a bias sequence of another length than weight's.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), sequence parallelism
    """
    if resolve_transport(transport, group) == "local":
        group = None
    several = not isinstance(weight, Tensor)
    weights: Sequence[Tensor] = weight if several else (weight,)
    biases = (bias if several and bias is not None else (bias,) * len(weights)) if several else (bias,)
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights but {len(biases)} biases: pass one bias (or None) per weight")
    kind, norm_weight, norm_bias, eps = norm or (None, None, None, 0.0)
    layout = _Layout(group, sequence_parallel, kind, eps)
    outputs = ColumnLinearFunction.apply(x, norm_weight, norm_bias, layout, *weights, *biases)
    return outputs if several else outputs[0]

"""column_linear: [norm ->] gather -> GEMM(s), the entry of a tensor-parallel region."""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.matmul.reference import check_linears
from tpformer.torch_private import Function

from .autocast import autocast_dtype, cast, cast_back
from .calls import called
from .first_derivative import first_derivative
from .implementation import implementation
from .norm import Norm, Normed, check_normed, normalised, parameters, restored
from .norm import norm as normalise
from .packing import keep, kept
from .sequence import flat_rows, with_leading_dims
from .transports.interface import Transport
from .transports.products import Factor, held
from .transports.sequential import LOCAL
from .uncompiled import uncompiled
from .weight_gradients import Deferred, check_sinks


class _Call(NamedTuple):
    """What the Function takes that is no tensor."""

    transport: Transport
    norm: Norm | None
    carry: bool
    private: bool
    deferred: Deferred | None


class ColumnLinearFunction(Function):
    """Y_i = G(norm(X)) W_i^T + b_i for each weight i. G gathers all ranks' rows; its transpose R reduces gradients.

    t ranks, M rows in total, K input features, N_i output features on this rank. With sequence parallelism:
        X (M / t, K), norm(X) and its gradient like X; W_i (N_i, K); b_i (N_i,); Y_i and dY_i (M, N_i)
        forward  Y_i = G(norm(X)) W_i^T + b_i                     G: all-gather, (M / t, K) -> (M, K)
        dgrad    dnorm(X) = R(sum_i dY_i W_i)                     R: reduce-scatter, (M, K) -> (M / t, K)
        wgrad    dW_i = dY_i^T G(norm(X)), db_i = dY_i^T 1        G again: the forward did not keep the gathered rows
    Every rank's features use the rows of all ranks, so a row's gradient is a sum over ranks: that is R.
    Without sequence parallelism X and norm(X) are (M, K), equal on all ranks:
        forward  Y_i = norm(X) W_i^T + b_i                        no gather
        dgrad    dnorm(X) = R(sum_i dY_i W_i)                     R: all-reduce of (M, K)
        wgrad    dW_i = dY_i^T norm(X), db_i = dY_i^T 1
    Then dX = norm'(X)^T dnorm(X), or dnorm(X) without a norm. If X was carried, its output's gradient is added.
    The backward rebuilds norm(X) from X and its statistics. The norm's parameters are inputs: autograd has to see them.
    """

    @staticmethod
    def forward(ctx, x_shard, norm_weight, norm_bias, call: _Call, normed: Normed | None, *weights_and_biases):
        n = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:n], weights_and_biases[n:]
        normed_shard, mean, rstd = normalised(x_shard, call.norm, normed, call.transport.products.in_blocks)
        ctx.call, ctx.deferred = call, call.deferred
        ctx.set_materialize_grads(False)  # the weight of an output that nobody uses gets no gradient, not zeros
        keep(ctx, x_shard, norm_weight, norm_bias, mean, rstd, *weights, readable=call.norm is not None)
        outputs = tuple(call.transport.gathering.gather_matmul(normed_shard, weights, biases))
        return (*outputs, x_shard) if call.carry else outputs

    @staticmethod
    @first_derivative
    def backward(ctx, *dys):
        x_shard, norm_weight, norm_bias, mean, rstd, *weights = kept(ctx)
        call: _Call = ctx.call
        transport, products = call.transport, call.transport.products
        norm = restored(call.norm, norm_weight, norm_bias)
        dys, dcarried = (dys[:-1], dys[-1]) if call.carry else (dys, None)
        normed_shard = x_shard
        if norm is not None:
            # one cheap pass over x; otherwise the forward would have kept norm(x)
            rebuilt = implementation("norm", x_shard).norm_rebuilt
            normed_shard = rebuilt(x_shard, (mean, rstd), norm, products.in_blocks)
        n, needed = 5 + len(weights), ctx.needs_input_grad
        used = [dy is not None for dy in dys]
        wanted, wanted_biases = ([*map(and_, used, wants)] for wants in (needed[5:n], needed[n:]))
        begins = call.deferred is None and any(wanted)
        gathering = transport.gathering.start_gather(normed_shard) if begins else None
        factors: list[Any] = [None if dy is None else products.factor(dy) for dy in dys]
        dx_shard, dnorm_weight, dnorm_bias = (None if any(used) else dcarried), None, None
        if any(needed[:3]) and any(used):
            some = [list(compress(each, used)) for each in (factors, weights)]
            dx_shard, _ = transport.matmul_reduce(*some, transposed=False)
            if norm is not None:
                dx_shard, dnorm_weight, dnorm_bias = products.norm_gradients(
                    dx_shard, x_shard, (mean, rstd), norm, dcarried, call.private and needed[0]
                )
            elif dcarried is not None:
                dx_shard += dcarried
        dbiases = [dy.sum(0) if wants else None for dy, wants in zip(dys, wanted_biases, strict=True)]
        dweights = [None] * len(dys)
        if gathering is not None:
            dtype, matrix = x_shard.dtype, products.matrix
            normed_gathered = matrix(gathering(), dtype)
            pairs = zip(factors, wanted, strict=True)
            dweights = [matrix(dy, dtype).t() @ normed_gathered if wants else None for dy, wants in pairs]
        elif call.deferred is not None:
            _defer(call, normed_shard, factors, wanted, x_shard.dtype)
        return dx_shard, dnorm_weight, dnorm_bias, None, None, *dweights, *dbiases


def _defer(
    call: _Call, normed_shard: Factor, dys: Sequence[Factor], wanted: Sequence[bool], dtype: torch.dtype
) -> None:
    """Queue the weight gradients, together with the gather that they need."""
    assert call.deferred is not None
    queue, sinks = call.deferred
    gather, matrix = call.transport.gathering.start_gather, partial(call.transport.products.matrix, dtype=dtype)
    pairs = [pair for pair, wants in zip(zip(sinks, dys, strict=True), wanted, strict=True) if wants]

    def make() -> None:
        normed_gathered = matrix(gather(normed_shard)())
        for sink, dy in pairs:
            sink(matrix(dy).t() @ normed_gathered)

    if pairs:
        queue.add(make, *held(normed_shard, *(dy for _, dy in pairs)))


@uncompiled
def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    norm: Norm | None = None,
    normed: Normed | None = None,
    carry: bool = False,
    transport: Transport | None = None,
    deferred: Deferred | None = None,
    private: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Y = gather(norm(x)) W^T + b for weights sharded by output feature: one gather, one GEMM per weight.

    Shapes:  x (tokens / t, K) with sequence_parallel, else (tokens, K) and equal on all ranks; weight (N / t, K), or a
             sequence of such weights, which share the gather; bias (N / t,) or None, one per weight; result
             (tokens, N / t), or a tuple. Leading dims of x are flattened to rows; a result of as many has them again.
             transport: how the t ranks talk, and whether with sequence_parallel; None is one rank.
             TensorParallel.column_transport opens one: for the largest N / t if ranks differ in it, so that "auto"
             chooses alike on all ranks.
             normed: norm(x), if row_linear has made it together with x.
             carry: x is also returned, last, for the residual path: the norm's backward adds that output's gradient.
             private: a row_linear without bias and dropout made x, and no hook can see x, or write its gradient, beside
             which a norm's backward then lays blocks in FP8.
    Saves:   x before the norm, and two statistics a row. The backward rebuilds norm(x) and gathers it again.
    Communication, per rank, B = tokens * K * itemsize:
             sequence parallel: forward all-gather B; backward reduce-scatter B (dx), all-gather B (x again, for dW)
             otherwise:         forward none; backward all-reduce B (dx)
             deferred: its queue takes the weight gradients and the second all-gather; it has one sink per weight.
    With sequence_parallel the norm's gradients are partial sums, over own rows. At t = 1 all is F.linear's, bit by bit.
    Under torch.autocast the norm runs in float32 and its output is saved; gather and GEMMs have autocast's dtype.
    Errors:  TypeError for a transport that is not an opened one; ValueError for a bias sequence of another length than
             weight's, for a `normed` without `norm` or not of x and norm as they are now, and for operands of other
             shapes or dtypes, or on another device: nothing is broadcast; x, weights and biases have one dtype.
    Source:  Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), sequence parallelism
    """
    several = not isinstance(weight, Tensor)
    weights: Sequence[Tensor] = weight if several else (weight,)
    biases = (bias if several and bias is not None else (bias,) * len(weights)) if several else (bias,)
    transport = LOCAL if transport is None else transport
    rows, autocast = flat_rows(x), autocast_dtype(x)
    if deferred is not None:
        check_sinks(deferred, len(weights))
    if normed is not None:
        check_normed(rows, norm, normed)
    if autocast is not None:
        deferred = cast_back(deferred, weights)
        rows, norm = cast(rows if norm is None else normalise(rows, norm), autocast), None
        weights, biases = ([cast(each, autocast) for each in some] for some in (weights, biases))
    check_linears("column_linear", rows, rows, rows.shape[-1], weights, biases, None, False)
    call = _Call(transport, norm, carry and autocast is None, private, deferred)
    inputs = (rows, *parameters(norm))
    if transport.untold is not None:
        communicates, alike = transport.sequence_parallel, (*transport.agreed, norm and norm[::3])
        called(transport.untold, "column_linear", rows.shape, rows.dtype, communicates, inputs, weights, *alike)
    outputs = ColumnLinearFunction.apply(*inputs, call, normed, *weights, *biases)
    if autocast is not None and carry:
        outputs = (*outputs, x)
    outputs = outputs if x.dim() == 2 else tuple(with_leading_dims(y, x) for y in outputs)
    return outputs if several or carry else outputs[0]

"""Differentiable moves between all rows or columns and those of one rank, for the edges of a parallel region."""

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.torch_private import Function

from .calls import SCATTERED, called
from .first_derivative import first_derivative
from .uncompiled import uncompiled


def flat_rows(x: Tensor) -> Tensor:
    """Rows (tokens, N) of x (..., N). Rows are returned as they are: a view would be one more node for autograd."""
    if x.dim() == 2:
        return x
    if x.dim() == 0:
        raise ValueError("x has no dim, so no features: give (..., N)")
    return x.reshape(-1, x.shape[-1])


def with_leading_dims(y: Tensor, x: Tensor) -> Tensor:
    """Rows y with the leading dims of x. If y has another number of rows (gathered or scattered), y itself."""
    return y.view(*x.shape[:-1], y.shape[-1]) if len(y) == x.shape[:-1].numel() else y


def _check_rows(x: Tensor) -> None:
    """ValueError unless x is rows, whose columns are counted."""
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}: give rows (tokens, N), with leading dims flattened")


class _ReduceRows(Function):
    """y = the sum of all ranks' x (M, N), or with sequence parallelism this rank's rows of it, (M / t, N).

    forward   all-reduce, or reduce-scatter
    backward  dx = dy, or all-gather
    """

    @staticmethod
    def forward(ctx, x, group, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return (reduce_scatter if sequence_parallel else all_reduce)(x, group)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return (all_gather(dy, ctx.group) if ctx.sequence_parallel else dy), None, None


class _ScatterRows(Function):
    """y = this rank's rows (M / t, N) of x (M, N), which is equal on all ranks.

    forward   no communication
    backward  dx = all ranks' rows dy: all-gather, (M / t, N) -> (M, N)
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return all_gather(dy, ctx.group), None


class _GatherRows(Function):
    """y = all ranks' rows (M, N) of x (M / t, N).

    forward   all-gather
    backward  dx = this rank's rows of dy, which is equal on all ranks: no communication
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return dy.chunk(ctx.group.size())[ctx.group.rank()].clone(), None


class _TakeColumns(Function):
    """y = x[:, columns] (M, n) of x (M, N), which is equal on all ranks.

    forward   no communication
    backward  dx = the sum of all ranks' dy, each in its columns: all-reduce of (M, N)
    """

    @staticmethod
    def forward(ctx, x, columns, group):
        ctx.shape, ctx.columns, ctx.group = x.shape, columns, group
        return x[:, columns].clone()

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        dx = dy.new_zeros(ctx.shape)
        dx[:, ctx.columns] = dy
        return all_reduce(dx, ctx.group), None, None


class _GatherColumns(Function):
    """y = all ranks' columns (M, n) of x (M, n / t); the last ranks may have fewer.

    forward   all-gather of columns, padded to equal numbers
    backward  dx = this rank's columns of dy, which is equal on all ranks: no communication
    """

    @staticmethod
    def forward(ctx, x, n, group):
        width = -(-n // group.size())
        ctx.columns = slice(group.rank() * width, group.rank() * width + x.shape[1])
        return all_gather(F.pad(x, (0, width - x.shape[1])).t(), group)[:n].t().contiguous()

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return dy[:, ctx.columns].clone(), None, None


class _SumGradient(Function):
    """y = x, which is equal on all ranks; each rank uses y for its own part of a result.

    forward   no communication
    backward  dx = the sum of all ranks' dy: all-reduce
    """

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        ctx.set_materialize_grads(False)  # no gradient on all ranks stays none
        return x.view_as(x)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return (None if dy is None else all_reduce(dy, ctx.group)), None


@uncompiled
def reduce_rows(x: Tensor, group: ProcessGroup | None, sequence_parallel: bool = True) -> Tensor:
    """The sum of all ranks' x (tokens, N): with sequence_parallel this rank's rows (tokens / t, N), else all of them.

    Communication, per rank, B = tokens * N * itemsize: forward reduce-scatter B, backward all-gather B; without
    sequence_parallel forward all-reduce B, backward none.
    """
    called(group, "reduce_rows", x.shape, x.dtype, True, *(((x,), (), SCATTERED) if sequence_parallel else ()))
    return x if group is None else _ReduceRows.apply(x, group, sequence_parallel)


@uncompiled
def scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's rows (tokens / t, N) of x (tokens, N), which is equal on all ranks.

    Communication, per rank: forward none; backward all-gather of tokens * N * itemsize bytes.
    Errors: ValueError unless t divides tokens.
    """
    if group is None:
        return x
    if len(x) % group.size():
        raise ValueError(
            f"{len(x)} tokens cannot be split over {group.size()} tensor-parallel ranks: "
            f"pad batch * seq_length to a multiple of {group.size()}"
        )
    called(group, "scatter_rows", x.shape, x.dtype, False, (x,))
    return _ScatterRows.apply(x, group)


@uncompiled
def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All rows (tokens, N) from each rank's slice x (tokens / t, N). What follows must be computed alike on all ranks.

    Communication, per rank: forward all-gather of tokens * N * itemsize bytes; backward none, because the gradient is
    equal on all ranks and each keeps its rows of it.
    """
    called(group, "gather_rows", x.shape, x.dtype, True)
    return x if group is None else _GatherRows.apply(x, group)


@uncompiled
def take_columns(x: Tensor, columns: slice, group: ProcessGroup | None) -> Tensor:
    """This rank's columns of x (tokens, N), which is equal on all ranks. Ranks may take the same columns.

    The gradient of x is equal on all ranks: each column's is the sum over the ranks that took it.
    Communication, per rank: forward none; backward all-reduce of tokens * N * itemsize bytes.
    """
    _check_rows(x)
    called(group, "take_columns", x.shape, x.dtype, False, (x,))
    return x[:, columns] if group is None else _TakeColumns.apply(x, columns, group)


@uncompiled
def gather_columns(x: Tensor, n: int, group: ProcessGroup | None) -> Tensor:
    """All columns (tokens, n) from each rank's x (tokens, n / t). What follows must be computed alike on all ranks.

    Communication, per rank: forward all-gather of tokens * n * itemsize bytes; backward none.
    The last ranks may have fewer columns: zeros stand for what is missing.
    Errors: ValueError for more columns than a rank has, such as all of them.
    """
    _check_rows(x)
    if group is None:
        return x
    width = -(-n // group.size())
    most = max(0, min(width, n - group.rank() * width))
    if x.shape[-1] > most:
        raise ValueError(
            f"x has {x.shape[-1]} columns, and rank {group.rank()} of {group.size()} has at most {most} of {n}: give "
            "its own"
        )
    called(group, "gather_columns", (len(x), n), x.dtype, True)
    return _GatherColumns.apply(x, n, group)


@uncompiled
def sum_gradient(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x itself, of any shape and equal on all ranks, for a computation of which each rank makes its own part.

    The gradient of x is the sum of all ranks' gradients, equal on all ranks.
    Communication, per rank: forward none; backward all-reduce of x's bytes.
    """
    called(group, "sum_gradient", x.shape, x.dtype, False, (x,))
    return x if group is None else _SumGradient.apply(x, group)

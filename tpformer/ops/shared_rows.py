"""shared_rows: features that several ranks compute alike, such as keys of few heads, whose gradients become whole.

Belongs here: what autograd knows of it. Without it each rank's gradient is a part of their sum. That is right for what
is added up later, but not for blocks of e4m3: what is quantised must be the sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_reduce
from tpformer.torch_private import Function

from .calls import called
from .first_derivative import first_derivative
from .uncompiled import uncompiled


class SharedRows(NamedTuple):
    """The rows of a weight, and so the features of its output, that this rank has."""

    used: slice
    """Those that it computes, of all."""
    lower: int
    """Rows below it are computed by lower ranks, too."""
    total: int
    """All rows of the weight."""


class _Whole(Function):
    """Y_i as they are. dY_i of a feature: the sum of all ranks' on the lowest rank that has the feature, else 0."""

    @staticmethod
    def forward(ctx, group: ProcessGroup | None, shared: Sequence[SharedRows], *ys):
        ctx.group, ctx.shared = group, shared
        return tuple(y.view_as(y) for y in ys)

    @staticmethod
    @first_derivative
    def backward(ctx, *dys):
        sizes = [each.total for each in ctx.shared]
        parts = dys[0].new_zeros(len(dys[0]), sum(sizes))
        for columns, each, dy in zip(parts.split(sizes, 1), ctx.shared, dys, strict=True):
            columns[:, each.used] = dy
        found = []
        for columns, each in zip(all_reduce(parts, ctx.group).split(sizes, 1), ctx.shared, strict=True):
            whole = columns[:, each.used].contiguous()
            whole[:, : max(0, each.lower - each.used.start)] = 0
            found.append(whole)
        return None, None, *found


@uncompiled
def shared_rows(ys: Sequence[Tensor], shared: Sequence[SharedRows], group: ProcessGroup | None) -> tuple[Tensor, ...]:
    """The ys, whose gradients are whole: on one rank those of all ranks, on the others that have the feature 0.

    Shapes:  y_i (M, N_i), N_i = used features of shared_i, of M tokens that all ranks of the group have.
    Communication, per rank: forward none; backward one all-reduce of M * (sum of total_i) * itemsize bytes.
    So sums over ranks of what is linear in the gradients stay what they are.
    """
    called(group, "shared_rows", ys[0].shape[:1], ys[0].dtype, False, ys)
    return _Whole.apply(group, tuple(shared), *ys)

"""A computation of which each rank makes a part that depends on the data, and that may be empty on some.

Belongs here: how tensors enter it and how its results leave it. The collectives of the backward are called on all
ranks, in one order, also where a rank's part uses none of what entered: an expert without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_reduce
from tpformer.torch_private import Function

from .first_derivative import first_derivative
from .uncompiled import uncompiled


class _Enter(Function):
    """y = x, for several tensors. backward: dx = dy, summed over ranks for the first `summed` ones: all-reduce."""

    @staticmethod
    def forward(ctx, group, summed, *xs):
        ctx.group, ctx.summed = group, summed
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @first_derivative
    def backward(ctx, *dys):
        sums = (all_reduce(dy.contiguous(), ctx.group) for dy in dys[: ctx.summed])
        return None, None, *sums, *dys[ctx.summed :]


class _Leave(Function):
    """y = the sum of all ranks' x: all-reduce. backward: dx = dy, and a gradient of zero for what entered."""

    @staticmethod
    def forward(ctx, x, entered, group):
        return all_reduce(x, group)

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        return dy, None, None


@uncompiled
def enter_part(whole: Sequence[Tensor], own: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """The tensors themselves, of any shapes, for a rank's part of a computation: `whole` are equal on all ranks, `own`
    this rank's. Each gets a gradient: zeros where nothing used it.

    Communication, per rank: backward an all-reduce of the bytes of each whole one.
    """
    xs = [*whole, *own]
    return xs if group is None or not xs else list(_Enter.apply(group, len(whole), *xs))


@uncompiled
def leave_part(x: Tensor, entered: Sequence[Tensor], group: ProcessGroup | None) -> Tensor:
    """The sum of all ranks' x, of any shape; entered: what enter_part gave.

    Communication, per rank: forward an all-reduce of x's bytes.
    """
    return x if group is None else _Leave.apply(x, entered[0] if entered else None, group)

"""The balance losses of a GPT's layers as a term of its loss, whatever part of the model has the layers.

Belongs here: how they are summed over ranks, and how they reach the backward of a part that has no loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tpformer import ops
from tpformer.layers import TensorParallel, balance_losses


class _Attached(torch.autograd.Function):
    """x itself, whose backward gives the balance loss a gradient: scale, as if scale * loss were part of the loss.

    forward   y = x
    backward  dx = dy, dloss = scale
    """

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale = scale.to(loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, ctx.scale, None


def over_context(total: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of a scalar over context-parallel ranks, whose backward gives each rank's part the same gradient."""
    context = tp.shares_tokens
    if context is None:
        return total
    return ops.reduce_rows(total.view(1, 1), context.group, False).sum()  # FSDP2 warns of a model that returns a view


class BalanceLoss:
    """The sum of the layers' balance losses, in training mode. coefficient 0: there are none.

    scale: what the whole loss will be multiplied by, a scalar. A part that is not the last needs it, as the loss is
    made elsewhere. total: the scaled losses of such a part since it was set to None, for whoever reports the loss.
    share: the targets of a batch over its tokens, a scalar, where a summed loss will be divided by the targets: balance
    losses are sums over all tokens, so they count with this factor. None: all tokens are targets.
    """

    def __init__(self, coefficient: float, tp: TensorParallel) -> None:
        self.coefficient, self.tp = coefficient, tp
        self.scale: Tensor | None = None
        self.share: Tensor | None = None
        self.total: Tensor | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """Collect the losses of the layers that run in the context."""
        if not self.coefficient:
            yield []
            return
        with balance_losses() as losses:
            yield losses

    def _sum(self, losses: list[Tensor]) -> Tensor:
        """The sum over layers, and over the ranks that have tokens of their own; equal on all ranks.

        Communication: with sequence shards, and over context-parallel ranks, one all-reduce of a scalar in the forward,
        none in the backward.
        """
        total = torch.stack(losses).sum()
        if self.tp.sharded:
            total = ops.reduce_rows(total.view(1, 1), self.tp.group, False).view(())
        return over_context(total, self.tp)

    def added(self, loss: Tensor, losses: list[Tensor], targets: Tensor, reduction: str) -> Tensor:
        """The loss with the balance losses: their sum times share, or with reduction "mean" that over the tokens."""
        if not losses:
            return loss
        total = self._sum(losses).to(loss.dtype)
        return loss + (self._shared(total) if reduction == "sum" else total / targets.numel())

    def _shared(self, total: Tensor) -> Tensor:
        return total if self.share is None else total * self.share.to(total.dtype)

    def attached(self, x: Tensor, losses: list[Tensor]) -> Tensor:
        """The rows of a part that is not the last; their backward is that of the balance losses, too."""
        if not losses:
            return x
        if self.scale is None:
            raise ValueError(
                "a part that is not the last cannot add its balance losses to the loss: set part.balance.scale to what "
                "the summed loss will be multiplied by"
            )
        total = self._sum(losses)
        scale = self._shared(self.scale.to(total.dtype))
        scaled = total.detach() * scale
        self.total = scaled if self.total is None else self.total + scaled
        return _Attached.apply(x, total, scale)

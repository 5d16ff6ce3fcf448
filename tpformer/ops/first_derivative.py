"""Backwards that have no backward of their own: with create_graph=True their gradients are right, and may not be
differentiated.

torch.autograd.function.once_differentiable is not enough: it lets a second derivative pass, as zero, where the incoming
gradient needs none, though the gradient depends on what the forward saved.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the `backward` of an autograd Function. A derivative of the gradients that it makes, with respect to
    the incoming gradients or any saved tensor, raises RuntimeError.

    So all that a gradient depends on has to be saved, or its `trace`.
    """

    @wraps(backward)
    def run(ctx: Any, *dys: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *dys)
        if getattr(ctx, "deferred", None) is not None:
            raise RuntimeError(
                f"{backward.__module__} was run in WeightGradientQueue.collect, whose gradients are made later and "
                f"without a graph: leave out create_graph=True, or the queue"
            )
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(_Unpacked(ctx, saved), *dys)
        several = gradients if isinstance(gradients, tuple) else (gradients,)
        linked = _NoSecond.apply(backward.__module__, len(several), *several, *dys, *saved)
        return linked if isinstance(gradients, tuple) else linked[0]

    return run


def trace(x: Tensor) -> Tensor:
    """An empty tensor in memory of its own that depends on x as far as autograd knows: saved, it stands for x."""
    return x[:0].clone()


class _Unpacked:
    """A Function's ctx whose saved tensors have been unpacked: a region that is recomputed gives them once."""

    def __init__(self, ctx: Any, saved: tuple[Tensor | None, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NoSecond(torch.autograd.Function):
    """The first `count` tensors, as a function of them and of all others that has no derivative."""

    @staticmethod
    def forward(ctx, name: str, count: int, *tensors):
        ctx.name = name
        return tensors[:count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.name} has no second derivative: where one is needed, as for a gradient penalty or a Hessian, use "
            f"modules of torch.nn, or functions of torch.nn.functional, in its place"
        )

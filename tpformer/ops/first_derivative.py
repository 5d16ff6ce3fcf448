"""Makes second derivatives an error. With create_graph=True gradients are right, but cannot be differentiated again.

torch.autograd.function.once_differentiable is not enough. If the incoming gradient needs no gradient, a second
derivative is then silently zero, though the gradient depends on what the forward saved.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tpformer.torch_private import Function


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd Function, so that differentiating its gradients raises RuntimeError.

    That holds for derivatives with respect to the incoming gradients and all saved tensors. So the Function must save
    each tensor that a gradient depends on, or the tensor's `trace`.
    """

    @wraps(backward)
    def run(ctx: Any, *dys: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *dys)
        if getattr(ctx, "deferred", None) is not None:
            raise RuntimeError(
                f"{backward.__module__} ran in WeightGradientQueue.collect, which makes weight gradients later and "
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
    """An empty tensor that to autograd depends on x. A Function saves it if it does not save x."""
    return x[:0].clone()


class _Unpacked:
    """A Function's ctx with its saved tensors unpacked: a recomputed region can unpack them only once."""

    def __init__(self, ctx: Any, saved: tuple[Tensor | None, ...]) -> None:
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _NoSecond(Function):
    """Returns the first `count` tensors. To autograd they depend on all tensors, and their derivative is an error."""

    @staticmethod
    def forward(ctx, name: str, count: int, *tensors):
        ctx.name = name
        return tensors[:count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            f"{ctx.name} has no second derivative: if you need one, as for a gradient penalty or a Hessian, use "
            f"modules of torch.nn, or functions of torch.nn.functional, in its place; in a model that parallelize cut, "
            f"leave the linears of that part out of its plan"
        )

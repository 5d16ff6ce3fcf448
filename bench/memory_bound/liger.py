"""Liger-Kernel's operations as providers of the memory-bound benches, where it is installed.

Belongs here: calls of its autograd Functions as liger_kernel 0.8 has them, and nothing of ours. They are called
without autograd, with their fastest options; a backward's context comes from one forward, which is not timed.
"""

from collections.abc import Callable, Iterable
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from .formulas import Tensors

Provider = Callable[..., Tensors]


class Context:
    """Stands for autograd's, so that a backward can be called again and again; Functions set further attributes."""

    saved_tensors: Tensors = ()
    needs_input_grad = (True,) * 16  # of every argument that any Function has

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def installed() -> bool:
    return util.find_spec("liger_kernel") is not None


def function(module: str, name: str) -> Any:
    """The autograd Function liger_kernel.ops.<module>.<name>; None without Liger-Kernel, or in one that lacks it."""
    if not installed() or util.find_spec(f"liger_kernel.ops.{module}") is None:
        return None
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


def norm_function(kind: str) -> Any:
    if kind == "rmsnorm":
        return function("rms_norm", "LigerRMSNormFunction")
    return function("layer_norm", "LigerLayerNormFunction")


def norm_forward(kind: str, eps: float) -> Provider | None:
    """f(x, weight, bias) -> (y,), the bias None for rmsnorm."""
    op = norm_function(kind)
    if op is None:
        return None
    return lambda x, *parameters: (op.forward(Context(), x, *given(parameters), eps),)


def norm_backward(kind: str, eps: float, x: Tensor, *parameters: Tensor | None) -> Provider | None:
    """f(dy, ...) -> (dx, dweight[, dbias]) for this x; rmsnorm's dx takes the memory of dy."""
    op, context = norm_function(kind), Context()
    if op is None:
        return None
    op.forward(context, x, *given(parameters), eps)
    return lambda dy, *_: given(op.backward(context, dy))


def given(tensors: Iterable[Tensor | None]) -> Tensors:
    return tuple(x for x in tensors if x is not None)


def add_norm_forward(eps: float) -> Provider | None:
    """rmsnorm only: f(x, None, residual, weight, None) -> (x + residual, its norm)."""
    op = function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return None if op is None else lambda *inputs: op.forward(Context(), *given(inputs), eps)[::-1]


def add_norm_backward(eps: float, z: Tensor, weight: Tensor) -> Provider | None:
    """rmsnorm only: f(dy, ..., dresidual) -> (dx + dresidual, dweight) for the sum z."""
    op, context = function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"), Context()
    if op is None:
        return None
    op.forward(context, z, torch.zeros_like(z), weight, eps)
    return lambda dy, *others: op.backward(context, dy, others[-1])[0:3:2]


def activation_function(name: str, gated: bool) -> Any:
    ops = {
        ("silu", True): ("swiglu", "LigerSiLUMulFunction"),
        ("gelu_tanh", True): ("geglu", "LigerGELUMulFunction"),
        ("relu2", False): ("relu_squared", "LigerReLUSquaredFunction"),
    }
    return function(*ops[name, gated]) if (name, gated) in ops else None


def activation_forward(name: str, gated: bool) -> Provider | None:
    """f(x[, gate]) -> (a,)."""
    op = activation_function(name, gated)
    return None if op is None else lambda x, *gate: (op.forward(Context(), *gate, x),)


def activation_backward(name: str, rebuilt: bool, x: Tensor, *gate: Tensor) -> Provider | None:
    """f(da, x[, gate]) -> (dx[, dgate]), and with `rebuilt` a from its forward again; may overwrite x and gate."""
    op, context = activation_function(name, bool(gate)), Context()
    if op is None:
        return None
    op.forward(context, *gate, x)

    def backward(da: Tensor, x: Tensor, *gate: Tensor) -> Tensors:
        again = (op.forward(Context(), *gate, x),) if rebuilt else ()
        gradients = op.backward(context, da)
        return *(gradients[1::-1] if gate else (gradients,)), *again

    return backward


def rope(cos: Tensor, sin: Tensor, batch: int, inverse: bool, q: Tensor, k: Tensor) -> Provider | None:
    """f(q, k, ...) -> (q, k), in their memory; the tables (seq, d / 2) serve every sample from position 0."""
    op, context = function("rope", "LigerRopeFunction"), Context()
    if op is None:
        return None
    tables = [torch.cat([table, table], -1)[None].contiguous() for table in (cos, sin)]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, -1)).transpose(1, 2)

    def rotate(q: Tensor, k: Tensor, *_: Tensor) -> Tensors:
        both = heads(q), heads(k)
        turned = op.backward(context, *both) if inverse else op.forward(Context(), *both, *tables)
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in turned[:2])

    op.forward(context, heads(q.clone()), heads(k.clone()), *tables)
    return rotate


def cross_entropy(gradient: bool) -> Provider | None:
    """f(logits, targets) -> (losses,), or with the gradient of their sum, which takes the memory of the logits.

    Its forward makes the gradient; its backward has nothing left to do then, and is not called.
    """
    op = function("cross_entropy", "LigerCrossEntropyFunction")
    if op is None:
        return None

    def losses(logits: Tensor, targets: Tensor) -> Tensors:
        leaf = logits.detach().requires_grad_(gradient)
        with torch.no_grad():
            result = op.forward(Context(), leaf, targets, None, -100, 0.0, 0.0, "none")[0]
        return (result, logits) if gradient else (result,)

    return losses


def linear_cross_entropy() -> Provider | None:
    """f(x, weight, targets) -> (summed loss, dx, dweight)."""
    op = function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    if op is None:
        return None

    def both(x: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        loss = op.apply(*leaves, targets, None, None, -100, 0.0, 0.0, "sum")[0]
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return both

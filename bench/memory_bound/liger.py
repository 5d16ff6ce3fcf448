"""Liger-Kernel's operations as providers of the memory-bound benches, where it is installed.

Belongs here: calls of its autograd Functions as liger_kernel 0.8 has them, with a case's inputs, and nothing of ours.
They are called without autograd, with their fastest options; a backward's context comes from one forward, which is
not timed.
"""

from collections.abc import Callable
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.cross_entropy.reference import IGNORE_INDEX
from tpformer.kernels.finish import Norm
from tpformer.kernels.rope.reference import Table

from .formulas import Tensors

Provider = Callable[..., Any]


class Context:
    """Stands for autograd's, so that a backward can be called again and again; Functions set further attributes."""

    saved_tensors: Tensors = ()
    needs_input_grad = (True,) * 16  # of every argument that any Function has

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class Missing(Exception):
    """Liger-Kernel is not installed, or has no such operation."""


def installed() -> bool:
    """Whether liger_kernel can be imported."""
    return util.find_spec("liger_kernel") is not None


def function(module: str, name: str) -> Any:
    """The autograd Function liger_kernel.ops.<module>.<name>; raises Missing."""
    if not installed() or util.find_spec(f"liger_kernel.ops.{module}") is None:
        raise Missing
    return getattr(import_module(f"liger_kernel.ops.{module}"), name)


def provider(make: Callable[..., Provider], *arguments: Any) -> Provider | None:
    """make(*arguments), one of the functions below; None where Liger-Kernel has no such operation."""
    try:
        return make(*arguments)
    except Missing:
        return None


def _parameters(norm: Norm) -> list[Any]:
    return [x for x in (norm.weight, norm.bias, norm.eps) if x is not None]


def _norm(kind: str) -> Any:
    if kind == "rmsnorm":
        return function("rms_norm", "LigerRMSNormFunction")
    return function("layer_norm", "LigerLayerNormFunction")


def norm_forward(kind: str) -> Provider:
    """f(x, norm) -> y."""
    op = _norm(kind)
    return lambda x, norm: op.forward(Context(), x, *_parameters(norm))


def norm_backward(x: Tensor, norm: Norm) -> Provider:
    """f(dy, ...) -> (dx, dweight[, dbias]) for this x; rmsnorm's dx takes the memory of dy."""
    op, context = _norm(norm.kind), Context()
    op.forward(context, x, *_parameters(norm))
    return lambda dy, *_: op.backward(context, dy)


def _add_norm(kind: str) -> Any:
    if kind != "rmsnorm":
        raise Missing
    return function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")


def add_norm_forward(kind: str) -> Provider:
    """f(x, finish) -> (x + residual, its norm)."""
    op = _add_norm(kind)
    return lambda x, finish: op.forward(Context(), x, finish.residual, *_parameters(finish.norm))[::-1]


def add_norm_backward(z: Tensor, norm: Norm) -> Provider:
    """f(dy, ..., dresidual) -> (dx + dresidual, dweight) for the sum z."""
    op, context = _add_norm(norm.kind), Context()
    op.forward(context, z, torch.zeros_like(z), *_parameters(norm))
    return lambda dy, *others: op.backward(context, dy, others[-1])[0:3:2]


def activation(x: Tensor, name: str, gate: Tensor | None, backward: bool, rebuilt: bool = True) -> Provider:
    """f(x, name, gate) -> a, or backward f(da, x, name, gate) -> (dx[, dgate][, a]), which may overwrite x and gate.

    rebuilt: with a from its forward again.
    """
    ops = {
        ("silu", True): ("swiglu", "LigerSiLUMulFunction"),
        ("gelu_tanh", True): ("geglu", "LigerGELUMulFunction"),
        ("relu2", False): ("relu_squared", "LigerReLUSquaredFunction"),
    }
    if (name, gate is not None) not in ops:
        raise Missing
    op, context = function(*ops[name, gate is not None]), Context()

    def forward(x: Tensor, name: str, gate: Tensor | None, context: Context | None = None) -> Tensor:
        return op.forward(context or Context(), *([] if gate is None else [gate]), x)

    def both(da: Tensor, *inputs: Any) -> Tensors:
        again = (forward(*inputs),) if rebuilt else ()
        gradients = op.backward(context, da)
        return *((gradients,) if gate is None else gradients[1::-1]), *again

    forward(x, name, gate, context)
    return both if backward else forward


def rope(q: Tensor, k: Tensor, table: Table, batch: int, inverse: bool) -> Provider:
    """f(q, k, ...) -> (q, k), in their memory; the table (seq, d / 2) serves every sample from position 0."""
    op, context = function("rope", "LigerRopeFunction"), Context()
    tables = [torch.cat([half, half], -1)[None].contiguous() for half in table]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, -1)).transpose(1, 2)

    def rotate(q: Tensor, k: Tensor, *_: Any) -> Tensors:
        both = heads(q), heads(k)
        turned = op.backward(context, *both) if inverse else op.forward(Context(), *both, *tables)
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in turned[:2])

    op.forward(context, heads(q.clone()), heads(k.clone()), *tables)
    return rotate


def cross_entropy(gradient: bool) -> Provider:
    """f(logits, targets) -> losses, or with the gradient of their sum, which takes the memory of the logits.

    Its forward makes the gradient; its backward has nothing left to do then, and is not called.
    """
    op = function("cross_entropy", "LigerCrossEntropyFunction")

    def losses(logits: Tensor, targets: Tensor) -> Any:
        leaf = logits.detach().requires_grad_(gradient)
        with torch.no_grad():
            result = op.forward(Context(), leaf, targets, None, IGNORE_INDEX, 0.0, 0.0, "none")[0]
        return (result, logits) if gradient else result

    return losses


def linear_cross_entropy() -> Provider:
    """f(x, weight, targets) -> the summed loss, differentiable."""
    op = function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    return lambda x, weight, targets: op.apply(x, weight, targets, None, None, IGNORE_INDEX, 0.0, 0.0, "sum")[0]

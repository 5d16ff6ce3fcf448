"""Liger-Kernel's operations as providers of the memory-bound benches, where it is installed.

Belongs here: calls of its autograd Functions as liger_kernel 0.8 has them, with a case's inputs, and nothing of ours.
They are called without autograd, with their fastest options; a backward's context comes from one forward, which is
not timed. A function here gives None where Liger-Kernel has no such operation.
"""

from collections.abc import Callable
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.finish import Finish
from tpformer.kernels.norm.reference import Norm
from tpformer.kernels.rope.reference import Table

from .formulas import Tensors

Provider = Callable[..., Any]


class Context:
    """Stands for autograd's, so that a backward can be called again and again; Functions set further attributes."""

    saved_tensors: Tensors = ()
    needs_input_grad = (True,) * 16  # of every argument that any Function has

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def installed() -> bool:
    """Whether liger_kernel can be imported."""
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


def _parameters(norm: Norm) -> list[Any]:
    return [x for x in (norm.weight, norm.bias, norm.eps) if x is not None]


def norm_forward(kind: str) -> Provider | None:
    """f(x, norm) -> y."""
    op = norm_function(kind)
    return None if op is None else lambda x, norm: op.forward(Context(), x, *_parameters(norm))


def norm_backward(x: Tensor, norm: Norm) -> Provider | None:
    """f(dy, ...) -> (dx, dweight[, dbias]) for this x; rmsnorm's dx takes the memory of dy."""
    op, context = norm_function(norm.kind), Context()
    if op is None:
        return None
    op.forward(context, x, *_parameters(norm))
    return lambda dy, *_: op.backward(context, dy)


def add_norm_function(kind: str) -> Any:
    return function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction") if kind == "rmsnorm" else None


def add_norm_forward(kind: str) -> Provider | None:
    """f(x, finish) -> (x + residual, its norm)."""
    op = add_norm_function(kind)

    def forward(x: Tensor, finish: Finish) -> Tensors:
        assert finish.norm is not None
        return op.forward(Context(), x, finish.residual, *_parameters(finish.norm))[::-1]

    return None if op is None else forward


def add_norm_backward(z: Tensor, norm: Norm) -> Provider | None:
    """f(dy, ..., dresidual) -> (dx + dresidual, dweight) for the sum z."""
    op, context = add_norm_function(norm.kind), Context()
    if op is None:
        return None
    op.forward(context, z, torch.zeros_like(z), *_parameters(norm))
    return lambda dy, *others: op.backward(context, dy, others[-1])[0:3:2]


def activation(x: Tensor, name: str, gate: Tensor | None, *, backward: bool, rebuilt: bool = True) -> Provider | None:
    """f(x, name, gate) -> a, or backward f(da, x, name, gate) -> (dx[, dgate][, a]), which may overwrite x and gate.

    rebuilt: with a from its forward again.
    """
    ops = {
        ("silu", True): ("swiglu", "LigerSiLUMulFunction"),
        ("gelu_tanh", True): ("geglu", "LigerGELUMulFunction"),
        ("relu2", False): ("relu_squared", "LigerReLUSquaredFunction"),
    }
    found = ops.get((name, gate is not None))
    op, context = None if found is None else function(*found), Context()
    if op is None:
        return None

    def forward(x: Tensor, name: str, gate: Tensor | None, context: Context | None = None) -> Tensor:
        return op.forward(context or Context(), *([] if gate is None else [gate]), x)

    def both(da: Tensor, *inputs: Any) -> Tensors:
        again = (forward(*inputs),) if rebuilt else ()
        gradients = op.backward(context, da)
        return *((gradients,) if gate is None else gradients[1::-1]), *again

    forward(x, name, gate, context)
    return both if backward else forward


def rope(q: Tensor, k: Tensor, table: Table, batch: int, inverse: bool) -> Provider | None:
    """f(q, k, ...) -> (q, k), in their memory; the table (seq, d / 2) serves every sample from position 0."""
    op, context = function("rope", "LigerRopeFunction"), Context()
    if op is None:
        return None
    tables = [torch.cat([half, half], -1)[None].contiguous() for half in table]

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(0, (batch, -1)).transpose(1, 2)

    def rotate(q: Tensor, k: Tensor, *_: Any) -> Tensors:
        both = heads(q), heads(k)
        turned = op.backward(context, *both) if inverse else op.forward(Context(), *both, *tables)
        return tuple(x.transpose(1, 2).flatten(0, 1) for x in turned[:2])

    op.forward(context, heads(q.clone()), heads(k.clone()), *tables)
    return rotate


def cross_entropy(gradient: bool) -> Provider | None:
    """f(logits, targets) -> losses, or with the gradient of their sum, which takes the memory of the logits.

    Its forward makes the gradient; its backward has nothing left to do then, and is not called.
    """
    op = function("cross_entropy", "LigerCrossEntropyFunction")

    def losses(logits: Tensor, targets: Tensor) -> Any:
        leaf = logits.detach().requires_grad_(gradient)
        with torch.no_grad():
            result = op.forward(Context(), leaf, targets, None, -100, 0.0, 0.0, "none")[0]
        return (result, logits) if gradient else result

    return None if op is None else losses


def linear_cross_entropy() -> Provider | None:
    """f(x, weight, targets) -> (summed loss, dx, dweight)."""
    op = function("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

    def both(x: Tensor, weight: Tensor, targets: Tensor) -> Tensors:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        loss = op.apply(*leaves, targets, None, None, -100, 0.0, 0.0, "sum")[0]
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return None if op is None else both

"""MLP activations, plain and gated: the specification (torch only), forward, backward and cost.

A gated activation is act(gate) * x (SwiGLU with silu, GeGLU with gelu); without a gate it is act(x).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cost import Cost

ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


def _apply(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _derivative(dy: Tensor, x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if name == "gelu_tanh" else "none")


def activation_forward(x: Tensor, name: str | None, gate: Tensor | None = None) -> Tensor:
    """act(x), or act(gate) * x when a gate is given; x itself for name None.

    Math:     gelu x * Phi(x); gelu_tanh x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3))); silu x * sigmoid(x)
    Shapes:   x, gate and the result all (M, F), one dtype
    Numerics: evaluated in promote_types(x.dtype, float32), rounded at the store
    Source:   Hendrycks & Gimpel 2016 (arXiv:1606.08415); gated: Shazeer 2020 (arXiv:2002.05202)
    """
    if name is None:
        return x
    return _apply(x, name) if gate is None else _apply(gate, name) * x


def activation_backward(
    da: Tensor, x: Tensor, name: str | None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients (dx, dgate) of activation_forward from its inputs alone."""
    if name is None:
        return da, None
    if gate is None:
        return _derivative(da, x, name), None
    return da * _apply(gate, name), _derivative(da * x, gate, name)


def activation_cost(m: int, f: int, itemsize: int, gated: bool = False, backward: bool = False) -> Cost:
    """Every operand once: forward x (and gate) in, one out; backward adds da in and one gradient per input out."""
    inputs = 2 if gated else 1
    operands = 2 * inputs + 1 if backward else inputs + 1
    return Cost((24 if backward else 10) * inputs * m * f, operands * m * f * itemsize)

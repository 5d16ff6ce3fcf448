"""The activation between two linears as an operation of its own, for when it is not part of the second one's pass."""

import torch
from torch import Tensor

from .first_derivative import first_derivative
from .implementation import implementation
from .uncompiled import uncompiled


class ActivationFunction(torch.autograd.Function):
    """a = act(x), dx = da * act'(x); gated: a = act(gate) * x, dx = da * act(gate), dgate = da * x * act'(gate)."""

    @staticmethod
    def forward(ctx, x, gate, name: str):
        ctx.save_for_backward(x, gate)
        ctx.name = name
        return implementation("activation", x).activation_forward(x, name, gate)

    @staticmethod
    @first_derivative
    def backward(ctx, da):
        x, gate = ctx.saved_tensors
        # the gradient is made in the memory of the one that is given, which others may still read
        dx, dgate, _ = implementation("activation", x).activation_backward(da.clone(), x, ctx.name, gate)
        return dx, dgate, None


@uncompiled
def activation(x: Tensor, name: str, gate: Tensor | None = None) -> Tensor:
    """act(x) of rows x (tokens, N), or act(gate) * x for a gate like x. Saves x and gate; no communication."""
    return ActivationFunction.apply(x, gate, name)

"""The activation between two linears as an operation of its own, where the second linear does not apply it."""

from torch import Tensor

from tpformer.torch_private import Function

from .first_derivative import first_derivative
from .implementation import implementation
from .packing import keep, kept
from .uncompiled import uncompiled


class ActivationFunction(Function):
    """a = act(x), or with a gate a = act(gate) * x; all tensors are (tokens, N).

    forward   a = act(x)                                    gated: a = act(gate) * x
    backward  dx = da * act'(x)                             gated: dx = da * act(gate), dgate = da * x * act'(gate)
    """

    @staticmethod
    def forward(ctx, x, gate, name: str):
        keep(ctx, x, gate, readable=2)
        ctx.name = name
        return implementation("activation", x).activation_forward(x, name, gate)

    @staticmethod
    @first_derivative
    def backward(ctx, da):
        x, gate = kept(ctx)
        # activation_backward writes dx over da, which others may still read
        dx, dgate, _ = implementation("activation", x).activation_backward(da.clone(), x, ctx.name, gate)
        return dx, dgate, None


@uncompiled
def activation(x: Tensor, name: str, gate: Tensor | None = None) -> Tensor:
    """act(x), or act(gate) * x. x, gate and the result are (tokens, N). Saves x and gate; no communication."""
    return ActivationFunction.apply(x, gate, name)

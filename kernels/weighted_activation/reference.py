"""The gated activation of an expert, times each row's weight: the specification (torch only), and the cost."""

import torch
from torch import Tensor

from ..activation.reference import ACTIVATIONS, activation_backward, activation_forward
from ..cast import cast
from ..cost import Cost
from ..operands import FLOATS, require, unknown, wide_dtype


def check_operands(gate_up: Tensor, name: str, weights: Tensor, da: Tensor | None = None) -> None:
    """ValueError for an unknown name, an odd width, and weights or da of other shapes or dtypes than those below."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    rows, f = gate_up.shape[0], gate_up.shape[-1] // 2
    require(
        "weighted_activation", gate_up, ("gate_up", gate_up, (rows, 2 * f), FLOATS),
        ("weights", weights, (rows,), (wide_dtype(gate_up.dtype),)),
        ("da", da, (rows, f), (gate_up.dtype,)),
    )  # fmt: skip


def weighted_activation_forward(gate_up: Tensor, name: str, weights: Tensor) -> Tensor:
    """w * act(gate) * up for the rows of gate_up, whose first half is the gate.

    Shapes:   gate_up (R, 2 F); weights (R,) in promote_types(gate_up.dtype, float32); result (R, F) like gate_up
    Numerics: evaluated in promote_types(gate_up.dtype, float32), rounded at the store
    Traffic:  see weighted_activation_cost
    Source:   SwiGLU: Shazeer 2020 (arXiv:2002.05202); the weight inside, so that no expert's output has to be kept:
              Megatron-Core's experts
    """
    check_operands(gate_up, name, weights)
    gate, up = cast(gate_up, weights.dtype).chunk(2, 1)
    return cast(activation_forward(up, name, gate) * weights[:, None], gate_up.dtype)


def weighted_activation_backward(
    da: Tensor, gate_up: Tensor, name: str, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up, w * act(gate) * up computed again, gradient of the weights).

    Shapes:   da (R, F) like gate_up, and may be overwritten; results (R, 2 F), (R, F), (R,) in the weights' dtype
    Numerics: as the forward; the weights' gradient, a sum over F, is not rounded to gate_up's dtype
    """
    check_operands(gate_up, name, weights, da)
    gate, up = (half.contiguous() for half in cast(gate_up, weights.dtype).chunk(2, 1))
    wide = cast(da, weights.dtype)
    dup, dgate, value = activation_backward(wide * weights[:, None], up, name, gate)
    assert dgate is not None
    dweights = torch.linalg.vecdot(wide, value)
    return cast(torch.cat([dgate, dup], 1), da.dtype), cast(value * weights[:, None], da.dtype), dweights


def weighted_activation_cost(rows: int, f: int, itemsize: int, backward: bool = False) -> Cost:
    """Forward reads gate and up and writes the result. Backward reads the result's gradient, too, and writes both
    gradients and the result. A weight, and in the backward its gradient, is 4 bytes a row."""
    operands = 6 if backward else 3
    return Cost((52 if backward else 21) * rows * f, rows * (operands * f * itemsize + (8 if backward else 4)))

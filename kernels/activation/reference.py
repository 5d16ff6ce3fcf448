"""Activations of MLPs, plain and gated: the specification (torch only), and the cost.

A gated activation is act(gate) * x (SwiGLU with silu, GeGLU with gelu); without a gate it is act(x).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cast import cast
from ..cost import Cost
from ..operands import FLOATS, require, unknown
from ..pack.format import Packed
from ..pack.reference import parts_of, ranges, unpacked
from ..quantize import reference as quantize
from ..quantize.format import blocks_bytes

ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu2")

# gelu_tanh(x) = x * sigmoid(x * (_LINEAR + _CUBIC * x**2)): the tanh form with sigmoid(2z) = (1 + tanh z) / 2, whose
# exponential is several times faster than tanh on a CPU
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715
_FAR = 32.0  # gelu and gelu_tanh of larger x are x, and those of -x are -0, in float64, too
_CPU_ELEMENTS = 2**18  # so many at a time are taken on a CPU, so that intermediate values stay in the cache


def check_operands(
    x: Tensor | Packed, name: str | None, gate: Tensor | Packed | None, da: Tensor | None = None
) -> None:
    """ValueError unless the name is known, a gate has one, x has a floating dtype, and gate and da are like x."""
    if name not in ACTIVATIONS and (name is not None or gate is not None):
        raise unknown("activation", name, ACTIVATIONS)
    if name is not None and x.dtype not in FLOATS:
        require("activation", x, ("x", x, x.shape, FLOATS))
    if gate is not None or da is not None:
        alike = (x.shape, (x.dtype,))
        require("activation", x, ("gate", gate, *alike), ("da", da, *alike))


def _polynomial(x: Tensor, cubic: float, sign: int = 1) -> Tensor:
    """sign * (_LINEAR + cubic * x**2), in one pass."""
    return torch.addcmul(x.new_full((), sign * _LINEAR), x, x, value=sign * cubic)


def _in_parts(x: Tensor) -> list[slice]:
    """Parts of x's rows to take one after another; none, or one, if x is taken at once."""
    # not for fake tensors, which have no elements to keep in a cache
    if x.numel() <= _CPU_ELEMENTS or x.device.type != "cpu" or type(x) is not Tensor:
        return []
    chunk = max(1, _CPU_ELEMENTS * len(x) // x.numel())
    return [slice(first, first + chunk) for first in range(0, len(x), chunk)]


def _gelu_tanh(x: Tensor) -> Tensor:
    if len(parts := _in_parts(x)) > 1:
        a = torch.empty_like(x)
        for part in parts:
            a[part] = _gelu_tanh(x[part])
        return a
    wide = cast(x, torch.promote_types(x.dtype, torch.float32))
    return cast(_polynomial(wide, _CUBIC).mul_(wide).sigmoid_().mul_(wide), x.dtype)


def _gelu_tanh_backward(da: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, act(x)) from one exponential; dx takes the place of da.

    With s the sigmoid of u, act' = s + x s (1 - s) u'. A large x multiplies the error of 1 - s by x u', so 1 - s is
    made as 1 / (1 + exp(u)), which is exact to rounding where s is almost 1. torch's own derivative loses ten times as
    much. Beyond _FAR s is 0 or 1, and u' would be infinite.
    """
    if len(parts := _in_parts(x)) > 1:
        a = torch.empty_like(x)
        for part in parts:
            a[part] = _gelu_tanh_backward(da[part], x[part])[1]
        return da, a
    wide = cast(x, torch.promote_types(x.dtype, torch.float32))
    near = wide.clamp(-_FAR, _FAR)
    e = _polynomial(near, _CUBIC, -1).mul_(near).exp_()
    s = (e + 1).reciprocal_()
    act = s * wide
    rest = e.reciprocal_().add_(1).reciprocal_().mul_(act)
    da.mul_(s.addcmul_(rest, _polynomial(near, 3 * _CUBIC)))
    return da, cast(act, x.dtype)


def _relu2_backward(da: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, act(x)); dx takes the place of da."""
    positive = F.relu(x)
    torch.addcmul(da.new_zeros(()), da, positive, value=2, out=da)
    return da, positive.square_()


def _apply(x: Tensor, name: str) -> Tensor:
    if name == "gelu_tanh":
        return _gelu_tanh(x)
    if name == "relu2":
        return F.relu(x).square_()
    return F.silu(x) if name == "silu" else F.gelu(x)


def _backward(da: Tensor, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(dx, act(x)); da may be overwritten."""
    if name == "gelu_tanh":
        return _gelu_tanh_backward(da, x)
    if name == "relu2":
        return _relu2_backward(da, x)
    derivative = torch.ops.aten.silu_backward if name == "silu" else torch.ops.aten.gelu_backward
    return derivative(da, x), _apply(x, name)


def activation_forward(x: Tensor, name: str | None, gate: Tensor | None = None, *, blocks: bool = False) -> Any:
    """act(x), or act(gate) * x when a gate is given; x itself for name None. blocks: the result by quantize_rows.

    Math:     gelu x * Phi(x); gelu_tanh x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3))); silu x * sigmoid(x);
              relu2 max(x, 0)**2. Those of inf are inf, and those of -inf but relu2's NaN, as in torch.
              In float32, from where its square overflows, gelu here (as in torch) and gelu and gelu_tanh in kernels
              may also be infinite or NaN, so gelu(inf) is NaN, but no other number
    Shapes:   x, gate and the result all (M, F), one dtype
    Numerics: evaluated in promote_types(x.dtype, float32), rounded at the store
    Traffic:  see activation_cost
    Source:   Hendrycks & Gimpel 2016 (arXiv:1606.08415); relu2: So et al. 2021, Primer (arXiv:2109.08668);
              gated: Shazeer 2020 (arXiv:2002.05202)
    """
    check_operands(x, name, gate)
    y = x if name is None else _forward(x, name, gate)
    return quantize.quantize_rows(y) if blocks else y


def _forward(x: Tensor, name: str, gate: Tensor | None) -> Tensor:
    if gate is None:
        return _apply(x, name)
    wide = torch.promote_types(x.dtype, torch.float32)  # torch would round act(gate), which may overflow float16
    return cast(_apply(cast(gate, wide), name) * cast(x, wide), x.dtype)


def activation_backward(
    da: Tensor, x: Tensor | Packed, name: str | None, gate: Tensor | Packed | None = None, *, blocks: bool = False
) -> Any:
    """(dx, dgate or None, act(x) or act(gate) * x): gradients of activation_forward, and its result computed again.

    blocks: the result in blocks of e4m3, and behind it (dx, dgate) in blocks, too; None of what is no activation's.

    Numerics: derivatives at infinities are NaN, but for relu2's, and so is relu2's dgate where gate <= 0 beside an
              infinite x, here and in kernels; torch's autograd has 0 there
    Shapes:   da, x, gate (M, F), contiguous, or x and gate packed; a result may take the memory of da. Launchers
              check them; here they are what a forward has checked, and a gradient that autograd has compared
    """
    if blocks:
        dx, dgate, a = activation_backward(da, x, name, gate)
        beside = (None if each is None or name is None else quantize.quantize_rows(each) for each in (dx, dgate))
        return dx, dgate, quantize.quantize_rows(a), tuple(beside)
    if name is None:
        return da, None, unpacked(x)
    if isinstance(x, Packed) or isinstance(gate, Packed):
        return _backward_of_packed(da, x, name, gate)
    if gate is None:
        dx, a = _backward(da, x, name)
        return dx, None, a
    wide = torch.promote_types(x.dtype, torch.float32)
    wide_da, wide_x = cast(da, wide), cast(x, wide)
    dgate, act = _backward(wide_da * wide_x, cast(gate, wide), name)
    return cast(wide_da.mul_(act), x.dtype), cast(dgate, x.dtype), cast(act.mul_(wide_x), x.dtype)


def _backward_of_packed(
    da: Tensor, x: Tensor | Packed, name: str, gate: Tensor | Packed | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """activation_backward in parts, so that no second copy of x or gate is whole at any time."""
    a, flat = torch.empty_like(da), da.view(-1)
    dgate = None if gate is None else torch.empty_like(da)
    parts = [parts_of(x), *([] if gate is None else [parts_of(gate)])]
    for place, *values in zip(ranges(da.numel()), *parts, strict=True):
        dx, own_dgate, a.view(-1)[place] = activation_backward(flat[place], values[0], name, *values[1:])
        flat[place] = dx
        if dgate is not None:
            dgate.view(-1)[place] = own_dgate
    return da, dgate, a


def activation_cost(
    m: int, f: int, itemsize: int, gated: bool = False, backward: bool = False, blocks: bool = False
) -> Cost:
    """Forward reads x (and gate) and writes the result, with `blocks` as blocks of e4m3. Backward reads da, too, and
    writes the result and the gradient of each input, with `blocks` of each gradient its blocks beside it."""
    inputs = 2 if gated else 1
    operands = (2 * inputs + 1 if backward else inputs) + (not blocks)
    in_blocks = blocks * (1 + inputs * backward)  # matrices
    written = in_blocks * blocks_bytes(m, f)
    flops = (24 if backward else 10) * inputs + 2 * in_blocks
    return Cost(flops * m * f, operands * m * f * itemsize + written)

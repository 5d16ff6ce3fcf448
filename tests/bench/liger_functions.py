"""Stand-ins in plain torch for the autograd Functions of Liger-Kernel 0.8.5.

Each takes the same arguments, overwrites the same ones and returns as many results. bench/memory_bound/liger.py calls
them.
Belongs here: nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.memory_bound import formulas
from bench.memory_bound.cases import EPS


class Function:
    """The Function of a formula of some tensors, with its backward by autograd.

    given: what follows the tensors in a call of forward. overwritten: where the backward leaves gradients, of its own
    arguments and then what was kept. nothing: how many results of the backward are None.
    """

    def __init__(
        self,
        formula: Callable[..., Any],
        tensors: int,
        given: Sequence[float] = (),
        *,
        overwritten: Sequence[int] = (),
        nothing: int,
    ) -> None:
        self.formula, self.tensors, self.given = formula, tensors, tuple(given)
        self.overwritten, self.nothing = overwritten, nothing

    def forward(self, ctx: Any, *arguments: Any) -> Any:
        tensors, given = arguments[: self.tensors], arguments[self.tensors :]
        assert given == self.given
        ctx.save_for_backward(*tensors)
        return self.formula(*tensors)

    def backward(self, ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        assert all(ctx.needs_input_grad[: self.tensors])
        leaves = [x.clone().requires_grad_() for x in ctx.saved_tensors]
        found = torch.autograd.grad(self.formula(*leaves), leaves, [dy.clone() for dy in upstream])
        for index, place in enumerate(self.overwritten):
            (*upstream, *ctx.saved_tensors)[place].copy_(found[index])
        if self.tensors == 1:
            return found[0]
        return *found, *[None] * self.nothing


def layer_norm(x: Tensor, *parameters: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *parameters, EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


class Rope:
    @staticmethod
    def turn(q, k, cos, sin, sign):
        for x in (q, k):  # (batch, heads, seq, d), in place
            half = x.shape[-1] // 2
            swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
            x.copy_(x * cos[:, None] + sign * swapped * sin[:, None])
        return q, k

    @classmethod
    def forward(cls, ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        ctx.save_for_backward(cos, sin)
        ctx.rotary_dim = cos.shape[-1]
        return cls.turn(q, k, cos, sin, 1)

    @classmethod
    def backward(cls, ctx, dq, dk):
        assert ctx.rotary_dim == dq.shape[-1]
        return *cls.turn(dq, dk, *ctx.saved_tensors, -1), None, None, None, None, None


class CrossEntropy:
    @staticmethod
    def forward(
        ctx, _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean"
    ):
        assert reduction == "none"
        losses, gradient = formulas.cross_entropy_both(_input.detach(), target)
        if _input.requires_grad:
            _input.detach().copy_(gradient)
        return losses, None, None, None


class LinearCrossEntropy:
    @staticmethod
    def apply(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction):
        assert reduction == "sum"
        return F.cross_entropy(F.linear(_input, weight), target, reduction="sum"), None, None, None


# by Liger-Kernel's module and name
FUNCTIONS: dict[tuple[str, str], Any] = {
    ("layer_norm", "LigerLayerNormFunction"): Function(layer_norm, 3, [EPS], nothing=1),
    ("rms_norm", "LigerRMSNormFunction"): Function(rms_norm, 2, [EPS], overwritten=[0], nothing=5),
    ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"): Function(
        lambda x, r, weight: (rms_norm(x + r, weight), x + r), 3, [EPS], nothing=5
    ),
    ("swiglu", "LigerSiLUMulFunction"): Function(
        lambda a, b: formulas.act(a, "silu") * b, 2, overwritten=[1, 2], nothing=2
    ),
    ("geglu", "LigerGELUMulFunction"): Function(
        lambda a, b: formulas.act(a, "gelu_tanh") * b, 2, overwritten=[1, 2], nothing=2
    ),
    ("relu_squared", "LigerReLUSquaredFunction"): Function(lambda x: F.relu(x).square(), 1, nothing=0),
    ("rope", "LigerRopeFunction"): Rope,
    ("cross_entropy", "LigerCrossEntropyFunction"): CrossEntropy,
    ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"): LinearCrossEntropy,
}

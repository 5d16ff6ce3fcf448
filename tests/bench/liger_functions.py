"""Stand-ins in plain torch for the autograd Functions of Liger-Kernel 0.8.5.

Each takes the same arguments, overwrites the same ones and returns as many results. bench/memory_bound/liger.py calls
them.
Belongs here: nothing else.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.memory_bound import formulas
from bench.memory_bound.cases import EPS


def kept(context: Any, *tensors: Tensor) -> None:
    context.save_for_backward(*tensors)


class Norm:
    @staticmethod
    def forward(ctx, X, W, B, eps):
        kept(ctx, X, W, B)
        return F.layer_norm(X, X.shape[-1:], W, B, eps)

    @staticmethod
    def backward(ctx, dY):
        assert ctx.needs_input_grad[1] and ctx.needs_input_grad[2]
        leaves = [x.clone().requires_grad_() for x in ctx.saved_tensors]
        return *torch.autograd.grad(F.layer_norm(leaves[0], dY.shape[-1:], *leaves[1:], EPS), leaves, dY), None


class RMSNorm:
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        kept(ctx, X, W)
        return F.rms_norm(X, X.shape[-1:], W, eps)

    @staticmethod
    def backward(ctx, dY):
        leaves = [x.clone().requires_grad_() for x in ctx.saved_tensors]
        dX, dW = torch.autograd.grad(F.rms_norm(leaves[0], dY.shape[-1:], leaves[1], EPS), leaves, dY.clone())
        return dY.copy_(dX), dW, None, None, None, None, None


class AddRMSNorm:
    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        kept(ctx, X + R, W)
        return F.rms_norm(X + R, X.shape[-1:], W, eps), X + R

    @staticmethod
    def backward(ctx, dY, dS_out):
        leaves = [x.clone().requires_grad_() for x in ctx.saved_tensors]
        dX, dW = torch.autograd.grad(F.rms_norm(leaves[0], dY.shape[-1:], leaves[1], EPS), leaves, dY)
        return dX + dS_out, dX + dS_out, dW, None, None, None, None, None


class Gated:
    name = ""

    @classmethod
    def forward(cls, ctx, a, b):
        kept(ctx, a, b)
        return formulas.act(a, cls.name) * b

    @classmethod
    def backward(cls, ctx, dc):
        a, b = ctx.saved_tensors
        da = dc * b * formulas.act_derivative(a, cls.name)
        db = dc * formulas.act(a, cls.name)
        return a.copy_(da), b.copy_(db), None, None


class SiLUMul(Gated):
    name = "silu"


class GELUMul(Gated):
    name = "gelu_tanh"


class ReLUSquared:
    @staticmethod
    def forward(ctx, X):
        kept(ctx, X)
        return F.relu(X).square()

    @staticmethod
    def backward(ctx, dY):
        return 2 * F.relu(ctx.saved_tensors[0]) * dY


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
        kept(ctx, cos, sin)
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


def functions() -> dict[tuple[str, str], Any]:
    """The stand-ins, by Liger-Kernel's module and name."""
    return {
        ("layer_norm", "LigerLayerNormFunction"): Norm,
        ("rms_norm", "LigerRMSNormFunction"): RMSNorm,
        ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"): AddRMSNorm,
        ("swiglu", "LigerSiLUMulFunction"): SiLUMul,
        ("geglu", "LigerGELUMulFunction"): GELUMul,
        ("relu_squared", "LigerReLUSquaredFunction"): ReLUSquared,
        ("rope", "LigerRopeFunction"): Rope,
        ("cross_entropy", "LigerCrossEntropyFunction"): CrossEntropy,
        ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"): LinearCrossEntropy,
    }

"""Rotary position embedding of queries and keys."""

import torch
from torch import Tensor

from tpformer.kernels.rope.reference import rope_rotate


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rope_rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rope_rotate(dy, cos, sin, inverse=True), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (tokens, heads, head_dim) by cos, sin (tokens, head_dim / 2) from kernels.rope's rope_table.

    Saves the table only, which all layers share: the rotation is orthogonal, so x is not needed. No communication.
    """
    return RopeFunction.apply(x, cos, sin)

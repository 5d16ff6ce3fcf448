"""Normalisation as a stand-alone operation, and as the prologue that column_linear folds into its gather."""

from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.norm.reference import Norm

from .autocast import autocast_dtype, cast
from .first_derivative import first_derivative
from .implementation import implementation
from .uncompiled import uncompiled


class Normed(NamedTuple):
    """norm(x), made where x was made: y like x, mean (None for rmsnorm) and rstd (rows, 1). No gradients flow in it."""

    y: Tensor
    mean: Tensor | None
    rstd: Tensor


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kind, eps):
        y, (mean, rstd) = implementation("norm", x).norm_forward(x, Norm(kind, weight, bias, eps))
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.kind, ctx.eps = kind, eps
        return y

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        norm = Norm(ctx.kind, weight, bias, ctx.eps)
        return *implementation("norm", x).norm_backward(dy.contiguous(), x, (mean, rstd), norm), None, None


@uncompiled
def norm(x: Tensor, prologue: Norm) -> Tensor:
    """Normalise the last dim of x (..., N). Saves x and two statistics a row, never the output; no communication.

    Under torch.autocast in float32, whatever x is.
    """
    if autocast_dtype(x) is not None:
        kind, weight, bias, eps = prologue
        x, prologue = cast(x, torch.float32), Norm(kind, cast(weight, torch.float32), cast(bias, torch.float32), eps)
    flat = x.reshape(-1, x.shape[-1])
    return NormFunction.apply(flat, prologue.weight, prologue.bias, prologue.kind, prologue.eps).view(x.shape)

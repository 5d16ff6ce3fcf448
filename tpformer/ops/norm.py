"""Normalisation as a stand-alone operation, and as the prologue that column_linear folds into its gather."""

from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.norm.reference import Statistics, norm_backward, norm_forward


class Norm(NamedTuple):
    """A norm to apply before a linear: kind "layernorm" or "rmsnorm", weight (N,), bias (N,) or None, eps."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kind, eps):
        y, (mean, rstd) = norm_forward(x, weight, bias, kind, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.kind = kind
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        statistics: Statistics = (mean, rstd)
        return *norm_backward(dy.contiguous(), x, statistics, weight, bias, ctx.kind), None, None


def norm(x: Tensor, prologue: Norm) -> Tensor:
    """Normalise the last dim of x (..., N). Saves x and two statistics a row, never the output; no communication."""
    flat = x.reshape(-1, x.shape[-1])
    return NormFunction.apply(flat, prologue.weight, prologue.bias, prologue.kind, prologue.eps).view(x.shape)

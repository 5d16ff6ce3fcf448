"""Normalisation as an operation of its own, and the parts of it that linears use (column_linear, row_linear)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.finish import Norm
from tpformer.kernels.norm.reference import check_operands
from tpformer.torch_private import Function, is_fake

from .autocast import autocast_dtype, cast
from .first_derivative import first_derivative
from .implementation import implementation
from .packing import keep, kept
from .sequence import flat_rows
from .uncompiled import uncompiled
from .unsaved import versions


class Normed(NamedTuple):
    """norm(x) from the operation that made x: y like x, mean (None for rmsnorm) and rstd (rows, 1).

    No gradient flows through it: the linear that takes it makes the norm's gradients from x.
    of: x (rows, N) and the norm, as row_linear has them, and their versions: a linear takes Normed with these alone.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    of: tuple[Tensor, Norm, list[int]] | None = None


def parameters(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    """The norm's tensors as separate inputs of an autograd Function, which does not look into tuples."""
    if norm is None:
        return None, None
    if norm.bias is not None and norm.kind == "rmsnorm":
        raise ValueError("rmsnorm has no bias, and one is given: leave it out, or add it to the result")
    return norm.weight, norm.bias


def restored(norm: Norm | None, weight: Tensor | None, bias: Tensor | None) -> Norm | None:
    """The norm in a backward, with the parameters that the Function saved."""
    return None if norm is None else Norm(norm.kind, weight, bias, norm.eps)


def written(x: Tensor, norm: Norm) -> list[int]:
    """How often x and the norm's parameters have been written in place."""
    return versions(x, norm.weight, norm.bias)


def _shares_memory(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether x is y, or another object of the same memory, as a view or what a second to_local() gives.

    Tensors without memory are taken for such.
    """
    return x is y or (x is not None and y is not None and (x.is_meta or is_fake(x) or x.is_set_to(y)))


def check_normed(rows: Tensor, norm: Norm | None, normed: Normed) -> None:
    """ValueError unless `normed` is norm(rows), as row_linear made it; of one made by hand, unless it can be."""
    if norm is None:
        raise ValueError("normed without norm: give the norm as well, because its gradients are made here")
    if normed.of is not None:
        made, by, before = normed.of
        of_these = made is rows and by.weight is norm.weight and by.bias is norm.bias  # a call less for each
        if not of_these:
            of_these = all(map(_shares_memory, (made, *by[1:3]), (rows, *norm[1:3])))
        if of_these and by.kind == norm.kind and by.eps == norm.eps and written(made, by) == before:
            return
        raise ValueError(
            "normed was made by row_linear of other rows or by another norm, or one of them was written since: "
            "give x and the norm as they were, or leave normed out"
        )
    check_operands(rows, norm, statistics=normed[1:3], y=normed.y)
    if (normed.mean is None) != (norm.kind == "rmsnorm"):
        raise ValueError(f"normed is not that of {norm.kind}: give the norm that made it")


def normalised(
    x: Tensor, norm: Norm | None, normed: Normed | None, in_blocks: bool = False
) -> tuple[Any, Tensor | None, Tensor | None]:
    """(norm(x), mean, rstd): what was given, or made here; (x, None, None) without a norm. in_blocks: what is made
    here is Blocks."""
    if norm is None:
        return x, None, None
    if normed is not None:
        return normed[:3]
    y, (mean, rstd) = implementation("norm", x).norm_forward(x, norm, blocks=in_blocks)
    return y, mean, rstd


class NormFunction(Function):
    """y = norm(x) for x, y (tokens, N), weight and bias (N,); rstd, and for layernorm mean, are (tokens, 1).

    forward   y = (x - mean) * rstd * weight + bias; rmsnorm has neither mean nor bias
    backward  dx, dweight and dbias by norm_backward's formulas (kernels/norm/reference.py)
    """

    @staticmethod
    def forward(ctx, x, weight, bias, norm: Norm):
        y, mean, rstd = normalised(x, norm, None)
        keep(ctx, x, weight, bias, mean, rstd, readable=1)
        ctx.norm = norm
        return y

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        x, weight, bias, mean, rstd = kept(ctx)
        norm = restored(ctx.norm, weight, bias)
        return *implementation("norm", x).norm_backward(dy.contiguous(), x, (mean, rstd), norm), None


@uncompiled
def norm(x: Tensor, prologue: Norm) -> Tensor:
    """Normalise the last dim of x (..., N); the result is like x.

    Saves x and two statistics a row, not the output; no communication.
    Under torch.autocast it computes in float32 and returns float32.
    """
    if autocast_dtype(x) is not None:
        x, weight, bias = (cast(each, torch.float32) for each in (x, *parameters(prologue)))
        prologue = prologue._replace(weight=weight, bias=bias)
    return NormFunction.apply(flat_rows(x), *parameters(prologue), prologue).view(x.shape)

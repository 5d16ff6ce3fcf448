"""One reduce-scatter with a norm after it, on one GPU: its operands, both ways to do it, and what they must give;
imports triton.

Belongs here: what band.py times. The GEMM and its channel are fused_gemm.py's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.finish import Finish
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.norm.reference import Norm
from tpformer.ops.implementation import implementation

from .. import fused_gemm
from ..accuracy import require_accurate
from ..fused_gemm import RANK, FusedGemm
from ..shapes import Shape
from . import formulas
from .case import EPS, flat


class Group(NamedTuple):
    """residual: the served ranks' (rows, N), stacked; norm: with weight and (layernorm) bias (N,), the same for all."""

    gemm: FusedGemm
    residual: Tensor
    norm: Norm


def build(kind: str, shape: Shape, device: str, dtype: torch.dtype, virtual: bool) -> Group:
    """virtual: all ranks in one launch; else rank RANK alone, its peers' partial sums in its slot."""
    gemm = fused_gemm.build(shape, device, dtype, virtual=virtual)
    weight, bias = torch.randn(2, shape.n, device=device, dtype=dtype)
    residual = torch.randn(gemm.served * shape.m // shape.t, shape.n, device=device, dtype=dtype)
    return Group(gemm, residual, Norm(kind, weight, bias if kind == "layernorm" else None, EPS))


def providers(group: Group) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(fused, separate): each gives (z, y, statistics) of the epoch that has begun."""
    gemm, residual, norm = group
    weight, bias = (None if x is None else x.repeat(gemm.served) for x in (norm.weight, norm.bias))
    stacked = Norm(norm.kind, weight, bias, norm.eps)  # the kernel takes one for each rank

    def reduce_scatter(finish: Finish) -> Any:
        return matmul_reduce_scatter([gemm.a], [gemm.w], gemm.channel, finish, tile=gemm.tile)

    def separate() -> Any:
        z = reduce_scatter(Finish(residual=residual))
        return z, implementation("norm", z).norm_forward(z, norm)

    return partial(reduce_scatter, Finish(residual=residual, norm=stacked)), separate


def expected(group: Group, dtype: torch.dtype) -> list[Tensor]:
    """The results of the epoch that has begun, with products in dtype: float64 or the operands' own."""
    gemm, residual, norm = group
    rows = len(residual)
    terms = fused_gemm.partials(gemm, dtype, 0 if gemm.virtual else RANK * rows, rows)
    z = (terms.sum(0, dtype=torch.promote_types(dtype, torch.float32)) + residual).to(dtype)
    weight, bias = (None if x is None else x.to(dtype) for x in (norm.weight, norm.bias))
    return [z, *formulas.norm_forward(z, weight, bias, norm.kind, norm.eps)]


def check(group: Group, what: str) -> None:
    """AssertionError unless both ways are right by the accuracy rule, with no wait expired."""
    for name, provider in zip(("fused", "separate"), providers(group), strict=True):
        fused_gemm.begin(group.gemm)
        oracle, baseline = expected(group, torch.float64), expected(group, group.residual.dtype)
        holes = [torch.full_like(x, float("nan")) for x in baseline]
        del holes  # the memory that the allocator gives next: what is left out then shows
        for index, results in enumerate(zip(flat(provider()), oracle, baseline, strict=True)):
            require_accurate(f"{what} {name}, result {index}", *results)
        fused_gemm.require_no_expiry(group.gemm, what)

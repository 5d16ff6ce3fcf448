"""Cases of `dropout`: alone, and as a part of what follows a reduction (bias, dropout, residual)."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.dropout.reference import dropout_cost, finish_cost
from tpformer.kernels.finish import Dropout, Finish
from tpformer.ops.implementation import implementation

from . import formulas
from .case import COMPILED, ITEMSIZE, KEY, Case, P, Rows, Work, hidden_rows, kept, starts
from .formulas import Tensors, compiled, dropped


def dropout(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    (x,) = rows.random(1, device, dtype)
    start = starts(rows.m, rows.n, device)
    keep = kept(start, rows.n)
    op = implementation("dropout", x).dropout_apply

    def ours(x: Tensor) -> Any:
        return op(x, start, KEY, P)

    def plain(x: Tensor) -> Tensors:
        return (dropped(x, keep, P),)

    return Work([x], ours, plain, {COMPILED: compiled(lambda x: (F.dropout(x, P),))}, random=True)


def finish_forward(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    x, residual = rows.random(2, device, dtype)
    (bias,) = rows.random_vectors(1, device, dtype)
    start = starts(rows.m, rows.n, device)
    keep = kept(start, rows.n)
    op = implementation("dropout", x).finish_forward

    def ours(x: Tensor, bias: Tensor, residual: Tensor) -> Any:
        return op(x, Finish(bias, Dropout(start, KEY, P), residual))

    def plain(x: Tensor, bias: Tensor, residual: Tensor) -> Tensors:
        return formulas.finish_forward(x, bias, residual, lambda total: dropped(total, keep, P))

    def theirs(x: Tensor, bias: Tensor, residual: Tensor) -> Tensors:
        return formulas.finish_forward(x, bias, residual, lambda total: F.dropout(total, P))

    return Work([x, bias, residual], ours, plain, {COMPILED: compiled(theirs)}, mutated=(0,), random=True)


def finish_backward(rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """torch reads the mask that its forward would have stored."""
    (dz,) = rows.random(1, device, dtype)
    start = starts(rows.m, rows.n, device)
    keep = kept(start, rows.n)
    op = implementation("dropout", dz).finish_backward

    def ours(dz: Tensor, keep: Tensor) -> Any:
        return op(dz, Dropout(start, KEY, P), True)

    def plain(dz: Tensor, keep: Tensor) -> Tensors:
        return formulas.finish_backward(dz, keep, P)

    return Work([dz, keep], ours, plain, {COMPILED: compiled(plain)})


def dropout_cases(quick: bool) -> list[Case]:
    cases = []
    for rows in hidden_rows(quick):
        size = (rows.m, rows.n, ITEMSIZE)
        listed = {
            "dropout": (dropout, dropout_cost(*size)),
            "bias, dropout, residual": (finish_forward, finish_cost(*size, bias=True, dropout=True, residual=True)),
            "bias, dropout, backward": (finish_backward, finish_cost(*size, bias=True, dropout=True, backward=True)),
        }
        cases += [Case(name, str(rows), cost.bytes, partial(build, rows)) for name, (build, cost) in listed.items()]
    return cases

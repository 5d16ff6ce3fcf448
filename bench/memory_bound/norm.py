"""Cases of `norm`: LayerNorm and RMSNorm, alone, with a residual's gradient, and after what follows a reduction."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.reference import norm_cost
from tpformer.ops.implementation import implementation

from . import formulas, liger
from .case import COMPILED, EPS, ITEMSIZE, KEY, LIGER, Case, P, Rows, Work, hidden_rows, kept, starts
from .formulas import Tensors, compiled, dropped


def parameters(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A norm's weight and bias."""
    weight, bias = rows.random_vectors(2, device, dtype)
    return weight, bias if kind == "layernorm" else None


def norm_forward(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    (x,) = rows.random(1, device, dtype)
    op = implementation("norm", x).norm_forward

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        return op(x, Norm(kind, weight, bias, EPS))

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensors:
        return formulas.norm_forward(x, weight, bias, kind, EPS)

    rivals = {COMPILED: compiled(plain), LIGER: liger.norm_forward(kind, EPS)}
    return Work([x, *parameters(kind, rows, device, dtype)], ours, plain, rivals)


def norm_backward(kind: str, residual: bool, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """residual: the gradient that passes the norm by is added."""
    dy, x, dresidual = rows.random(3, device, dtype)
    weight, bias = parameters(kind, rows, device, dtype)
    _, *mean, rstd = formulas.norm_forward(x, weight, bias, kind, EPS)
    op = implementation("norm", x).norm_backward

    def ours(
        dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Any, dresidual: Any
    ) -> Any:
        return op(dy, x, (mean, rstd), Norm(kind, weight, bias, EPS), dresidual)

    if not residual:
        theirs = liger.norm_backward(kind, EPS, x, weight, bias)
    else:
        theirs = liger.add_norm_backward(EPS, x, weight) if kind == "rmsnorm" else None
    inputs = [dy, x, mean[0] if mean else None, rstd, weight, bias, dresidual if residual else None]
    rivals = {COMPILED: compiled(formulas.norm_backward), LIGER: theirs}
    return Work(inputs, ours, formulas.norm_backward, rivals, mutated=(0,))


def finish_norm(kind: str, rows: Rows, device: str, dtype: torch.dtype) -> Work:
    """layernorm: after GPT's bias and dropout; rmsnorm: as in Llama, after nothing but the residual."""
    x, residual = rows.random(2, device, dtype)
    weight, shift = parameters(kind, rows, device, dtype)
    full = kind == "layernorm"
    (bias,) = rows.random_vectors(1, device, dtype)
    dropout = Dropout(starts(rows.m, rows.n, device), KEY, P) if full else None
    keep = None if dropout is None else kept(dropout.start, rows.n)
    op = implementation("norm", x).finish_norm_forward

    def ours(x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None) -> Any:
        return op(x, Finish(bias, dropout, residual, Norm(kind, weight, shift, EPS)))

    def formula(drop: Callable[[Tensor], Tensor]) -> Callable[..., Tensors]:
        def finished(x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None) -> Tensors:
            (z,) = formulas.finish_forward(x, bias, residual, drop)
            return z, *formulas.norm_forward(z, weight, shift, kind, EPS)  # the norm of z as it is stored

        return finished

    plain = formula(lambda total: dropped(total, keep, P))
    theirs = formula(lambda total: F.dropout(total, P)) if full else plain
    rivals = {COMPILED: compiled(theirs), LIGER: None if full else liger.add_norm_forward(EPS)}
    inputs = [x, bias if full else None, residual, weight, shift]
    return Work(inputs, ours, plain, rivals, mutated=(0,), random=full)


def norm_cases(quick: bool) -> list[Case]:
    cases = []
    for rows in hidden_rows(quick):
        for kind in ("layernorm", "rmsnorm"):
            full = kind == "layernorm"
            listed: dict[str, tuple[Callable[..., Work], dict[str, bool]]] = {
                "forward": (partial(norm_forward, kind), {}),
                "backward": (partial(norm_backward, kind, False), {"backward": True}),
                "backward + residual": (partial(norm_backward, kind, True), {"backward": True, "residual": True}),
                "after finish": (partial(finish_norm, kind), {"bias": full, "dropout": full, "residual": True}),
            }
            for name, (make, parts) in listed.items():
                nbytes = norm_cost(rows.m, rows.n, ITEMSIZE, kind, **parts).bytes
                cases.append(Case(f"{kind} {name}", str(rows), nbytes, partial(make, rows)))
    return cases

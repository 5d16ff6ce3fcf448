"""What the tests of norm and dropout share: operands, and the oracles of the norms.

Belongs here: checks that run on a reference, on a kernel in Triton's interpreter and on a GPU alike. No tests.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from places import draw, with_gradients
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.philox.reference import random_words

EPS = 1e-5
BEYOND_32_BITS = 5 * 2**33
HIGH_KEY = 2**63 + 12345


def draw_norm(seed: int, n: int, kind: str, dtype: torch.dtype, device: str = "cpu", with_bias: bool = True) -> Norm:
    weight, bias = draw(seed + 1000, dtype, device, (n,), (n,))
    return Norm(kind, weight, bias if with_bias and kind == "layernorm" else None, EPS)


def draw_dropout(rows: int, n: int, p: float, device: str = "cpu") -> Dropout:
    """The rows are whole rows of a large tensor, so that their starts are multiples of 4 if n is one."""
    return Dropout((BEYOND_32_BITS // 4 + torch.arange(rows, device=device)) * n, HIGH_KEY, p)


def formula(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def by_torch(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "rmsnorm":
        return F.rms_norm(x, x.shape[1:], norm.weight, norm.eps)
    return F.layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)


def by_autograd(
    function, x: Tensor, norm: Norm, dy: Tensor, dresidual: Tensor | None, compute: torch.dtype, store: torch.dtype
) -> list[Tensor]:
    """y, dx (+ dresidual), dweight and any dbias of a norm, computed in one dtype and rounded once to another."""

    def normalise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, norm._replace(weight=weight, bias=bias))

    inputs = [t.to(compute) for t in (x, norm.weight, norm.bias) if t is not None]
    y, dx, *parameters = with_gradients(normalise, inputs, dy.to(compute))
    if dresidual is not None:
        dx = dx + dresidual.to(compute)
    return [t.to(store) for t in (y, dx, *parameters)]


def check_norm(
    module: ModuleType, x: Tensor, norm: Norm, dy: Tensor, dresidual: Tensor | None = None, **options
) -> None:
    """Compare every output and gradient of a module's norm with float64 autograd."""
    with poisoned_memory():
        y, statistics = module.norm_forward(x, norm, **options)
    if not options:
        assert torch.equal(module.norm_rebuilt(x, statistics, norm), y)
    check_normalised(module, x, y, statistics, norm, dy, dresidual, **options)


def check_normalised(
    module: ModuleType, x: Tensor, y: Tensor, statistics, norm: Norm, dy: Tensor, dresidual: Tensor | None, **options
) -> None:
    """Compare the y and the statistics that a module made of x, and its norm_backward, with float64 autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = statistics
    assert rstd.shape == (len(x), 1) and rstd.dtype == wide
    assert (mean is None) if norm.kind == "rmsnorm" else (mean.shape == (len(x), 1) and mean.dtype == wide)
    with poisoned_memory():
        gradients = module.norm_backward(dy, x, statistics, norm, dresidual, **options)
    actual = [y, *(t for t in gradients if t is not None)]
    oracle = by_autograd(formula, x, norm, dy, dresidual, torch.float64, torch.float64)
    # the baseline computes in float32 and rounds once, which is what is promised for 16-bit rows
    baseline = by_autograd(by_torch, x, norm, dy, dresidual, wide, x.dtype)
    assert len(actual) == len(oracle) == (4 if norm.bias is not None else 3)
    names = ("y", "dx", "dweight", "dbias")
    for name, a, o, b in zip(names, actual, oracle, baseline, strict=False):
        assert_kernel_close(a, o, b, f"{norm.kind} {name} {tuple(x.shape)} {x.dtype} {options}")


def dropped(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """dropout(x) by its definition: Philox words, compared as integers, and one multiplication."""
    keep = random_words(key, start, x.shape[1]) >= round(p * 2**32)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def finished(x: Tensor, finish: Finish) -> Tensor:
    """residual + dropout(x + bias) in x's dtype."""
    if finish.bias is not None:
        x = x + finish.bias.to(x.dtype)
    if finish.dropout is not None:
        x = dropped(x, *finish.dropout)
    return x if finish.residual is None else x + finish.residual.to(x.dtype)


def check_finished(z: Tensor, x: Tensor, finish: Finish, name: str) -> None:
    """z = residual + dropout(x + bias), and its dropped elements are exactly the residual's."""
    oracle, baseline = finished(x.double(), finish), finished(x.to(torch.promote_types(x.dtype, torch.float32)), finish)
    assert_kernel_close(z, oracle, baseline.to(x.dtype), name)
    if finish.dropout is not None and finish.residual is not None:
        nothing = (oracle - finish.residual.double()) == 0
        assert torch.equal(z[nothing], finish.residual[nothing]), name

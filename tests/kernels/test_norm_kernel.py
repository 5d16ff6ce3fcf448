"""LayerNorm and RMSNorm references equal float64 autograd of their formulas, forward and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import assert_kernel_close
from torch import Tensor

from tpformer.kernels.norm.reference import norm_backward, norm_cost, norm_forward

EPS = 1e-5
KINDS = st.sampled_from(["layernorm", "rmsnorm"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return y if bias is None else y + bias


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return F.rms_norm(x, x.shape[1:], weight, EPS) if kind == "rmsnorm" else F.layer_norm(x, x.shape[1:], weight, bias)


def by_autograd(norm, x, weight, bias, dy, kind: str, compute: torch.dtype, store: torch.dtype) -> list[Tensor]:
    """y, dx, dweight (, dbias) of `norm`, computed in one dtype and rounded once to another."""
    inputs = [t.detach().to(compute).requires_grad_() for t in (x, weight, bias) if t is not None]
    y = norm(inputs[0], inputs[1], inputs[2] if bias is not None else None, kind)
    return [t.detach().to(store) for t in (y, *torch.autograd.grad(y, inputs, dy.to(compute)))]


def check(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, kind: str) -> None:
    y, statistics = norm_forward(x, weight, bias, kind, EPS)
    mean, rstd = statistics
    wide = torch.promote_types(x.dtype, torch.float32)
    assert rstd.shape == (len(x), 1) and rstd.dtype == wide
    assert (mean is None) if kind == "rmsnorm" else (mean.shape == (len(x), 1) and mean.dtype == wide)
    actual = [y, *(t for t in norm_backward(dy, x, statistics, weight, bias, kind) if t is not None)]
    oracle = by_autograd(formula, x, weight, bias, dy, kind, torch.float64, torch.float64)
    # the baseline computes in float32 and rounds once, which is what the reference promises for 16-bit rows
    baseline = by_autograd(by_torch, x, weight, bias, dy, kind, wide, x.dtype)
    assert len(actual) == len(oracle) == (4 if bias is not None else 3)
    for name, a, o, b in zip(("y", "dx", "dweight", "dbias"), actual, oracle, baseline, strict=False):
        assert_kernel_close(a, o, b, f"{kind} {name} {tuple(x.shape)} {x.dtype}")


def make(rows: int, columns: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, columns), (columns,), (columns,), (rows, columns)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# 1 row, odd and prime widths. Not width 1: dx is then the rounding error of an exact cancellation, see below.
# The same cases every run: a gradient that happens to cancel nearly whole has no meaningful relative error.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(3, 67), KINDS, DTYPES, st.booleans(), st.integers(0, 1000))
def test_equals_float64_autograd(rows, columns, kind, dtype, with_bias, seed):
    x, weight, bias, dy = make(rows, columns, dtype, seed)
    check(x, weight, bias if with_bias and kind == "layernorm" else None, dy, kind)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("columns", [1, 2])
def test_narrow_rows(kind, columns):
    x, weight, bias, dy = make(3, columns, torch.float64, 0)
    bias = bias if kind == "layernorm" else None
    y, statistics = norm_forward(x, weight, bias, kind, EPS)
    actual = [y, *(t for t in norm_backward(dy, x, statistics, weight, bias, kind) if t is not None)]
    expected = by_autograd(formula, x, weight, bias, dy, kind, torch.float64, torch.float64)
    # layernorm's rstd is up to eps**-0.5 = 316 here
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# large offset: cancellation in the variance; tiny: eps dominates; huge: squares near float32's range; constant row
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("scale, offset", [(1.0, 300.0), (1e-6, 0.0), (1e15, 0.0), (0.0, 5.0), (0.0, 0.0)])
def test_extreme_values(kind, scale, offset):
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias, dy = make(5, 33, dtype, 0)
        check((x * scale + offset).to(dtype), weight, bias if kind == "layernorm" else None, dy, kind)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_no_rows_and_rows_that_are_not_contiguous(kind):
    x, weight, bias, dy = make(8, 6, torch.float32, 1)
    bias = bias if kind == "layernorm" else None
    check(x.t().contiguous().t(), weight, bias, dy, kind)
    y, statistics = norm_forward(x[:0], weight, bias, kind, EPS)
    dx, dweight, _ = norm_backward(dy[:0], x[:0], statistics, weight, bias, kind)
    assert y.shape == dx.shape == (0, 6)
    assert torch.equal(dweight, torch.zeros(6))


# by hand. (2, 4, 4): rows 2*8*4 = 64 bytes, statistics 4*2*2 = 16, weights 2*4*4 = 32, flops 7*8
@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((2, 4, 4), (56, 112)),
        ((3, 10, 2, "rmsnorm"), (120, 172)),  # 2*30*2 + 4*3 + 2*10*2
        ((3, 10, 2, "layernorm", True), (330, 244)),  # 3*30*2 + 8*3 + 2*10*2
    ],
)
def test_cost(arguments, expected):
    assert norm_cost(*arguments) == expected

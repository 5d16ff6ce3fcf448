"""The reference and the kernel of LayerNorm and RMSNorm equal float64 autograd of their formulas, gradients too."""

import itertools
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import WorkerPool
from row_checks import (
    BEYOND_32_BITS,
    EPS,
    HIGH_KEY,
    by_autograd,
    check_finished,
    check_norm,
    check_normalised,
    draw,
    draw_dropout,
    draw_norm,
    formula,
)
from testing import assert_same, poisoned_memory
from torch import Tensor

from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm import reference
from tpformer.kernels.norm.reference import norm_backward, norm_forward

KINDS = ("layernorm", "rmsnorm")
# (scale, offset). The variance cancels; eps dominates; squares come near float32's largest; rows are constant, twice.
EXTREMES = [(1.0, 300.0), (1e-6, 0.0), (1e15, 0.0), (0.0, 5.0), (0.0, 0.0)]
TILE = 16  # columns; with widest=TILE the kernel loops over wider rows


def kernel() -> ModuleType:
    return import_module("tpformer.kernels.norm.kernel")


# Widths start at 3, because dx of narrower rows is little but the rounding error of a cancellation (test_narrow_rows).
# Every run has the same cases, because a gradient that nearly cancels by chance has no meaningful relative error.
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 9), st.integers(3, 67), st.sampled_from(KINDS), st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(), st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_equals_float64_autograd(rows, columns, kind, dtype, with_bias, with_residual, seed):
    x, dy, dresidual = draw(seed, dtype, "cpu", *[(rows, columns)] * 3)
    norm = draw_norm(seed, columns, kind, dtype, with_bias=with_bias)
    check_norm(reference, x, norm, dy, dresidual if with_residual else None)


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_rows(kind):
    for columns in (1, 2):
        x, dy = draw(0, torch.float64, "cpu", *[(3, columns)] * 2)
        norm = draw_norm(0, columns, kind, torch.float64)
        y, statistics = norm_forward(x, norm)
        actual = [y, *(t for t in norm_backward(dy, x, statistics, norm) if t is not None)]
        assert_same(actual, by_autograd(formula, x, norm, dy, None, torch.float64, torch.float64), f"{columns} columns")


def test_rmsnorm_has_no_bias():
    x, dy = draw(0, torch.float32, "cpu", *[(3, 5)] * 2)
    norm = draw_norm(0, 5, "rmsnorm", torch.float32)
    unused = norm._replace(bias=torch.full((5,), float("nan")))
    check_norm(reference, x, norm, dy)
    y, statistics = norm_forward(x, unused)
    assert torch.equal(y, norm_forward(x, norm)[0]) and norm_backward(dy, x, statistics, unused)[2] is None


def finishes(rows: int, n: int, dtype: torch.dtype, norm: Norm, device: str = "cpu"):
    """Every choice of bias, dropout and residual before the norm."""
    bias, residual = draw(n, dtype, device, (n,), (rows, n))
    dropout = draw_dropout(rows, n, 0.4, device)
    for parts in itertools.product((None, bias), (None, dropout), (None, residual)):
        yield Finish(*parts, norm)


def check_finish_norm(module, x: Tensor, finish: Finish, dy: Tensor, dz: Tensor, **options) -> None:
    """Check that z follows from x, and that all of the norm follows from z as it is stored."""
    given = x.clone()  # x may be overwritten
    with poisoned_memory():
        z, y, statistics = module.finish_norm_forward(given, finish, **options)
    name = f"z {tuple(x.shape)} {x.dtype} {options} {[part is not None for part in finish]}"
    assert (z is given) or any(part is not None for part in finish[:3]), name
    check_finished(z, x, finish, name)
    if x.device.type == "cpu":  # y follows from z as it is stored, to the bit
        assert torch.equal(y, module.norm_forward(z, finish.norm, **options)[0]), name
    check_normalised(module, z, y, statistics, finish.norm, dy, dz, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_finish_norm(kind, dtype):
    x, dy, dz = draw(2, dtype, "cpu", *[(5, 12)] * 3)
    for finish in finishes(5, 12, dtype, draw_norm(2, 12, kind, dtype)):
        check_finish_norm(reference, x, finish, dy, dz)


def equals_float64_autograd() -> None:
    shapes = [((1, 3), (5, 7), (1, 33), (5, 33), (3, 64)), ((1, 33), (5, 33), (3, 64))]
    cases = [(*shape, {}) for shape in shapes[0]] + [(*shape, {"widest": TILE}) for shape in shapes[1]]
    for number, ((rows, n, options), kind) in enumerate(itertools.product(cases, KINDS)):
        dtype = (torch.float32, torch.float16)[number % 4 in (1, 2)]  # each kind takes turns
        x, dy, dresidual = draw(n, dtype, "cpu", *[(rows, n)] * 3)
        norm = draw_norm(n, n, kind, dtype, with_bias=rows > 1)
        check_norm(kernel(), x, norm, dy, dresidual if rows > 1 else None, **options)


def check_without_weight(module, **options) -> None:
    """Without weight and eps the bits are those with a weight of ones and float32's epsilon, without a dweight."""
    for (rows, n), kind in itertools.product(((3, 7), (3, 33), (0, 7)), KINDS):
        x, dy = draw(n, torch.float32, "cpu", *[(rows, n)] * 2)
        bare, given = Norm(kind, None, None, None), Norm(kind, torch.ones(n), None, torch.finfo(torch.float32).eps)
        bare = bare if kind == "rmsnorm" else bare._replace(eps=given.eps)
        with poisoned_memory():
            (y, statistics), (expected, _) = (module.norm_forward(x, norm, **options) for norm in (bare, given))
            dx, *parameters = module.norm_backward(dy, x, statistics, bare, **options)
            expected_dx, *_ = module.norm_backward(dy, x, statistics, given, **options)
        assert torch.equal(y, expected) and torch.equal(dx, expected_dx) and parameters == [None, None]


def test_without_weight() -> None:
    check_without_weight(reference)


def without_weight() -> None:
    check_without_weight(kernel())
    check_without_weight(kernel(), widest=TILE)


def finishes_and_normalises() -> None:
    wide, half = torch.float32, torch.float16
    looped = {"widest": TILE}
    for n, kind, dtype, options in (
        (33, "layernorm", wide, {}),
        (20, "rmsnorm", half, {}),
        (32, "layernorm", half, looped),
    ):
        x, dy, dz = draw(n, dtype, "cpu", *[(3, n)] * 3)
        for finish in finishes(3, n, dtype, draw_norm(n, n, kind, dtype)):
            check_finish_norm(kernel(), x, finish, dy, dz, **options)


def edges(module: ModuleType, looped: dict[str, int]) -> None:
    """Values are extreme; rows have NaNs between them, or elements that lie apart, or there are no rows."""
    for kind, (number, (scale, offset)) in itertools.product(KINDS, enumerate(EXTREMES)):
        for options in ({}, looped) if number in (0, 2, 3) else ({},):
            x, dy = draw(0, torch.float32, "cpu", *[(4, 33)] * 2)
            check_norm(module, x * scale + offset, draw_norm(0, 33, kind, torch.float32), dy, **options)
    for kind, options in (("layernorm", {}), ("rmsnorm", looped)):
        x, dy = draw(0, torch.float16, "cpu", *[(5, 33)] * 2)
        norm = draw_norm(0, 33, kind, torch.float16)
        check_norm(module, x * 1e4, norm, dy, **options)  # up to 4e4, whose squares are beyond float16
        apart = torch.full((3, 5, 40), float("nan"), dtype=torch.float16)[:, :, 2:35]
        apart[0], apart[1], apart[2] = x, dy, x
        check_norm(module, *apart[:1], norm, *apart[1:], **options)
        check_norm(module, x.t().contiguous().t(), norm, dy.t().contiguous().t(), x.t().contiguous().t(), **options)
        with poisoned_memory():
            y, statistics = module.norm_forward(x[:0], norm, **options)
            dx, *parameters = module.norm_backward(dy[:0], x[:0], statistics, norm, **options)
        assert y.shape == dx.shape == (0, 33)
        assert all(torch.equal(p, torch.zeros_like(p)) for p in parameters if p is not None)


def test_edges_of_the_reference() -> None:
    edges(reference, {})


def takes_extreme_values_and_any_strides() -> None:
    edges(kernel(), {"widest": TILE})
    # layernorm of one column gives the bias, and passes on the residual's gradient, exactly
    x, dy, dresidual = draw(3, torch.float32, "cpu", *[(4, 1)] * 3)
    dy = (8 * dy).round()  # integers sum exactly
    norm = draw_norm(3, 1, "layernorm", torch.float32)
    y, statistics = kernel().norm_forward(x, norm)
    dx, dweight, dbias = kernel().norm_backward(dy, x, statistics, norm, dresidual)
    assert torch.equal(y, norm.bias.expand(4, 1)) and torch.equal(dx, dresidual)
    assert torch.equal(dweight, torch.zeros(1)) and torch.equal(dbias, dy.sum(0))


def sums_over_all_programs() -> None:
    """Small integers sum exactly, however programs share the rows."""
    from tpformer.kernels.rows import sum_partials

    partials, outputs = torch.randint(-9, 9, (2, 130, 37)).float(), [torch.empty(37), torch.empty(37)]
    sum_partials(partials, outputs)
    assert torch.equal(torch.stack(outputs), partials.sum(1))
    for n, options in ((8, {}), (40, {"widest": TILE})):
        rows = 300 if n == 8 else 20  # more than a tile has: 128 rows of 8 columns, or 8 rows that are looped over
        x, dy = torch.randint(-2, 3, (2, rows, n)).float().unbind()
        statistics = (torch.ones(rows, 1), torch.full((rows, 1), 2.0))
        norm = Norm("layernorm", torch.ones(n), torch.ones(n), EPS)
        for programs in (1, 2, 100):
            with poisoned_memory():
                _, dweight, dbias = kernel().norm_backward(dy, x, statistics, norm, programs=programs, **options)
            assert torch.equal(dweight, (dy * (x - 1) * 2).sum(0)) and torch.equal(dbias, dy.sum(0)), (n, programs)


@pytest.mark.parametrize(
    "check",
    [
        equals_float64_autograd,
        without_weight,
        finishes_and_normalises,
        takes_extreme_values_and_any_strides,
        sums_over_all_programs,
    ],
    ids=lambda check: check.__name__,
)
def test_kernel(interpreted: WorkerPool, check) -> None:
    interpreted(1).run(check)


# Tiles have many rows, or one or two. Some widths are no power of two; one is the widest that stays in registers, some
# are wider; 5001 has no vector loads.
GPU_SHAPES = [(3, 5), (10000, 64), (8192, 4096), (1000, 5120), (300, 8192), (200, 12288), (50, 16384), (17, 32768),
              (100, 5001)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_on_gpu(shape, kind, dtype) -> None:
    n = shape[1]
    x, dy, dz, residual, bias = draw(n, dtype, "cuda", shape, shape, shape, shape, (n,))
    norm = draw_norm(n, n, kind, dtype, "cuda")
    check_norm(kernel(), x, norm, dy)
    check_finish_norm(kernel(), x, Finish(bias, draw_dropout(*shape, 0.1, "cuda"), residual, norm), dy, dz)
    y, statistics = kernel().norm_forward(x, norm)
    first, second = (kernel().norm_backward(dy, x, statistics, norm, dz) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [33, 4096, 32768])
def test_extreme_values_on_gpu(n, kind) -> None:
    for scale, offset in EXTREMES:
        x, dy = draw(0, torch.float32, "cuda", *[(200, n)] * 2)
        check_norm(kernel(), x * scale + offset, draw_norm(0, n, kind, torch.float32, "cuda"), dy)
    x, dy = draw(0, torch.float16, "cuda", *[(200, n)] * 2)
    check_norm(kernel(), x * 1e4, draw_norm(0, n, kind, torch.float16, "cuda"), dy)


@pytest.mark.gpu
def test_dropout_bits_on_gpu() -> None:
    """finish_norm_forward drops what the reference drops on a CPU, in whole blocks and in single elements."""
    for n in (4096, 20000, 5001):
        start = torch.arange(6) * n + BEYOND_32_BITS
        norm = draw_norm(0, n, "rmsnorm", torch.float32)
        x = torch.ones(6, n)
        expected = reference.finish_norm_forward(x.clone(), Finish(dropout=Dropout(start, HIGH_KEY, 0.3), norm=norm))
        finish = Finish(dropout=Dropout(start.cuda(), HIGH_KEY, 0.3), norm=norm._replace(weight=norm.weight.cuda()))
        z, _, _ = kernel().finish_norm_forward(x.cuda(), finish)
        assert torch.equal(z.cpu(), expected[0]), n

"""The reference and the kernel of LayerNorm and RMSNorm equal float64 autograd of their formulas, gradients too."""

import itertools
from functools import partial
from importlib import import_module
from types import ModuleType

import row_checks
import torch
from row_checks import FLOATS, LAYOUTS, OF_KERNEL, check_norm, draw, draw_dropout, draw_norm, everywhere
from testing import assert_identical, poisoned_memory

from tpformer.kernels.finish import Finish, Norm
from tpformer.kernels.norm import reference

kernel = partial(import_module, "tpformer.kernels.norm.kernel")
KINDS = ("layernorm", "rmsnorm")
# (scale, offset). The variance cancels; eps dominates; squares come near float32's largest; rows are constant, twice.
EXTREMES = [(1.0, 300.0), (1e-6, 0.0), (1e15, 0.0), (0.0, 5.0), (0.0, 0.0)]
LOOPED = {"widest": 16}  # columns of a tile, with which the kernel loops over wider rows


def ways(module: ModuleType, device: str) -> tuple[dict[str, int], ...]:
    """Options with which the kernel has rows in one tile, and with which it loops over the tiles of a row."""
    return ({},) if module is reference or device == "cuda" else ({}, LOOPED)


# widths start at 3, because dx of narrower rows is little but the rounding error of a cancellation
SHAPES = [(1, 3), (5, 7), (1, 33), (5, 33), (3, 64)]
# Tiles have many rows, or one or two. Some widths are no power of two; one is the widest that stays in registers, some
# are wider; 5001 has no vector loads.
GPU_SHAPES = [(3, 5), (10000, 64), (8192, 4096), (1000, 5120), (300, 8192), (200, 12288), (50, 16384), (17, 32768),
              (100, 5001)]  # fmt: skip


@everywhere("norm", FLOATS)
def test_equals_float64_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Of one row without a bias and a residual's gradient, of several with them. On a GPU repeats change no bit."""
    for (rows, n), kind in itertools.product(GPU_SHAPES if device == "cuda" else SHAPES, KINDS):
        x, dy, dresidual = draw(n, dtype, device, *[(rows, n)] * 3)
        norm = draw_norm(n, n, kind, dtype, device, with_bias=rows > 1)
        given = dresidual if rows > 1 else None
        # in float16 looped rows are those of the tests below
        for options in ways(module, device)[: 1 + (n > 16 and dtype == torch.float32)]:
            check_norm(module, x, norm, dy, given, **options)
        if device == "cuda":
            _, statistics = module.norm_forward(x, norm)
            first, second = (module.norm_backward(dy, x, statistics, norm, given) for _ in range(2))
            assert_identical(first, second)


@everywhere("norm", FLOATS)
def test_finishes_and_normalises(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Every choice of what comes before the norm; on a GPU, whose rows are many, all of it together."""
    for kind, shape in (("layernorm", (3, 33)), ("rmsnorm", (3, 20))):
        options = ways(module, device)[-1] if (kind, dtype) == ("layernorm", torch.float16) else {}
        for rows, n in GPU_SHAPES if device == "cuda" else [shape]:
            x, dy, dz, residual, bias = draw(n, dtype, device, *[(rows, n)] * 4, (n,))
            norm, dropout = draw_norm(n, n, kind, dtype, device), draw_dropout(rows, n, 0.4, device)
            choices = list(itertools.product((None, bias), (None, dropout), (None, residual)))
            for parts in choices[-1:] if device == "cuda" else choices:
                row_checks.check_finish_norm(module, x, Finish(*parts, norm), dy, dz, **options)


@everywhere("norm")
def test_without_weight(module: ModuleType, device: str) -> None:
    """Without weight and eps the bits are those with a weight of ones and float32's epsilon, without a dweight."""
    for (rows, n), kind, options in itertools.product(((3, 7), (3, 33), (0, 7)), KINDS, ways(module, device)):
        (x, dy), eps = draw(n, torch.float32, device, *[(rows, n)] * 2), torch.finfo(torch.float32).eps
        bare = Norm(kind, None, None, None if kind == "rmsnorm" else eps)
        given = bare._replace(weight=torch.ones(n, device=device), eps=eps)
        with poisoned_memory():
            (y, statistics), (expected, _) = (module.norm_forward(x, norm, **options) for norm in (bare, given))
            dx, *parameters = module.norm_backward(dy, x, statistics, bare, **options)
            expected_dx, *_ = module.norm_backward(dy, x, statistics, given, **options)
        assert torch.equal(y, expected) and torch.equal(dx, expected_dx) and parameters == [None, None]


@everywhere("norm")
def test_takes_extreme_values(module: ModuleType, device: str) -> None:
    rows, widths = (200, (33, 4096, 32768)) if device == "cuda" else (4, (33,))
    for kind, n, options in itertools.product(KINDS, widths, ways(module, device)):
        x, dy = draw(0, torch.float32, device, *[(rows, n)] * 2)
        for scale, offset in EXTREMES:
            check_norm(module, x * scale + offset, draw_norm(0, n, kind, torch.float32, device), dy, **options)
        x, dy = draw(0, torch.float16, device, *[(rows, n)] * 2)  # up to 4e4, whose squares are beyond float16
        check_norm(module, x * 1e4, draw_norm(0, n, kind, torch.float16, device), dy, **options)


@everywhere("norm")
def test_takes_any_layout(module: ModuleType, device: str) -> None:
    """Of the reference within rounding, as torch's sums depend on strides."""
    for kind, options in (("layernorm", {}), ("rmsnorm", ways(module, device)[-1])):
        x, dy = draw(0, torch.float16, device, *[(5, 33)] * 2)
        norm = draw_norm(0, 33, kind, torch.float16, device)
        for layout in LAYOUTS:
            check_norm(module, layout(x), norm, layout(dy), layout(x), **options)
        with poisoned_memory():
            y, statistics = module.norm_forward(x[:0], norm, **options)
            dx, *parameters = module.norm_backward(dy[:0], x[:0], statistics, norm, **options)
        assert y.shape == dx.shape == (0, 33)
        assert all(torch.equal(p, torch.zeros_like(p)) for p in parameters if p is not None)


@everywhere("norm", {"interpreter": (None,)})
def test_one_column_is_the_bias(module: ModuleType, device: str) -> None:
    """layernorm of one column gives the bias, and passes on the residual's gradient, exactly."""
    x, dy, dresidual = draw(3, torch.float32, device, *[(4, 1)] * 3)
    dy = (8 * dy).round()  # integers sum exactly
    norm = draw_norm(3, 1, "layernorm", torch.float32, device)
    y, statistics = module.norm_forward(x, norm)
    dx, dweight, dbias = module.norm_backward(dy, x, statistics, norm, dresidual)
    assert_identical([y, dx, dweight, dbias], [norm.bias.expand(4, 1), dresidual, torch.zeros_like(dweight), dy.sum(0)])


@everywhere("norm", OF_KERNEL)
def test_sums_over_all_programs(module: ModuleType, device: str) -> None:
    """Small integers sum exactly, however programs share the rows."""
    from tpformer.kernels.rows import sum_partials

    partials, outputs = torch.randint(-9, 9, (2, 130, 37), device=device).float(), torch.empty(2, 37, device=device)
    sum_partials(partials, list(outputs))
    assert torch.equal(outputs, partials.sum(1))
    for n, options in ((8, {}), (40, LOOPED)):
        rows = 300 if n == 8 else 20  # more than a tile has: 128 rows of 8 columns, or 8 rows that are looped over
        x, dy = torch.randint(-2, 3, (2, rows, n), device=device).float()
        statistics = (torch.ones(rows, 1, device=device), torch.full((rows, 1), 2.0, device=device))
        norm = Norm("layernorm", *torch.ones(2, n, device=device), 1e-5)
        for programs in (1, 2, 100):
            with poisoned_memory():
                _, dweight, dbias = module.norm_backward(dy, x, statistics, norm, programs=programs, **options)
            assert torch.equal(dweight, (dy * (x - 1) * 2).sum(0)) and torch.equal(dbias, dy.sum(0)), (n, programs)

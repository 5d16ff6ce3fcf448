"""Dropout keeps the promised fraction at the promised scale, by a mask that follows from the global index alone. The
kernel has the reference's bits. Bias, dropout and residual of a row-parallel linear are right in both directions."""

import itertools
import math
from importlib import import_module
from types import ModuleType

import pytest
import torch
from pool import WorkerPool
from row_checks import BEYOND_32_BITS, HIGH_KEY, check_finished, draw, draw_dropout, finished
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

from tpformer.kernels.dropout import reference
from tpformer.kernels.dropout.reference import dropout_apply, finish_forward
from tpformer.kernels.finish import NOTHING, Dropout, Finish
from tpformer.kernels.philox.reference import random_words

KEY = 12345


def kernel() -> ModuleType:
    return import_module("tpformer.kernels.dropout.kernel")


def starts(rows: int, width: int) -> Tensor:
    return torch.arange(rows) * width


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    rows, width = 64, 1001
    y = dropout_apply(torch.ones(rows, width, dtype=torch.float64), starts(rows, width), KEY, p)
    kept = y != 0
    n = rows * width
    assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - p)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_its_own_backward(dtype):
    x, dy = torch.randn(5, 9).to(dtype).requires_grad_(), torch.randn(5, 9).to(dtype)
    y = dropout_apply(x, starts(5, 9), KEY, 0.3)
    assert y.dtype == dtype
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dropout_apply(dy, starts(5, 9), KEY, 0.3))


def test_masks_of_different_keys_and_tokens_differ():
    x = torch.ones(2, 4096)
    one, other = (dropout_apply(x, starts(2, 4096), key, 0.5) != 0 for key in (KEY, KEY + 1))
    for a, b in ((one, other), (one[0], one[1])):
        # independent fair coins agree half the time
        assert abs(float((a == b).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


def check_finish(module, rows: int, n: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Check finish_forward and finish_backward with every choice of bias, dropout and residual."""
    x, residual, dz, bias = draw(n, dtype, device, (rows, n), (rows, n), (rows, n), (n,))
    dropout = draw_dropout(rows, n, 0.4, device)
    for parts in itertools.product((None, bias), (None, dropout), (None, residual)):
        finish, given = Finish(*parts), x.clone()  # the function may overwrite x
        name = f"{module.__name__} ({rows}, {n}) {dtype} {[part is not None for part in parts]}"
        with poisoned_memory():
            z = module.finish_forward(given, finish)
        assert (z is given) or finish != NOTHING, name
        check_finished(z, x, finish, f"z {name}")
        if parts[2] is None:
            check_finish_backward(module, dz, parts[1], parts[0] is not None, name)


def check_finish_backward(module, dz: Tensor, dropout: Dropout | None, bias: bool, name: str) -> None:
    with poisoned_memory():
        dx, dbias = module.finish_backward(dz, dropout, bias)
    if dropout is None:
        assert dx is dz, name
    else:
        # by the definition: words are compared as integers, and there is one multiplication
        keep = random_words(dropout.key, dropout.start, dz.shape[1]) >= round(dropout.p * 2**32)
        assert torch.equal(dx, torch.where(keep, dz * (1 / (1 - dropout.p)), 0)), f"dx {name}"
    assert (dbias is None) != bias, name
    if bias:  # the sum is of the stored values, after their rounding
        wide = dx.to(torch.promote_types(dx.dtype, torch.float32))
        assert_kernel_close(dbias, dx.double().sum(0), wide.sum(0).to(dx.dtype), f"dbias {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_finish(dtype):
    for rows, n in ((5, 12), (1, 7)):
        check_finish(reference, rows, n, dtype)


def test_wide_rows_are_finished_in_place():
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    finish = Finish(torch.randn(8), draw_dropout(3, 8, 0.4), residual)
    expected = finished(x, finish)
    z = finish_forward(x, finish)
    assert z.data_ptr() == x.data_ptr() and torch.equal(z, expected)


def finishes() -> None:
    for (rows, n), dtype in itertools.product(((1, 1), (5, 7), (3, 36)), (torch.float32, torch.float16)):
        check_finish(kernel(), rows, n, dtype)


# as an integer the first is 2**32, which keeps nothing, and the last is 0, which keeps everything
PROBABILITIES = (1 - 2.0**-34, 1 - 1e-9, 0.9, 0.5, 0.1, 1e-9, 0.0)


def check_bits(module, rows: int, widths: tuple[int, ...], device: str = "cpu") -> None:
    """The kernel drops what the reference drops on a CPU, bit for bit, even if it is infinite."""
    keys = itertools.cycle((0, 1, HIGH_KEY, 2**64 - 1))
    for n, p in itertools.product(widths, PROBABILITIES):
        key = next(keys)
        first = BEYOND_32_BITS if n % 4 == 0 else BEYOND_32_BITS + 3
        start = first + torch.arange(rows).flip(0) * n * 2**20  # rows in any order
        (x,) = draw(n, torch.float32, "cpu", (rows, n))
        expected = dropout_apply(x, start, key, p)
        x[expected == 0] = math.inf
        with poisoned_memory():
            y = module.dropout_apply(x.to(device), start.to(device), key, p)
        assert torch.equal(y.cpu(), expected), (n, key, p)
    words = random_words(HIGH_KEY, torch.zeros(1, dtype=torch.int64), widths[0])
    for limit in words[0].tolist():  # a word that equals the threshold is kept
        y = module.dropout_apply(
            torch.ones_like(words, dtype=torch.float32, device=device), torch.zeros_like(words[:, 0]).to(device),
            HIGH_KEY, limit / 2**32,
        )  # fmt: skip
        assert torch.equal(y.cpu() != 0, words >= limit), limit
    for dtype in (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float16,):
        (x,) = draw(0, dtype, "cpu", (rows, widths[0]))
        start = torch.arange(rows) * widths[0] * 4
        y = module.dropout_apply(x.to(device), start.to(device), KEY, 0.3)
        assert torch.equal(y.cpu(), dropout_apply(x, start, KEY, 0.3)), dtype


def has_the_bits_of_the_reference() -> None:
    check_bits(kernel(), 3, (5, 8, 36))
    # wider than a tile, and of two kinds of strides
    (x,) = draw(0, torch.float32, "cpu", (2, 1100))
    start = torch.arange(2) * 1100
    expected = dropout_apply(x, start, KEY, 0.3)
    apart = torch.full((2, 1200), float("nan"))[:, 7:1107].copy_(x)
    for given_ in (x, apart, x.t().contiguous().t()):
        assert torch.equal(kernel().dropout_apply(given_, start, KEY, 0.3), expected)


def sums_over_all_programs() -> None:
    """Small integers sum exactly, however programs share the rows; no rows sum to zero."""
    for rows, n in ((600, 5), (20, 300)):
        dz = torch.randint(-2, 3, (rows, n)).float()
        dropout = draw_dropout(rows, n, 0.5)
        for programs in (1, 2, 100):
            with poisoned_memory():
                dx, dbias = kernel().finish_backward(dz, dropout, True, programs=programs)
            assert torch.equal(dbias, dropout_apply(dz, *dropout).sum(0)), (rows, n, programs)
    # the sum is of stored values: 1 / 0.6 is 1707 / 1024 in float16
    dx, dbias = kernel().finish_backward(torch.ones(60, 64, dtype=torch.float16), draw_dropout(60, 64, 0.4), True)
    assert torch.equal(dbias, (dx != 0).sum(0).mul(1707 / 1024).half()) and float(dx.max()) == 1707 / 1024
    with poisoned_memory():
        dx, dbias = kernel().finish_backward(dz[:0], draw_dropout(0, 300, 0.5), True)
        z = kernel().finish_forward(dz[:0], Finish(bias=torch.ones(300)))
    assert dx.shape == z.shape == (0, 300) and torch.equal(dbias, torch.zeros(300))


@pytest.mark.parametrize(
    "check", [finishes, has_the_bits_of_the_reference, sums_over_all_programs], ids=lambda check: check.__name__
)
def test_kernel(interpreted: WorkerPool, check) -> None:
    interpreted(1).run(check)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (10000, 64), (8192, 4096), (17, 32768), (1000, 5120), (100, 5001)])
def test_on_gpu(shape, dtype) -> None:
    check_finish(kernel(), *shape, dtype, "cuda")
    (dz,) = draw(1, dtype, "cuda", shape)
    dropout = draw_dropout(*shape, 0.1, "cuda")
    (_, first), (_, second) = (kernel().finish_backward(dz, dropout, True) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_bits_on_gpu() -> None:
    check_bits(kernel(), 9, (5, 64, 1100, 4096, 5001), "cuda")

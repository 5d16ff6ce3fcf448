"""Dropout keeps what the words of the global index say, at the promised scale, so its rate is that of uniform words
(test_philox_kernel.py). Bias, dropout and residual of a row-parallel linear are right in both directions."""

import itertools
import math
from functools import partial
from importlib import import_module
from types import ModuleType

import row_checks
import torch
from row_checks import FLOATS, OF_KERNEL, check_finished, check_layouts, draw, draw_dropout, dropped, everywhere
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

from tpformer.kernels.dropout import reference
from tpformer.kernels.finish import NOTHING, Finish
from tpformer.kernels.philox.reference import random_words

kernel = partial(import_module, "tpformer.kernels.dropout.kernel")


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
        if module is reference and x.element_size() >= 4:  # wide rows are finished in place
            assert z.data_ptr() == given.data_ptr(), name
        check_finished(z, x, finish, f"z {name}")
        with poisoned_memory():
            dx, dbias = module.finish_backward(dz, finish.dropout, finish.bias is not None)
        assert dx is dz if finish.dropout is None else torch.equal(dx, dropped(dz, *finish.dropout)), f"dx {name}"
        if finish.bias is None:
            assert dbias is None, name
        else:  # the sum is of the stored values, after their rounding
            wide = dx.to(torch.promote_types(dx.dtype, torch.float32))
            assert_kernel_close(dbias, dx.double().sum(0), wide.sum(0).to(dx.dtype), f"dbias {name}")


@everywhere("dropout", FLOATS)
def test_finishes(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    shapes = ((10000, 64), (8192, 4096), (17, 32768), (1000, 5120), (100, 5001))
    for shape in ((1, 1), *(shapes if device == "cuda" else ((5, 7), (3, 36)))):
        check_finish(module, *shape, dtype, device)
        given = *draw(1, dtype, device, shape), draw_dropout(*shape, 0.1, device), True
        (_, first), (_, second) = (module.finish_backward(*given) for _ in range(2))
        assert torch.equal(first, second)


# as an integer the first is 2**32, which keeps nothing, and the last is 0, which keeps everything
PROBABILITIES = (1 - 2.0**-34, 1 - 1e-9, 0.9, 0.5, 0.1, 1e-9, 0.0)


@everywhere("dropout")
def test_drops_what_the_words_say(module: ModuleType, device: str) -> None:
    """Bit for bit by the definition on a CPU, even what is infinite. Widths are odd, whole blocks of four words, and
    wider than a tile."""
    rows, widths = (9, (5, 64, 1100, 4096, 5001)) if device == "cuda" else (3, (5, 8, 36, 1100))

    def applied(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
        with poisoned_memory():
            return module.dropout_apply(x.to(device), start.to(device), key, p).cpu()

    keys = itertools.cycle(row_checks.KEYS)
    for n, p in itertools.product(widths, PROBABILITIES):
        # in any order, and at a whole block or not
        start = row_checks.FAR + (3 if n % 4 else 0) + torch.arange(rows).flip(0) * n * 2**20
        given = start, next(keys), p
        (x,) = draw(n, torch.float32, "cpu", (rows, n))
        expected = dropped(x, *given)
        x[expected == 0] = math.inf
        assert torch.equal(applied(x, *given), expected), (n, *given)
    zero = torch.zeros(1, dtype=torch.int64)
    words = random_words(row_checks.KEYS[-1], zero, 5)
    for limit in words[0].tolist():  # a word that equals the threshold is kept
        assert torch.equal(applied(torch.ones(1, 5), zero, row_checks.KEYS[-1], limit / 2**32) != 0, words >= limit), (
            limit
        )


@everywhere("dropout")
def test_takes_any_layout(module: ModuleType, device: str) -> None:
    """Also rows wider than a tile, and narrow numbers."""
    for dtype, n in ((torch.float32, 1100), (torch.float16, 5)):
        (x,) = draw(0, dtype, device, (3, n))
        check_layouts(
            lambda x: module.dropout_apply(x, torch.arange(len(x), device=device) * 1100, row_checks.KEYS[-1], 0.3), x
        )


@everywhere("dropout", OF_KERNEL)
def test_sums_over_all_programs(module: ModuleType, device: str) -> None:
    """Small integers sum exactly, however programs share the rows; no rows sum to zero."""
    for rows, n in ((600, 5), (20, 300)):
        dz = torch.randint(-2, 3, (rows, n), device=device).float()
        dropout = draw_dropout(rows, n, 0.5, device)
        for programs in (1, 2, 100):
            with poisoned_memory():
                dx, dbias = module.finish_backward(dz, dropout, True, programs=programs)
            assert torch.equal(dbias, dropped(dz, *dropout).sum(0)), (rows, n, programs)
    # the sum is of stored values: 1 / 0.6 is 1707 / 1024 in float16
    ones = torch.ones(60, 64, dtype=torch.float16, device=device)
    dx, dbias = module.finish_backward(ones, draw_dropout(60, 64, 0.4, device), True)
    assert torch.equal(dbias, (dx != 0).sum(0).mul(1707 / 1024).half()) and float(dx.max()) == 1707 / 1024
    with poisoned_memory():
        dx, dbias = module.finish_backward(dz[:0], draw_dropout(0, 300, 0.5, device), True)
        z = module.finish_forward(dz[:0], Finish(bias=torch.ones(300, device=device)))
    assert dx.shape == z.shape == (0, 300) and torch.equal(dbias, torch.zeros(300, device=device))

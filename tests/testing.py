"""The three rules by which results are judged, tests that every rank runs, poisoned memory, and a small dataset.

Belongs here: what tests of several folders judge results with, and give to what they run. No test picks a tolerance:
- the same bits are promised: `assert_identical`;
- one formula in float64, its sums in another order or on several ranks: `assert_same`;
- a result in fewer bits: `assert_kernel_close`, beside what plain torch makes of the same inputs in that dtype.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tpformer.kernels.pack.format import GROUP

# How far two float64 results of one formula may be apart, relative to the largest number compared. Rounding errors are
# in proportion to eps: results farther apart than this would not have one right digit in float32.
ROUNDING = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


def assert_identical(actual: Any, expected: Any, what: str = "") -> None:
    """The same values bit for bit (a NaN equals a NaN), of the same shapes and dtypes and under the same names.

    Both may be tensors, numbers or other values, or dicts, lists and tuples of them; None equals None.
    """
    for name, x, y in _pairs(actual, expected, what):
        if isinstance(y, Tensor):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert x == y or (x != x and y != y), f"{name}: {x!r} for {y!r}"


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Two float64 results of one formula: they differ by rounding alone, at most ROUNDING * max|expected|.

    Nested as for `assert_identical`. What is not a floating-point number has to be equal. The maximum is that of all
    that is compared in this call, because a sum is rounded in proportion to its terms: a gradient that is truly zero
    is a sum of numbers as large as the other gradients.
    """
    pairs = _pairs(actual, expected, what)
    largest = max((_largest(y) for _, _, y in pairs), default=0.0)
    for name, x, y in pairs:
        if not (isinstance(y, float) or (isinstance(y, Tensor) and y.is_floating_point())):
            assert_identical(x, y, name)
            continue
        dtype = y.dtype if isinstance(y, Tensor) else torch.float64
        assert dtype == torch.float64, f"{name} is {dtype}: assert_kernel_close judges it, or assert_identical"
        x, y = (z if isinstance(z, Tensor) else torch.tensor(z, dtype=dtype) for z in (x, y))
        bound = ROUNDING * largest
        torch.testing.assert_close(x, y, rtol=0, atol=bound, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def fails_on_a_rank(check: Callable[[], object]) -> bool:
    """Whether an assertion of `check` fails on any rank of the world; equal on all. Collective, which a failing rank
    stays in."""
    try:
        check()
        failed = False
    except AssertionError:
        failed = True
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failed)
    return any(everywhere)


def differ_on_a_rank(actual: Any, expected: Any) -> bool:
    """Whether `assert_same` fails on any rank, as above."""
    return fails_on_a_rank(lambda: assert_same(actual, expected))


def _pairs(actual: Any, expected: Any, name: str) -> list[tuple[str, Any, Any]]:
    """(name, found, wanted) of every value in two structures that are nested alike."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{name}: only one side has {sorted(actual.keys() ^ expected.keys())}"
        parts = [(str(key), actual[key], value) for key, value in expected.items()]
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{name}: {len(actual)} for {len(expected)}"
        parts = [(str(index), *pair) for index, pair in enumerate(zip(actual, expected, strict=True))]
    else:
        detached = (x.detach() if isinstance(x, Tensor) else x for x in (actual, expected))
        return [(name, *detached)]
    return [pair for key, *values in parts for pair in _pairs(*values, f"{name} {key}".strip())]


def _largest(x: Any) -> float:
    """The largest finite magnitude of a floating-point tensor or number, 0 of all else."""
    if not (isinstance(x, float) or (isinstance(x, Tensor) and x.is_floating_point())):
        return 0.0
    finite = torch.as_tensor(x, dtype=torch.float64)
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def assert_kernel_close(actual: Tensor, oracle_fp64: Tensor, baseline_same_dtype: Tensor, name: str) -> None:
    """The error is at most 2 * (error of the baseline + eps(dtype) * max|oracle|), as maximum and as root mean square.

    baseline_same_dtype: what plain torch gets in actual's dtype, so that no tolerance is picked by hand. float64 has
    no better oracle than itself, so float64 results are judged by `assert_same`.
    """
    assert oracle_fp64.dtype == torch.float64, f"{name}: the oracle is {oracle_fp64.dtype}, not float64"
    assert actual.dtype == baseline_same_dtype.dtype, f"{name}: {actual.dtype}, baseline {baseline_same_dtype.dtype}"
    shape, *others = (tuple(x.shape) for x in (actual, oracle_fp64, baseline_same_dtype))
    assert others == [shape, shape], f"{name}: {shape}, oracle {others[0]}, baseline {others[1]}"
    assert bool(actual.isfinite().all()), f"{name}: {int((~actual.isfinite()).sum())} values are not finite"
    if actual.dtype == torch.float64:
        return assert_same(actual, oracle_fp64, name)
    if actual.numel() == 0:
        return None
    differences = (x.double() - oracle_fp64 for x in (actual, baseline_same_dtype))
    errors, baseline = (torch.stack([x.abs().max(), x.square().mean().sqrt()]) for x in differences)
    largest = oracle_fp64.abs().max()
    bounds = 2 * (baseline + torch.finfo(actual.dtype).eps * largest)
    found, bound, usual = (f"(max {x[0]:.3g}, rms {x[1]:.3g})" for x in (errors, bounds, baseline))
    assert (errors <= bounds).all(), (
        f"{name}: error {found} exceeds {bound} = 2 * (baseline {usual} + eps * {largest:.3g})"
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch fills new memory with NaNs or the largest integer, so that what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory, on by default
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def build_small_split(folder: Path, quiet: bool) -> tuple[Path, Path]:
    """In place of training.data.build_stdlib: a training and a validation dataset of 40 small programs."""
    from tpformer.training.data import build_split

    for index in range(40):
        (folder / f"{index}.txt").write_text(f"def f{index}(x):\n    return x * {index} + 1\n" * 9)
    build_split([folder], folder / "text", "bytes", 0.3, quiet=quiet)
    return folder / "text_train", folder / "text_valid"


def all_exponents(x: Tensor) -> Tensor:
    """bfloat16 values like x, with random bits in place of the first group, so that their packed form overflows."""
    bits = x.contiguous().view(torch.int16).clone()
    drawn = torch.randint(-(2**15), 2**15, (GROUP,), generator=torch.Generator().manual_seed(0)).short()
    bits.view(-1)[:GROUP] = drawn[: bits.numel()]
    return bits.view(torch.bfloat16)


def on_every_rank(*sizes: int, pool: str = "ranks") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of the function that follows: every rank of a world calls it, once for each of these sizes.

    pool: the fixture that has the worlds. What the function takes are fixtures or parameters, as of any test; ranks get
    copies of their values.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        asked = signature(function).parameters

        @pytest.mark.parametrize("size", sizes)
        def test(request: pytest.FixtureRequest, size: int, **given: Any) -> None:
            request.getfixturevalue(pool)(size).run(function, *(given[name] for name in asked))

        own = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("request", "size", *asked)]
        test.__signature__ = Signature(own)  # type: ignore[attr-defined]  # by which pytest finds fixtures
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.function = function  # type: ignore[attr-defined]
        function.__qualname__ = f"{function.__name__}.function"  # the name by which a worker finds it
        return test

    return decorate

"""The rule by which a low-precision result is accepted, poisoned memory, and a small dataset.

Belongs here: what tests of several folders judge results with, and give to what they run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tpformer.kernels.pack.format import GROUP


def _errors(x: Tensor, oracle: Tensor) -> Tensor:
    """The maximum and the root mean square of x - oracle."""
    difference = x.double() - oracle
    if difference.numel() == 0:
        return torch.zeros(2, dtype=torch.float64)
    return torch.stack([difference.abs().max(), difference.square().mean().sqrt()])


def assert_kernel_close(actual: Tensor, oracle_fp64: Tensor, baseline_same_dtype: Tensor, name: str) -> None:
    """The error is at most 2 * (error of the baseline + eps(dtype) * max|oracle|), as maximum and as root mean square.

    baseline_same_dtype: what plain torch gets in actual's dtype, so that no tolerance is picked by hand.
    """
    assert oracle_fp64.dtype == torch.float64, f"{name}: the oracle is {oracle_fp64.dtype}, not float64"
    assert actual.dtype == baseline_same_dtype.dtype, f"{name}: {actual.dtype}, baseline {baseline_same_dtype.dtype}"
    assert actual.shape == oracle_fp64.shape == baseline_same_dtype.shape, (
        f"{name}: {tuple(actual.shape)}, oracle {tuple(oracle_fp64.shape)}, baseline {tuple(baseline_same_dtype.shape)}"
    )
    assert bool(actual.isfinite().all()), f"{name}: {int((~actual.isfinite()).sum())} values are not finite"
    largest = oracle_fp64.abs().max() if oracle_fp64.numel() else torch.zeros(())
    errors, baseline = _errors(actual, oracle_fp64), _errors(baseline_same_dtype, oracle_fp64)
    bounds = 2 * (baseline + torch.finfo(actual.dtype).eps * largest)
    assert bool((errors <= bounds).all()), (
        f"{name}: error (max {errors[0]:.3g}, rms {errors[1]:.3g}) exceeds "
        f"(max {bounds[0]:.3g}, rms {bounds[1]:.3g}) = 2 * (baseline (max {baseline[0]:.3g}, rms {baseline[1]:.3g}) + "
        f"eps * {largest:.3g})"
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch fills new memory with NaNs, or with the largest integer, so that what a kernel does not write
    shows."""
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

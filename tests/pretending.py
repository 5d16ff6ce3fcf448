"""A pytest plugin for tests of kernels under checks.driver.pretend: no result is judged, so that a test makes all of
its calls. What Triton compiles for them then lies in its cache.

Belongs here: which questions are not asked, and what a kernel that did not run has to have left.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

CAPACITY, REPEAT = 1 << 24, 2  # of a virtual channel, and how often an operation is repeated: once for each parity


def unasked(*arguments: Any, **options: Any) -> bool:
    """In place of a comparison."""
    return True


@contextmanager
def unchanged() -> Iterator[None]:
    yield


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, str(Path(__file__).parent / "kernels"))
    import gemms
    import testing

    for name in ("assert_kernel_close", "assert_identical", "assert_same"):
        setattr(testing, name, unasked)
        if hasattr(gemms, name):
            setattr(gemms, name, unasked)
    gemms.compare = gemms.poison = unasked
    torch.equal = unasked
    torch.use_deterministic_algorithms = unasked
    testing.poisoned_memory = gemms.poisoned_memory = unchanged
    bump, run = gemms.bump, gemms.run_on_virtual_ranks

    def bumped(channel: Any) -> None:
        bump(channel)
        channel.epoch.add_(1)

    def smaller(*arguments: Any, **options: Any) -> None:
        small = {"capacity": CAPACITY, "repeat": REPEAT} if options.get("repeat", 1) > REPEAT else {}
        run(*arguments, **(options | small))

    gemms.bump, gemms.run_on_virtual_ranks = bumped, smaller

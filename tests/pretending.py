"""A pytest plugin for tests of kernels under checks.driver.pretend: no result is judged, so that a test makes all of
its calls. What Triton compiles for them then lies in its cache.

Belongs here: which questions are not asked, what a kernel that did not run has to have left, and which tests are left
out by name.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

CAPACITY, REPEAT = 1 << 24, 2  # of a virtual channel, and how often an operation is repeated: once for each parity
EPOCHS = 25  # of late ranks: one batch
# other processes have no pretence, and ranks of one GPU wait for one another's kernels
NO_RANKS = "ranks are processes that do not pretend"


def unasked(*arguments: Any, **options: Any) -> bool:
    """In place of a comparison."""
    return True


@contextmanager
def unchanged() -> Iterator[None]:
    yield


class Here:
    """In place of a pool of ranks: one that needs no process group is this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, size: int) -> "Here":
        if size > 1:
            pytest.skip(NO_RANKS)
        return self

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        try:
            return [function(*arguments)]
        except ValueError as error:
            if "process group" in str(error):
                pytest.skip(NO_RANKS)
            raise


def pytest_load_initial_conftests() -> None:
    """Before tests and fixtures import these by their names."""
    sys.path.insert(0, str(Path(__file__).parent / "kernels"))
    import pool

    pool.WorkerPool = Here  # type: ignore[assignment, misc]


def pytest_configure(config: pytest.Config) -> None:
    import channels
    import testing

    from tpformer.kernels import protocol

    bump = protocol.bump

    def bumped(channel: Any) -> None:
        bump(channel)
        channel.epoch.add_(1)

    protocol.bump = bumped
    channels.poison = unasked
    import gemms

    for name in ("assert_kernel_close", "assert_identical", "assert_same"):
        setattr(testing, name, unasked)
        if hasattr(gemms, name):
            setattr(gemms, name, unasked)
    gemms.compare = unasked
    gemms.captured = lambda operate: operate
    torch.equal = unasked
    torch.use_deterministic_algorithms = unasked
    testing.poisoned_memory = gemms.poisoned_memory = unchanged
    run = gemms.run_on_virtual_ranks
    parameters = inspect.signature(run)

    def smaller(*arguments: Any, **options: Any) -> None:
        given = parameters.bind(*arguments, **options).arguments
        small = {"capacity": CAPACITY, "repeat": REPEAT} if given.get("repeat", 1) > REPEAT else {}
        run(**(given | small))

    gemms.run_on_virtual_ranks = smaller


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if hasattr(item.module, "EPOCHS")}:
        module.EPOCHS = EPOCHS

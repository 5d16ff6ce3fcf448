"""What every test may use: the pool of ranks, and the rules by which `gpu` and `proof` tests run.

Belongs here: fixtures and pytest options shared by the whole suite. Fixtures of one topic stand beside its tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pool import WorkerPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """`ranks(n).run(function, *args)` runs a module-level function on n gloo ranks; returns the results by rank."""
    pool = WorkerPool()
    yield pool
    pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", action="store_true", help="run the tests marked `proof`, and only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    proof = config.getoption("--proof")
    deselected = [item for item in items if (item.get_closest_marker("proof") is not None) != proof]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in set(deselected)]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} gpu tests skipped: {NO_GPU}")


NO_GPU = "no CUDA device on this machine"

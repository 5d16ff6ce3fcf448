"""A pytest plugin for tests of kernels under checks.driver.pretend: no result is judged, so that a test makes all of
its calls. What Triton compiles for them then lies in its cache. An `assert` of a test or of its helpers asks nothing.

Belongs here: which questions are not asked, what a kernel that did not run has to have left, and which tests are left
out, with the reason.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from importlib.abc import FileLoader, SourceLoader
from importlib.machinery import SOURCE_SUFFIXES, FileFinder
from pathlib import Path
from typing import Any

import pytest
import torch

CAPACITY, REPEAT = 1 << 24, 2  # of a virtual channel, and how often an operation is repeated: once for each parity
EPOCHS = 25  # of late ranks: one batch
TESTS = Path(__file__).parent
NO_RANKS = "ranks are processes that do not pretend, and would wait for one another's kernels"


def unasked(*arguments: Any, **options: Any) -> bool:
    """In place of a comparison."""
    return True


class WithoutAsserts(ast.NodeTransformer):
    """In place of an assert, its condition: the calls in it are made."""

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        return ast.copy_location(ast.Expr(node.test), node)


class Unjudging(FileLoader, SourceLoader):
    """Imports a file without its asserts. pytest leaves it alone, and there is no bytecode that a judging run takes."""

    def source_to_code(self, data: Any, path: Any = "<string>") -> Any:  # type: ignore[override]
        return compile(WithoutAsserts().visit(ast.parse(data)), path, "exec", dont_inherit=True)


def finder(folder: str) -> FileFinder:
    """For sys.path_hooks: what finds files of tests/."""
    if not Path(folder).resolve().is_relative_to(TESTS):
        raise ImportError
    return FileFinder(folder, (Unjudging, SOURCE_SUFFIXES))


class Here(nullcontext):
    """In place of a pool of ranks: one that needs no process group is this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(self)

    def __call__(self, size: int) -> "Here":
        return self if size == 1 else pytest.skip(NO_RANKS)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        try:
            return [function(*arguments)]
        except (ValueError, AssertionError):
            if torch.distributed.is_initialized():
                raise
            pytest.skip(NO_RANKS)


def pytest_load_initial_conftests() -> None:
    """Import what follows of tests/ without asserts, and replace what tests and fixtures import by their names."""
    sys.path_hooks.insert(0, finder)
    sys.path_importer_cache.clear()
    sys.path.insert(0, str(TESTS / "kernels"))
    import channels
    import pool
    import testing

    from tpformer.kernels import protocol

    bump = protocol.bump

    def bumped(channel: Any) -> None:
        bump(channel)
        channel.epoch.add_(1)

    protocol.bump = bumped
    pool.WorkerPool = Here  # type: ignore[assignment, misc]
    channels.poison = torch.equal = torch.use_deterministic_algorithms = unasked
    testing.assert_kernel_close = testing.assert_identical = testing.assert_same = unasked
    testing.poisoned_memory = contextmanager(lambda: (yield))  # type: ignore[arg-type, misc]  # it also decorates


def pytest_configure(config: pytest.Config) -> None:
    import gemms

    gemms.compare, gemms.captured = unasked, lambda operate: operate
    run, parameters = gemms.run_on_virtual_ranks, inspect.signature(gemms.run_on_virtual_ranks)

    def smaller(*arguments: Any, **options: Any) -> None:
        given = parameters.bind(*arguments, **options).arguments
        small = {"capacity": CAPACITY, "repeat": REPEAT} if given.get("repeat", 1) > REPEAT else {}
        run(**(given | small))

    gemms.run_on_virtual_ranks = smaller


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(item.module, "EPOCHS"):
            item.module.EPOCHS = EPOCHS
        if item.name.startswith("test_packed_documents_equal"):
            item.add_marker(pytest.mark.skip(reason="torch's attention takes a GPU, and no kernel of ours"))

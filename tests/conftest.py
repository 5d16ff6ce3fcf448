"""What every test may use: the pool of ranks, and the rules by which `gpu` and `proof` tests run.

Belongs here: fixtures and pytest options of the whole suite. Fixtures of one topic are beside its tests.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from commands import Commands
from pool import WorkerPool, World
from turns import TURNS, of_another_turn
from versions import why_too_old

# this process, ranks and commands have as many, so that the order of their sums is one
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# a property has the same examples on every machine, and however long they take
if find_spec("hypothesis"):
    import hypothesis

    hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("suite")
# what every rank of a test of other libraries' models would import, in six seconds, for each size of world
HUGGING_FACE = ("transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "accelerate")
# modules that a pool with the interpreter imports: a kernel is for the interpreter or a GPU from its import on
KERNELS = ("tpformer.kernels.norm.kernel", "tpformer.kernels.cross_entropy.kernel")
INTERPRETED = ("interpreter", "tpformer.ops.transports.fused", *KERNELS)


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """`ranks(n).run(function, *args)` runs a module-level function on n gloo ranks; it returns all results in order."""
    with WorkerPool(preload=HUGGING_FACE) as pool:
        yield pool


@pytest.fixture(scope="session")
def commands(ranks: WorkerPool) -> Commands:
    """`commands.run("pretrain", "run.toml")` runs a `tpformer` command, and returns (exit code, stdout, stderr)."""
    return Commands(ranks.server)


@pytest.fixture(scope="session")
def done(commands: Commands) -> Callable[..., str]:
    """done("export", ...): what the command prints, which has to succeed."""

    def done(*arguments: str, **environment: str) -> str:
        code, out, err = commands.run(*arguments, **environment)
        assert code == 0, out + err
        return out

    return done


@pytest.fixture(scope="session")
def refused(commands: Commands) -> Callable[..., str]:
    """refused("export", ...): how the command says that it was given a mistake."""

    def refused(*arguments: str) -> str:
        code, out, err = commands.run(*arguments)
        assert code == 2 and "Traceback" not in err, out + err
        return err

    return refused


@pytest.fixture
def forked(ranks: WorkerPool) -> Iterator[None]:
    """Within, multiprocessing's fork server is the pool's, which has imported everything."""
    with ranks.server.serving():
        yield


@pytest.fixture(scope="session")
def interpreted() -> Iterator[WorkerPool]:
    """Like `ranks`, but Triton kernels run in Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    import triton

    versions = [module.__version__ for module in (triton, numpy)]
    of_triton, of_numpy = ([int(part) for part in version.split(".")[:2]] for version in versions)
    if of_triton < [3, 7] and of_numpy >= [2, 4]:
        pytest.skip("the interpreter of triton {} breaks on numpy {}: it needs numpy < 2.4".format(*versions))
    with WorkerPool({"TRITON_INTERPRET": "1"}, INTERPRETED) as pool:
        yield pool


@pytest.fixture(scope="session")
def one_gpu() -> Iterator[WorkerPool]:
    """Like `ranks`, for tests marked `gpu`: all ranks use cuda:0 and map one another's memory there."""
    with WorkerPool({"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}) as pool:
        yield pool


@pytest.fixture(scope="session")
def gpus() -> Iterator[Callable[[int], World]]:
    """Like `ranks`, for tests marked `nvlink`: one rank on each GPU."""

    def world(size: int) -> World:
        if size > torch.cuda.device_count():
            pytest.skip(f"{size} CUDA devices needed, {torch.cuda.device_count()} found")
        return pool(size)

    with WorkerPool() as pool:
        yield world


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--proof", action="store_true", help="run the tests marked `proof`, and only those")
    turns = [*map(str, range(TURNS)), "all"]
    parser.addoption(
        "--turn", choices=turns, default="all", help="of the tests marked `rotates`, run those of this turn alone"
    )


def left_out(item: pytest.Item) -> bool:
    """Whether the options given leave a test to another command."""
    proof = item.get_closest_marker("proof") is not None
    return of_another_turn(item, item.config.getoption("--turn")) or proof != item.config.getoption("--proof")


# tests that have begun and not ended, of all workers
running: set[str] = set()


def pytest_runtest_logstart(nodeid: str) -> None:
    running.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    running.discard(nodeid)


def pytest_keyboard_interrupt() -> None:
    """Say what did not end, since a signal is what ends a run that takes too long."""
    print(f"\ninterrupted: {', '.join(sorted(running)) or 'no test was running'}")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported is never garbage: nothing looks for any while tests are found, nor among that later."""
    gc.disable()
    yield
    import_module("frozen")
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        missing = [text for marker, (n, text) in DEVICES.items() if devices < n and item.get_closest_marker(marker)]
        for reason in filter(None, [*missing, why_too_old(item)]):
            item.add_marker(pytest.mark.skip(reason=reason))
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), places
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    for marker, (_, reason) in DEVICES.items():
        number = sum(reason in str(report.longrepr) for report in reports)
        if number:
            terminalreporter.write_line(f"{number} {marker} tests skipped: {reason}")


TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent))  # the repository is not installed as a whole
# Files that take minutes, in `make test` or in the proofs. They begin first: one that begins last keeps one worker busy
# and leaves the others idle. The Makefile keeps xdist from beginning with files of many tests, most of which are short.
LONGEST = (
    "driver/test_driver.py", "layers/test_compile_layer.py", "parallel/test_split_backward.py",
    "kernels/test_all_gather_matmul_kernel.py", "test_readme.py", "inference/test_chat.py",
    "inference/test_evaluate.py", "parallel/test_zero_bytes.py", "layers/test_habits.py",
    "in_place/test_verify_in_place.py", "in_place/test_language_models.py",
    "kernels/test_matmul_reduce_scatter_kernel.py", "ops/test_fused_op.py", "inference/test_generate.py",
    "inference/test_tasks.py", "weights/test_round_trip.py",
)  # fmt: skip

# marker -> (how many CUDA devices its tests need, why they are skipped)
DEVICES = {"gpu": (1, "no CUDA device on this machine"), "nvlink": (2, "fewer than two CUDA devices on this machine")}

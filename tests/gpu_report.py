"""A pytest plugin for `make gpu` and `make nvlink`: it says what ran, on what, and how it ended, in one JSON file.

    PYTHONPATH=.:tests python3 -m pytest -p gpu_report -m gpu --part 1/6

The file is written whenever a test begins or ends, so that it holds what ran when a machine is taken away. Calls with
the same code on the same machine add to it, which makes one file of several parts; otherwise it is begun anew.
The plugin needs only pytest and torch. A test file without a test of the marker given by -m is not imported, and one
that needs a package which is not installed is skipped.
"""

import datetime
import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.compiled import counting
from harness.provenance import ROOT, commit, digest, place, versions, write_json

NOT_RUN, UNFINISHED = "not run", "did not end"
# of a test's phases, the one that is last in this order counts
OUTCOMES = (NOT_RUN, UNFINISHED, "passed", "skipped", "failed")
TIMEOUTS = util.find_spec("pytest_timeout") is not None
SOURCES = tuple(f"{folder}/**/*.py" for folder in ("bench", "checks", "harness", "kernels", "tests", "tpformer"))
STAND_INS = Path(__file__).parent / "stand_ins"
# what a GPU is needed for most comes first
WORTH = (
    "kernels/test_virtual_ranks_gpu.py", "ops/test_fused_op.py", "distributed/test_kernel_workspace.py",
    "distributed/test_symmetric.py", "kernels/test_all_gather_matmul_kernel.py",
    "kernels/test_matmul_reduce_scatter_kernel.py", "kernels/test_matmul_all_reduce_kernel.py",
    "kernels/test_matmul_kernel.py", "training/test_run_gpu.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=part, help="run one of so many parts, as 1/6; all take about as long")
    where = "bench/results/<the GPU's name>/<marker>_tests.json; of a changed tree, build/results/..."
    parser.addoption("--report", help=f"where the report goes ({where})")
    parser.addoption("--times", type=int, default=1, help="run each test so many times, under as many names")
    if not TIMEOUTS:
        parser.addini("timeout", "seconds of a test; without pytest-timeout nothing ends one")


def part(text: str) -> tuple[int, int]:
    """(which, of how many) of an option's text."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is no part such as 1/6")
    return int(match[1]), int(match[2])


def pytest_configure(config: pytest.Config) -> None:
    config.option.continue_on_collection_errors = True
    if not TIMEOUTS:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
    if util.find_spec("hypothesis") is None:  # ranks import test files, too
        sys.path.append(str(STAND_INS))
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(STAND_INS)])
    config.pluginmanager.register(Report(config), "gpu-report-of-this-run")


time_of_many = pytest.fixture(lambda request: request.param, name="time_of_many")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.option.times > 1:
        metafunc.fixturenames.append("time_of_many")
        metafunc.parametrize("time_of_many", range(metafunc.config.option.times), indirect=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tests = collection_path.name.startswith("test_") and collection_path.is_file()
    return True if tests and not may_have(collection_path.read_text(), config.option.markexpr) else None


def may_have(text: str, marker: str) -> bool:
    """Whether a test file may have tests of a marker: it names the marker, or what in tests/kernels gives it."""
    return any(sign in text for sign in (f"mark.{marker}", "everywhere(", "on_gpu("))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return Module.from_parent(parent, path=module_path)


class Module(pytest.Module):
    """A test file, which is skipped if it needs a package of the project's that is not installed."""

    def collect(self) -> Any:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None) or ""
            if isinstance(error.__cause__, ModuleNotFoundError) and missing.partition(".")[0] in dependencies():
                pytest.skip(f"{missing} is not installed", allow_module_level=True)
            raise


def dependencies() -> set[str]:
    """The importable names of all packages that the project or its tests may use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[^\w-]", text)[0].replace("-", "_") for texts in lists for text in texts}


class Report:
    """Every test of the marker with its outcome, and the file that says so."""

    def __init__(self, config: pytest.Config) -> None:
        self.marker: str = config.option.markexpr
        self.part: tuple[int, int] | None = config.option.part
        self.path = None if config.option.collectonly else self.place(config.option.report)
        self.head = head(self.marker)
        self.kernels = counting() if torch.cuda.is_available() else Counter()
        self.tests: dict[str, dict[str, Any]] = {}
        self.parts: int | None = None
        self.seconds: dict[str, float] = {}  # what tests took when they ran last, perhaps at another commit
        if self.path is not None and self.path.exists():
            self.continue_from(json.loads(self.path.read_text()))

    def place(self, asked_for: str | None) -> Path | None:
        """Where the report goes; None without a GPU to report about."""
        if asked_for is not None:
            return Path(asked_for)
        return place("cuda") / f"{self.marker}_tests.json" if torch.cuda.is_available() else None

    def continue_from(self, old: Mapping[str, Any]) -> None:
        """Take what an earlier call has written: all of it if it was of the same code here, else only the times."""
        self.seconds = {entry["test"]: entry["seconds"] for entry in old["tests"] if entry["outcome"] != NOT_RUN}
        if all(old.get(key) == value for key, value in self.head.items()):
            self.parts = old["parts"]
            self.tests = {entry["test"]: entry for entry in old["tests"] if "::" in entry["test"]}

    @pytest.hookimpl(trylast=True)  # after the marker and the options have chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Order the tests, and leave those of the part. What has not run yet comes first, should a part begin again."""
        places = {f"tests/{file}": place for place, file in enumerate(WORTH)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(WORTH)))
        for item in items:
            self.tests.setdefault(item.nodeid, {"test": item.nodeid, "outcome": NOT_RUN, "seconds": 0.0})
        if self.part is not None:
            number, parts = self.part
            if self.parts != parts or any("part" not in self.tests[item.nodeid] for item in items):
                self.parts, tests = parts, [item.nodeid for item in items]
                for test, of_test in zip(tests, divided(tests, parts, self.seconds), strict=True):
                    self.tests[test]["part"] = of_test
            chosen = [item for item in items if self.tests[item.nodeid]["part"] == number]
            config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
            items[:] = sorted(chosen, key=lambda item: self.tests[item.nodeid]["outcome"] != NOT_RUN)
        self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # the file cannot be imported, or skips itself as a whole
            self.tests[report.nodeid] = {
                "test": report.nodeid, "outcome": report.outcome, "seconds": 0.0, "reason": cause(report)
            }  # fmt: skip

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] |= {"outcome": UNFINISHED, "seconds": 0.0}
        self.tests[nodeid].pop("reason", None)
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.tests[report.nodeid]
        entry["seconds"] = round(entry["seconds"] + report.duration, 2)
        if report.when != "setup" or not report.passed:
            entry["outcome"] = max(entry["outcome"], report.outcome, key=OUTCOMES.index)
        if not report.passed:
            entry.setdefault("reason", cause(report))

    def pytest_runtest_logfinish(self) -> None:
        self.write()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = in_words(counted(list(self.tests.values())))
        where = f"written: {self.path}" if self.path else "no CUDA device, so no report is written"
        terminalreporter.write_line(f"{self.marker} tests: {counts}; {where}")

    def write(self) -> None:
        """Write the file in one move, so that there is a whole one at any time."""
        if self.path is not None:
            write_json(self.path, content(self.head, list(self.tests.values()), self.parts, self.kernels))


def head(marker: str) -> dict[str, Any]:
    """What reports of the same code, on the same machine, have in common."""
    of_code = {"sources": digest(SOURCES), "versions": versions("torch", "triton", "numpy", "pytest")}
    return {"schema": 2, "marker": marker, "device": device(), **commit(), **of_code}


def content(
    of: Mapping[str, Any], tests: Sequence[Mapping[str, Any]], parts: int | None, kernels: Mapping[str, int]
) -> dict[str, Any]:
    """A report of these tests, with this head; kernels: how many were compiled, and how many were in Triton's cache."""
    return {
        **of, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "parts": parts, "kernels": dict(kernels),
        "counts": counted(tests),
        "seconds": round(sum(test["seconds"] for test in tests), 1), "tests": list(tests),
    }  # fmt: skip


def counted(tests: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many tests ended how."""
    return dict(sorted(Counter(test["outcome"] for test in tests).items()))


def in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "none"


def divided(tests: Sequence[str], parts: int, seconds: Mapping[str, float]) -> list[int]:
    """The part of each test, from 1 on: consecutive tests, so that all parts take about as long. A test without a known
    time counts like the average one."""
    known = [seconds[test] for test in tests if test in seconds]
    usual = sum(known) / len(known) if known else 1.0
    weights = [max(seconds.get(test, usual), 0.01) for test in tests]
    middles = [sum(weights[:i]) + weights[i] / 2 for i in range(len(weights))]
    return [min(parts, 1 + int(parts * middle / sum(weights))) for middle in middles]


def cause(report: Any) -> str:
    """The reason of a skip or the last line of an error: short, and the same in whatever folder this clone is."""
    if isinstance(report.longrepr, tuple):  # (file, line, reason)
        text = report.longrepr[2].removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(report.longrepr).strip().splitlines()[-1] if crash is None else crash.message
    lines = text.replace(str(ROOT) + os.sep, "").strip().splitlines()
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))[:400]


def device() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(0)
    return {
        "name": gpu.name, "count": torch.cuda.device_count(), "capability": f"{gpu.major}.{gpu.minor}",
        "processors": gpu.multi_processor_count, "memory_gib": round(gpu.total_memory / 2**30),
        "cuda": torch.version.cuda,
    }  # fmt: skip

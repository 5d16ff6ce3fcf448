"""A pytest plugin for `make gpu` and `make nvlink`: it writes what ran, on what, and how it ended, to one JSON file.

    PYTHONPATH=.:tests python3 -m pytest -p gpu_report -m gpu

It needs only pytest and torch. It does not import a test file without a test of the marker given by -m, so that a
package that is missing on a GPU machine costs no test that does without it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections import Counter
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
PACKAGES = ("torch", "triton", "numpy", "pytest")
UNFINISHED = "did not end"
OUTCOMES = (UNFINISHED, "passed", "skipped", "failed")  # of a test's phases, the one that is last in this order counts
TIMEOUTS = util.find_spec("pytest_timeout") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report",
        help="where the report goes (bench/results/<the GPU's name>/<marker>_tests.json; of a changed tree, build/)",
    )
    if not TIMEOUTS:
        parser.addini("timeout", "seconds of a test; without pytest-timeout nothing ends one")


def pytest_configure(config: pytest.Config) -> None:
    if not TIMEOUTS:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
    config.pluginmanager.register(Report(config), "gpu-report-of-this-run")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.name.startswith("test_") or not collection_path.is_file():
        return None
    return None if f"mark.{config.option.markexpr}" in collection_path.read_text() else True


class Report:
    """Collects each test's outcome, and writes them all when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.marker: str = config.option.markexpr
        self.asked_for: str | None = config.option.report
        self.tests: dict[str, dict[str, Any]] = {}
        self.written: Path | None = None

    def add(self, test: str, outcome: str, seconds: float, reason: str = "") -> None:
        entry = self.tests.setdefault(test, {"test": test, "outcome": outcome, "seconds": 0.0})
        entry["seconds"] = round(entry["seconds"] + seconds, 2)
        entry["outcome"] = max(entry["outcome"], outcome, key=OUTCOMES.index)
        if reason:
            entry.setdefault("reason", shown(reason))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":  # the file cannot be imported, or skips itself as a whole
            self.add(report.nodeid, report.outcome, 0.0, cause(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = UNFINISHED if report.when == "setup" and report.passed else report.outcome
        self.add(report.nodeid, outcome, report.duration, "" if report.passed else cause(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly or (path := self.path()) is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content(), indent=1) + "\n")
        self.written = path

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in self.counts().items())
        where = f"written: {self.written}" if self.written else "no CUDA device, so no report is written"
        terminalreporter.write_line(f"{self.marker} tests: {counts or 'none'}; {where}")

    def path(self) -> Path | None:
        """Where the report goes; None without a GPU to report about."""
        if self.asked_for is not None:
            return Path(self.asked_for)
        if not torch.cuda.is_available():
            return None
        from bench.runner import commit, device_directory

        name = f"{self.marker}_tests.json"
        if commit()["dirty"] is not False:  # it is no result of a commit
            return ROOT / "build" / name
        return ROOT / "bench" / "results" / device_directory("cuda") / name

    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(entry["outcome"] for entry in self.tests.values()).items()))

    def content(self) -> dict[str, Any]:
        from bench.runner import commit

        return {
            "schema": SCHEMA,
            "marker": self.marker,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": device(),
            **commit(),
            "versions": versions(),
            "counts": self.counts(),
            "seconds": round(sum(entry["seconds"] for entry in self.tests.values()), 1),
            "tests": list(self.tests.values()),
        }


def cause(report: Any) -> str:
    """The reason of a skip, or the last line of an error."""
    if isinstance(report.longrepr, tuple):  # (file, line, reason)
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr).strip().splitlines()[-1] if crash is None else crash.message


def shown(reason: str) -> str:
    """A short form, which is the same in whatever folder this clone is."""
    lines = reason.replace(str(ROOT) + os.sep, "").strip().splitlines()
    text = lines[0] if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"
    return text[:400]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def device() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda,
    }

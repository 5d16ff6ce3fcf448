"""Runs the tests that need a GPU in many processes at a time, as most of them wait for a compiler; one report of all.

    PYTHONPATH=.:tests python3 tests/gpu_run.py --into build/gpu_tests.json --fused

Each process has a file, or a part of one, and a report of its own. The same call on the same code goes on with what has
not ended. However it ends, the reports are made one. The exit code is 1 if a test failed, and 2 if one did not end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gpu_report import NOT_RUN, UNFINISHED, WORTH, content, counted, head, in_words, may_have

from harness.provenance import RESULTS, ROOT, write_json

MARKER = "gpu"
PRETENDING = ("-m", "checks.driver.pretend")
UNJUDGED = ("-p", "pretending")
PART_SECONDS = 30  # of a process's tests, by an earlier report
TEST_SECONDS = 100  # after which a test is ended, where pytest-timeout is installed
COMPILING_SECONDS = 900  # the same where each kernel has to be compiled, on a few cores
CORES = os.cpu_count() or 1


class Job(NamedTuple):
    """A part of a file's tests."""

    file: str
    part: int
    parts: int

    def report(self, folder: Path) -> Path:
        return folder / f"{Path(self.file).stem}_{self.part}.json"


def files(fused: bool) -> list[str]:
    """The files with tests of the marker: those of communicating kernels, or all others."""
    worth = [f"tests/{name}" for name in WORTH]
    if fused:
        return worth
    found = (path for path in sorted((ROOT / "tests").glob("*/**/test_*.py")) if may_have(path.read_text(), MARKER))
    return [name for name in (str(path.relative_to(ROOT)) for path in found) if name not in worth]


def seconds_of_files() -> Counter[str]:
    """What each file's tests took when they were last reported, on whatever GPU they took longest."""
    found: Counter[str] = Counter()
    for path in RESULTS.glob("*/*tests*.json"):
        of_report: Counter[str] = Counter()
        for test in json.loads(path.read_text())["tests"]:
            of_report[test["test"].partition("::")[0]] += test["seconds"]
        found |= of_report
    return found


def jobs(listed: list[str], folder: Path) -> list[Job]:
    """The parts of these files, the longest files first. They are the same in every call on the same code, so that
    reports that lie in the folder fit; those of other code are removed."""
    path, own = folder / "plan", head(MARKER)
    old = json.loads(path.read_text()) if path.exists() else {}
    if old.get("head") != own:
        shutil.rmtree(folder, ignore_errors=True)
        old = {"head": own, "parts": {}}
    took = seconds_of_files()
    planned = {file: 1 + int(took[file] / PART_SECONDS) for file in listed} | old["parts"]
    write_json(path, {"head": own, "parts": planned})
    longest = sorted(listed, key=lambda file: -took[file])
    return [Job(file, part, planned[file]) for file in longest for part in range(1, planned[file] + 1)]


def read(report: Path) -> dict[str, Any]:
    """What a process has reported so far."""
    return json.loads(report.read_text()) if report.exists() else {"tests": []}


def tests_of(report: Path) -> list[dict[str, Any]]:
    return read(report)["tests"]


def ended(report: Path, part: int) -> bool:
    """Whether all of a part's tests have passed, or were skipped."""
    own = [test for test in tests_of(report) if test.get("part", part) == part]
    return bool(own) and {test["outcome"] for test in own} <= {"passed", "skipped"}


def run(job: Job, folder: Path, pretends: bool) -> None:
    """Run a job, unless an earlier call has."""
    report = job.report(folder)
    if ended(report, job.part):
        return
    seconds = COMPILING_SECONDS if pretends else TEST_SECONDS
    command = [
        sys.executable, *(PRETENDING if pretends else ()), "-m", "pytest", *(UNJUDGED if pretends else ()),
        "-q", "-p", "gpu_report", "-p", "no:cacheprovider", "--override-ini",
        f"timeout={seconds}", "-m", MARKER, job.file, "--part", f"{job.part}/{job.parts}", "--report", str(report),
    ]  # fmt: skip
    with report.with_suffix(".txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{job.file} {job.part}/{job.parts}: exit code {code}", flush=True)


def merged(reports: list[Path]) -> list[dict[str, Any]]:
    """Every test once: as it ended, wherever it ran."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        for test in tests_of(report):
            if test["outcome"] != NOT_RUN or test["test"] not in found:
                found[test["test"]] = {name: value for name, value in test.items() if name != "part"}
    return list(found.values())


def failures(tests: list[dict[str, Any]]) -> Iterator[str]:
    for test in tests:
        if test["outcome"] not in ("passed", "skipped"):
            yield f"{test['outcome']}: {test['test']} {test.get('reason', '')}"[:300]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files; without them a group of all")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fused", action="store_true", help="those of communicating kernels, and of what they need")
    group.add_argument("--others", action="store_true", help="all others")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE", help="the report")
    parser.add_argument("--processes", type=int, help="how many at a time; most of the cores, with --pretend all")
    parser.add_argument("--pretend", action="store_true", help="without a GPU: what the tests find then means nothing")
    options = parser.parse_args(arguments)
    groups = [fused for fused in (True, False) if not (options.others if fused else options.fused)]
    every = options.files or [file for fused in groups for file in files(fused)]
    folder = options.into.parent / "logs" / options.into.stem
    listed = jobs(every, folder)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # its processes, of the same group, get one of their own
    pool = ThreadPoolExecutor(options.processes or (CORES if options.pretend else max(1, CORES - 2)))
    try:
        list(pool.map(lambda job: run(job, folder, options.pretend), listed))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        tests = merged([job.report(folder) for job in listed])
        kernels = sum((Counter(read(job.report(folder)).get("kernels", {})) for job in listed), Counter[str]())
        write_json(options.into, content(head(MARKER), tests, None, kernels))
        print(*failures(tests), f"{MARKER} tests: {in_words(counted(tests))}", sep="\n", flush=True)
    outcomes = {test["outcome"] for test in tests}
    return 2 if outcomes & {NOT_RUN, UNFINISHED} or not tests else 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""tests/gpu_run.py runs a group of tests in several processes, goes on where it was ended, and makes one report."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import gpu_run
import pytest
from gpu_run import NOT_RUN, Job, files, jobs, main, merged
from test_gpu_report import NO_PLUGINS

TESTS = Path(__file__).parent
GPU = "import os, pathlib, pytest\npytestmark = pytest.mark.gpu\n"
GOOD = "def test_good(): pass\ndef test_absent(): pytest.skip('not today')\n"
BAD = "def test_bad(): assert 1 == 2, 'unequal'\n"
COUNTED = "def test_counted():\n    with open(pathlib.Path(__file__).with_name('runs'), 'a') as file: file.write('x')\n"
started = subprocess.run
FORKING = threading.Lock()  # filelock, which torch imports, refuses a fork while another thread forks
KILLED = "def test_killed():\n    if not pathlib.Path(__file__).with_name('ready').exists(): os.kill(os.getpid(), 9)\n"


def forked(command: list[str], **options) -> subprocess.CompletedProcess:
    """In place of a new Python, which would import torch: a fork of this process, which has."""
    if "pytest" not in command:
        return started(command, **options)
    with FORKING:
        pid = os.fork()
    if pid == 0:
        os.dup2(options["stdout"].fileno(), 1)
        os._exit(int(pytest.main(command[3:])))
    return subprocess.CompletedProcess(command, os.waitpid(pid, 0)[1])


def call(folder: str, arguments: list[str]) -> None:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    gpu_run.subprocess.run = forked
    sys.exit(main([*arguments, "--into", f"{folder}/report.json", "--processes", "2"]))


def run(commands, folder: Path, *names: str) -> tuple[int, dict, str]:
    code, out, err = commands.call(call, str(folder), [str(folder / name) for name in names], **NO_PLUGINS).finish()
    return code, json.loads((folder / "report.json").read_text()), out + err


def test_reports_of_processes_become_one(commands, tmp_path):
    for name, text in {"good": GOOD, "bad": BAD, "counted": COUNTED, "killed": KILLED}.items():
        (tmp_path / f"test_{name}.py").write_text(GPU + text)
    code, report, out = run(commands, tmp_path, "test_good.py", "test_bad.py")
    assert code == 1 and report["counts"] == {"failed": 1, "passed": 1, "skipped": 1}, out
    assert "failed: " in out and "unequal" in out and "part" not in report["tests"][0]
    code, report, out = run(commands, tmp_path, "test_killed.py")
    assert code == 2 and report["counts"] == {"did not end": 1}, out
    (tmp_path / "ready").touch()
    for _ in range(2):
        code, report, out = run(commands, tmp_path, "test_counted.py", "test_killed.py")
        assert code == 0 and report["counts"] == {"passed": 2}, out
    assert (tmp_path / "runs").read_text() == "x", "what has passed is not run again"


def test_what_did_not_run_is_of_no_weight(tmp_path):
    """A part's report names tests of other parts, too, which it did not run."""
    for ran in "ab":
        tests = [{"test": test, "outcome": "passed" if test == ran else NOT_RUN} for test in "abc"]
        (tmp_path / ran).write_text(json.dumps({"tests": tests}))
    found = {test["test"]: test["outcome"] for test in merged([tmp_path / "a", tmp_path / "b"])}
    assert found == {"a": "passed", "b": "passed", "c": NOT_RUN}


def test_parts_are_the_same_on_the_same_code(tmp_path, monkeypatch):
    names, took = ["tests/kernels/test_rope_kernel.py", "tests/kernels/test_norm_kernel.py"], {}
    monkeypatch.setattr(gpu_run, "seconds_of_files", lambda: gpu_run.Counter(took))
    took[names[0]] = 70.0
    assert jobs(names, tmp_path) == [*(Job(names[0], part, 3) for part in (1, 2, 3)), Job(names[1], 1, 1)]
    took[names[0]] = 10.0
    (tmp_path / "a report").write_text("")
    assert len(jobs(names, tmp_path)) == 4 and (tmp_path / "a report").exists()
    monkeypatch.setattr(gpu_run, "head", lambda marker: {"sources": "others"})
    assert len(jobs(names, tmp_path)) == 2 and not (tmp_path / "a report").exists()


def test_both_groups_are_all_files():
    fused, others = files(fused=True), files(fused=False)
    assert not {*fused} & {*others} and all((TESTS.parent / name).exists() for name in fused)
    assert "tests/kernels/test_virtual_ranks_gpu.py" in fused and "tests/kernels/test_norm_kernel.py" in others

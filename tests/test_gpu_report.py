"""`make gpu` reports every test that it ran or did not run, and needs no package that only other tests need."""

import json
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SAMPLE = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 == 2, "unequal"
@pytest.mark.skip(reason="not today")
def test_absent(): pass
"""
INTERRUPTED = """
import pytest
@pytest.mark.gpu
def test_long(): raise KeyboardInterrupt
"""


def report(folder: str, options: list[str]) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    sys.exit(pytest.main([*options, folder]))


def test_the_report(commands, tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_whole.py").write_text("import pytest\n# mark.gpu\npytest.importorskip('absent_package')\n")
    (tmp_path / "test_other.py").write_text("import absent_package\n")  # no test for a GPU in it: never imported
    (tmp_path / "test_stopped.py").write_text(INTERRUPTED)
    path = tmp_path / "results" / "report.json"
    options = ["-p", "gpu_report", "-m", "gpu", "--report", str(path), "--rootdir", str(tmp_path)]
    code, out, err = commands.call(report, str(tmp_path), options).finish()
    assert code == pytest.ExitCode.INTERRUPTED, out + err
    assert f"gpu tests: 1 did not end, 1 failed, 1 passed, 2 skipped; written: {path}" in out
    written = json.loads(path.read_text())
    assert written["counts"] == {"did not end": 1, "failed": 1, "passed": 1, "skipped": 2}
    assert {"torch", "pytest", "python"} <= written["versions"].keys() and "device" in written and "commit" in written
    outcomes = {entry["test"]: (entry["outcome"], entry.get("reason")) for entry in written["tests"]}
    assert outcomes == {
        "test_sample.py::test_good": ("passed", None),
        "test_sample.py::test_bad": ("failed", "AssertionError: unequal ... assert 1 == 2"),
        "test_sample.py::test_absent": ("skipped", "not today"),
        "test_stopped.py::test_long": ("did not end", None),
        "test_whole.py": ("skipped", "could not import 'absent_package': No module named 'absent_package'"),
    }
    assert str(tmp_path) not in path.read_text()

"""`make gpu` reports every test it ran or did not run, and needs nothing that only other tests need."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SAMPLE = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert 1 == 2, "unequal"
@pytest.mark.skip(reason="not today")
def test_absent(): pass
"""


def test_the_report(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_whole.py").write_text("import pytest\n# mark.gpu\npytest.importorskip('absent_package')\n")
    (tmp_path / "test_other.py").write_text("import absent_package\n")  # no test for a GPU in it: never imported
    path = tmp_path / "results" / "report.json"
    options = ["-p", "gpu_report", "-m", "gpu", "--report", str(path), "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"gpu tests: 1 failed, 1 passed, 2 skipped; written: {path}" in result.stdout
    report = json.loads(path.read_text())
    assert report["counts"] == {"failed": 1, "passed": 1, "skipped": 2}
    assert {"torch", "pytest", "python"} <= report["versions"].keys() and "device" in report and "commit" in report
    outcomes = {entry["test"]: (entry["outcome"], entry.get("reason")) for entry in report["tests"]}
    assert outcomes == {
        "test_sample.py::test_good": ("passed", None),
        "test_sample.py::test_bad": ("failed", "AssertionError: unequal ... assert 1 == 2"),
        "test_sample.py::test_absent": ("skipped", "not today"),
        "test_whole.py": ("skipped", "could not import 'absent_package': No module named 'absent_package'"),
    }
    assert str(tmp_path) not in path.read_text()

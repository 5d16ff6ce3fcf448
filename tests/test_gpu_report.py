"""`make gpu` reports every test that it ran or did not run, also when it is killed or runs in parts, and needs no
package that only other tests need."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_report import dependencies, divided, may_have, part

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
pytestmark = pytest.mark.gpu
def test_long(): raise KeyboardInterrupt
def test_next(): pass
"""
KILLED = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_first(): pass
def test_second(): os.kill(os.getpid(), 9)
def test_third(): pass
"""
MANY = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_one(number): assert number != 1
"""


def report(folder: str, options: list[str]) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    sys.exit(pytest.main([*options, folder]))


def run(commands, folder: Path, *options: str) -> tuple[int, str, dict]:
    """(exit code, output, the report) of the folder's tests."""
    path = folder / "results" / "report.json"
    given = ["-p", "gpu_report", "-m", "gpu", "--report", str(path), "--rootdir", str(folder), *options]
    code, out, err = commands.call(report, str(folder), given).finish()
    return code, out + err, json.loads(path.read_text())


def outcomes(written: dict) -> dict[str, str]:
    return {entry["test"]: entry["outcome"] for entry in written["tests"]}


def test_the_report(commands, tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "test_whole.py").write_text("import pytest\n# mark.gpu\npytest.importorskip('absent_package')\n")
    (tmp_path / "test_broken.py").write_text("# mark.gpu\nimport absent_helper\n")
    (tmp_path / "test_other.py").write_text("import absent_package\n")  # no test for a GPU in it: never imported
    (tmp_path / "test_stopped.py").write_text(INTERRUPTED)
    code, out, written = run(commands, tmp_path)
    assert code == pytest.ExitCode.INTERRUPTED, out
    path = tmp_path / "results" / "report.json"
    assert f"gpu tests: 1 did not end, 2 failed, 1 not run, 1 passed, 2 skipped; written: {path}" in out
    assert written["counts"] == {"did not end": 1, "failed": 2, "not run": 1, "passed": 1, "skipped": 2}
    assert {"torch", "pytest", "python"} <= written["versions"].keys() and "device" in written and "commit" in written
    assert {entry["test"]: (entry["outcome"], entry.get("reason")) for entry in written["tests"]} == {
        "test_sample.py::test_good": ("passed", None),
        "test_sample.py::test_bad": ("failed", "AssertionError: unequal ... assert 1 == 2"),
        "test_sample.py::test_absent": ("skipped", "not today"),
        "test_stopped.py::test_long": ("did not end", None),
        "test_stopped.py::test_next": ("not run", None),
        "test_whole.py": ("skipped", "could not import 'absent_package': No module named 'absent_package'"),
        "test_broken.py": ("failed", "E   ModuleNotFoundError: No module named 'absent_helper'"),
    }
    assert str(tmp_path) not in path.read_text()


def test_a_killed_run_leaves_what_it_ran(commands, tmp_path):
    """The next call begins with what has not run."""
    (tmp_path / "test_killed.py").write_text(KILLED)
    code, _, written = run(commands, tmp_path, "--part", "1/1")
    assert code == -signal.SIGKILL
    assert list(outcomes(written).values()) == ["passed", "did not end", "not run"]
    _, _, written = run(commands, tmp_path, "--part", "1/1")
    assert list(outcomes(written).values()) == ["passed", "did not end", "passed"]


def test_parts_make_one_file(commands, tmp_path):
    (tmp_path / "test_many.py").write_text(MANY)
    names = [f"test_many.py::test_one[{number}]" for number in range(4)]

    def ran(part: str) -> tuple[list[str], dict]:
        _, out, written = run(commands, tmp_path, "--part", part)
        assert " deselected" in out
        return [name for name, outcome in outcomes(written).items() if outcome != "not run"], written

    assert ran("2/2")[0] == names[2:]
    there, written = ran("1/2")
    assert there == names
    assert written["counts"] == {"failed": 1, "passed": 3} and written["parts"] == 2

    for entry in written["tests"]:  # as if of another commit, whose last test took as long as all others
        entry["seconds"] = 3.0 if entry["test"] == names[3] else 1.0
    (tmp_path / "results" / "report.json").write_text(json.dumps({**written, "commit": "another"}))
    assert ran("2/2")[0] == names[3:]
    assert ran("1/2")[1]["counts"] == {"failed": 1, "passed": 3}, "the times of this commit do not move its parts"


def test_parts_take_about_as_long() -> None:
    assert divided(["a", "b", "c", "d"], 2, {"a": 30.0, "b": 10.0, "c": 10.0, "d": 10.0}) == [1, 2, 2, 2]
    assert divided(["a", "new", "b"], 3, {"a": 5.0, "b": 5.0}) == [1, 2, 3]
    assert divided(["skipped"], 6, {"skipped": 0.0}) == [4]


@pytest.mark.parametrize("wrong", ["0/6", "7/6", "6", "one/6"])
def test_a_part_that_is_none(wrong):
    with pytest.raises(ValueError, match="is no part such as 1/6"):
        part(wrong)


# hides packages, as if they were not installed
HIDING = """
import importlib.machinery, sys
Path = importlib.machinery.PathFinder
class Finder(Path):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            path = [folder for folder in path or sys.path if "site-packages" not in folder]
        return Path.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(Path)] = Finder
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
AT_HAND = {"torch", "triton", "numpy", "pytest"}  # on a GPU machine
TESTED = ("bench", "kernels", "ops", "training")  # folders of tests


def test_missing_packages_cost_few_tests() -> None:
    """Without other packages, pytest's plugins among them, all tests of kernels are found, and no file is an error."""
    options = ["-p", "gpu_report", "-m", "gpu", "--collect-only", "-qq", "-rs", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", HIDING, ",".join(dependencies() - AT_HAND), *options, *(f"tests/{x}" for x in TESTED)],
        cwd=TESTS.parent, env=os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    kernels = {path for path in (TESTS / "kernels").glob("test_*.py") if may_have(path.read_text(), "gpu")}
    assert len(kernels) > 10 and {f"tests/kernels/{path.name}" for path in kernels} <= found
    assert "rich is not installed" in done.stdout and "hypothesis is not installed" not in done.stdout

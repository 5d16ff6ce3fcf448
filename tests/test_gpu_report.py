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
from test_imports import HIDE

TESTS = Path(__file__).parent
GPU = "import os, pytest\npytestmark = pytest.mark.gpu\n"
SAMPLE = """
def test_good(): pass
def test_bad(): assert 1 == 2, "unequal"
@pytest.mark.skip(reason="not today")
def test_absent(): pass
"""
INTERRUPTED = "def test_long(): raise KeyboardInterrupt\ndef test_next(): pass\n"
KILLED = "def test_first(): pass\ndef test_second(): os.kill(os.getpid(), 9)\ndef test_third(): pass\n"
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # of which many machines have some that take a second to import
MANY = "@pytest.mark.parametrize('number', range(4))\ndef test_one(number): assert number != 1\n"
AT_HAND = {"torch", "triton", "numpy", "pytest"}  # on a GPU machine
TESTED = ("bench", "kernels", "ops", "training")  # folders of tests


def report(folder: str, options: list[str]) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    sys.exit(pytest.main([*options, folder]))


def run(commands, folder: Path, *options: str) -> tuple[int, str, dict]:
    """(exit code, output, the report) of the folder's tests."""
    path = folder / "results" / "report.json"
    given = ["-p", "gpu_report", "-m", "gpu", "--report", str(path), "--rootdir", str(folder), *options]
    code, out, err = commands.call(report, str(folder), given, **NO_PLUGINS).finish()
    return code, out + err, json.loads(path.read_text())


def test_the_report(commands, tmp_path):
    (tmp_path / "test_sample.py").write_text(GPU + SAMPLE)
    (tmp_path / "test_whole.py").write_text("import pytest\n# mark.gpu\npytest.importorskip('absent_package')\n")
    (tmp_path / "test_broken.py").write_text("# mark.gpu\nimport absent_helper\n")
    (tmp_path / "test_other.py").write_text("import absent_package\n")  # no test for a GPU in it: never imported
    (tmp_path / "test_stopped.py").write_text(GPU + INTERRUPTED)
    code, out, written = run(commands, tmp_path)
    assert code == pytest.ExitCode.INTERRUPTED, out
    path = tmp_path / "results" / "report.json"
    counts = ", ".join(f"{number} {outcome}" for outcome, number in written["counts"].items())
    assert counts == "1 did not end, 2 failed, 1 not run, 1 passed, 2 skipped"
    assert f"gpu tests: {counts}; written: {path}" in out
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
    (tmp_path / "test_killed.py").write_text(GPU + KILLED)
    ended = [run(commands, tmp_path, "--part", "1/1") for _ in range(2)]
    assert ended[0][0] == -signal.SIGKILL
    outcomes = [[entry["outcome"] for entry in written["tests"]] for _, _, written in ended]
    assert outcomes == [["passed", "did not end", "not run"], ["passed", "did not end", "passed"]]


def test_parts_make_one_file(commands, tmp_path):
    (tmp_path / "test_many.py").write_text(GPU + MANY)
    names = [f"test_many.py::test_one[{number}]" for number in range(4)]

    def ran(part: str) -> tuple[list[str], dict]:
        _, out, written = run(commands, tmp_path, "--part", part)
        assert " deselected" in out and written["parts"] == 2
        return [entry["test"] for entry in written["tests"] if entry["outcome"] != "not run"], written

    assert ran("2/2")[0] == names[2:]
    there, written = ran("1/2")
    assert there == names and written["counts"] == {"failed": 1, "passed": 3}

    for entry in written["tests"]:  # as if of another commit, whose last test took as long as all others
        entry["seconds"] = 3.0 if entry["test"] == names[3] else 1.0
    (tmp_path / "results" / "report.json").write_text(json.dumps({**written, "commit": "another"}))
    assert ran("2/2")[0] == names[3:]
    assert ran("1/2")[1]["counts"] == {"failed": 1, "passed": 3}, "the times of this commit do not move its parts"


def test_parts_take_about_as_long_and_what_is_none_is_refused() -> None:
    assert divided(["a", "b", "c", "d"], 2, {"a": 30.0, "b": 10.0, "c": 10.0, "d": 10.0}) == [1, 2, 2, 2]
    assert divided(["a", "new", "b"], 3, {"a": 5.0, "b": 5.0}) == [1, 2, 3]
    assert divided(["skipped"], 6, {"skipped": 0.0}) == [4]
    for wrong in ("0/6", "7/6", "6", "one/6"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no part such as 1/6"):
            part(wrong)


@pytest.mark.proof  # it finds the tests of four folders, without what is imported here
def test_missing_packages_cost_few_tests() -> None:
    """Without other packages, pytest's plugins among them, all tests of kernels are found, and no file is an error."""
    options = ["-p", "gpu_report", "-m", "gpu", "--collect-only", "-qq", "-rs", "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    program = HIDE.format(" ".join(dependencies() - AT_HAND)) + "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *options, *(f"tests/{folder}" for folder in TESTED)],
        cwd=TESTS.parent, env=os.environ | {"PYTHONPATH": paths} | NO_PLUGINS,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    found = {line.partition(":")[0] for line in done.stdout.splitlines()}
    kernels = {path for path in (TESTS / "kernels").glob("test_*.py") if may_have(path.read_text(), "gpu")}
    assert len(kernels) > 10 and {f"tests/kernels/{path.name}" for path in kernels} <= found
    assert "rich is not installed" in done.stdout and "hypothesis is not installed" not in done.stdout

"""`make test-changed` runs what a change reaches: recorded tests by function, a new file's folder, a helper's users."""

import subprocess

import changed
import pytest
import reach

RECORDED = {"tests/ops/test_a.py::test_f": 1.0, "tests/ops/test_a.py::test_g": 2.0, "tests/test_all.py::test_run": 50.0}
F, G, RUN = RECORDED
SOURCE = '''"""A module."""
LIMIT = 3


def f(x):
    # why
    return x + 1


class G:
    @decorated
    def g(self):
        def inner():
            return 2

        return inner()
'''
TREE = {
    "tpformer/ops/a.py": SOURCE,
    "tests/ops/test_a.py": "import helper\nfrom tpformer.ops import a\ndef test_f(): pass\ndef test_g(): pass\n",
    "tests/ops/test_b.py": "def test_b(): pass\n",
    "tests/test_all.py": "import between\ndef test_run(): pass\n",
    "tests/helper.py": "",
    "tests/between.py": "from helper import thing\n",
    "kernels/rows.py": "@triton.jit\ndef load(x):\n    return x\n",
    "kernels/norm/kernel.py": "from ..rows import load\n",
    "kernels/norm/reference.py": "",
    "tests/ops/test_n.py": "from tpformer.kernels.norm import reference\ndef test_n(): pass\n",
    "README.md": "text\n",
}  # fmt: skip


def commit(tree):
    for arguments in ("add .", "-c user.name=a -c user.email=a@b commit --quiet --message a"):
        subprocess.run(["git", *arguments.split()], cwd=tree, check=True)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small repository with a record of it: f is run by test_f and test_run, G.g by test_g.

    test_g also launches what reads rows; that it runs `load` is not recorded.
    """
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit(tmp_path)
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    monkeypatch.setattr(reach, "RECORD", tmp_path / "tests" / "reach.gz")
    run = {"tpformer/ops/a.py::f": {F, RUN}, "tpformer/ops/a.py::G.g": {G}, "kernels/rows.py::launch": {G}}
    reach.keep(record := reach.Reach(dict(RECORDED), run))
    assert reach.load() == record
    return tmp_path


@pytest.mark.parametrize(("file", "edit", "runs"), [
    ("tpformer/ops/a.py", ("x + 1", "x + 2"), [F, RUN]),
    ("tpformer/ops/a.py", ("return 2", "return 3"), [G]),
    ("tpformer/ops/a.py", ("@decorated", "@checked"), [G]),
    ("tpformer/ops/a.py", ("LIMIT = 3", "LIMIT = 4"), [F, G, RUN]),
    ("tpformer/ops/a.py", ("# why", "# because"), []),
    ("tpformer/ops/a.py", ("def f(x):", "def h(x):"), [F, RUN]),
    ("kernels/rows.py", ("return x", "return -x"), ["tests/ops/test_n.py", G]),
    ("kernels/norm/kernel.py", ("load", "load, store"), ["tests/ops/test_n.py"]),
    ("tpformer/ops/new.py", None, ["tests/ops/test_a.py", "tests/ops/test_b.py", "tests/ops/test_n.py"]),
    ("tests/ops/test_b.py", ("pass", "assert 1"), ["tests/ops/test_b.py"]),
    ("tests/helper.py", None, ["tests/ops/test_a.py", "tests/test_all.py"]),
    ("tests/conftest.py", None, ["tests"]),
])  # fmt: skip
def test_what_a_change_reaches(tree, capsys, file, edit, runs):
    path = tree / file
    path.write_text("x = 1\n" if edit is None else path.read_text().replace(*edit))
    assert changed.main(["--list"]) == 0
    first, *listed = capsys.readouterr().out.splitlines()
    assert listed == runs
    assert first.endswith(f"changed files reach {len(runs)} tests" if runs else "no test reaches 1 changed files")


def test_the_nearest_tests_come_first_and_what_does_not_fit_is_said(tree, capsys):
    (tree / "tpformer/ops/a.py").write_text(SOURCE.replace("3", "4"))
    assert changed.main(["--list", "--seconds", "10"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 changed files reach 3 tests; the nearest 2 run, about 10 s", F, G
    ]  # fmt: skip


def test_tests_that_are_gone_are_not_asked_for_and_new_files_are(tree, capsys):
    (tree / "tests/ops/test_a.py").write_text("def test_g(): pass\n")
    commit(tree)
    (tree / "tpformer/ops/a.py").write_text(SOURCE.replace("x + 1", "x"))
    (tree / "tests/ops/test_new.py").write_text("import tpformer.ops.a\n")
    changed.main(["--list"])
    assert capsys.readouterr().out.splitlines()[1:] == ["tests/ops/test_new.py", RUN]

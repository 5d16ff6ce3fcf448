"""The scripts of examples/ are short, and run as the commands in their docstrings say. Each checks its own result.

Commands of a page are run by test_readme.py.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from test_readme import ROOT, lines

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
COMMAND = re.compile(r"^ *((?:torchrun --nproc-per-node \d+|python) examples/(\w+)\.py(?: [^\s\[#]+)*)", re.M)
COMMANDS = [
    found[1].split() for path in SCRIPTS for found in COMMAND.finditer(path.read_text()) if found[2] == path.stem
]
ON_A_PAGE = [line.split(" # ")[0].removeprefix(".venv/bin/").split() for line in lines()]


def test_each_script_is_short_and_has_a_command():
    assert [path.name for path in SCRIPTS if path.read_text().count("\n") >= 80] == []
    assert {path.name for path in SCRIPTS} <= {Path(word).name for command in COMMANDS for word in command}


@pytest.mark.parametrize("name", ["drop_in", "own_block"])
def test_a_script_agrees_with_one_process(ranks, monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    ranks(2).run(import_module(name).main)


@pytest.mark.proof
@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in ON_A_PAGE], ids=" ".join)
def test_a_command_runs(command, tmp_path):
    path = next(path for path in SCRIPTS if f"examples/{path.name}" in command)
    for needed in re.findall(r"^(?:from|import) (transformers|peft|accelerate)\b", path.read_text(), re.M):
        pytest.importorskip(needed)
    words = [str(path) if word.startswith("examples/") else word for word in command]
    if words[0] == "torchrun":
        words.insert(1, "--standalone")  # a port of its own
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | ours, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr

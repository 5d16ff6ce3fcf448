"""Every command and every piece of code of the README and the pages runs as written; `make train` learns.

Commands run in the order of the pages, in a fresh clone, but for those whose comment says what else they need. Those of
the front door make their own environment there; those of all other pages use this one. The example that they train has
a few steps in these clones, and all of its own in a proof by itself.
The scripts of examples/ run by the commands in their docstrings, and check their own results, as does the notebook.
"""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
from commands import python
from test_repo import PROSE, ROOT, name
from turns import TRAIN, TRAINING_PAGES, in_turns, of_turn

from tpformer.config import build_config, read_toml, to_toml
from tpformer.training.data import build_dataset

FRONT = ("README.md", "docs/start.md")  # they make the environment, a dataset and a run, docs/pretrain.md more runs
OTHERS = (page for page in map(name, PROSE) if re.match("docs/|examples/", page))
PAGES = tuple(dict.fromkeys([*FRONT, "docs/pretrain.md", *OTHERS]))
# the first makes runs that the others read
RUNS = ("docs/pretrain.md", "docs/checkpoints.md", "docs/data_parallel.md", "docs/inference.md")
# what CI runs beside this test; tests/planner/test_placement.py compares what `plan --within` prints
ELSEWHERE = re.compile(r"make (test|test-changed|check|proofs|compile-check)\b|-m pytest|tpformer plan .*--within")
FEW = ("README.md", "docs/drop_in.md")  # whose code the suite runs
PROGRAMS = ("make", "python3", "tpformer", "torchrun", "sbatch", "echo")
# what a laptop may lack, in a command's own comment
NEEDS = re.compile(r" # needs (\d+ GPUs|several nodes|SLURM|the network|a terminal)")


def blocks(page: str, language: str) -> list[str]:
    """The contents of a page's blocks in a language; "" is those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)
    return [text for named, text in found if named == language]


def lines(pages: Sequence[str] = PAGES) -> list[str]:
    """The commands of pages, in order, with their comments."""
    text = "".join(block for page in pages for block in blocks(page, "bash")).replace("\\\n", " ")
    return [re.sub(" +", " ", line.strip()) for line in text.splitlines() if line.strip()]


def commands(pages: Sequence[str] = PAGES) -> list[str]:
    """Those to run; one that several pages have is run once."""
    shared = dict.fromkeys(line.split(" # ")[0] for line in lines(pages) if not NEEDS.search(line))
    return [line for line in shared if not ELSEWHERE.search(line)]


def test_commands_begin_with_programs_that_are_there():
    """test_prose.py looks for the files that they name."""
    assert len(commands()) > 40
    for line in lines():
        program = next(word for word in line.split() if "=" not in word)
        assert program in PROGRAMS or program.startswith(".venv/bin/"), line
        assert "# needs" not in line or NEEDS.search(line), line


def test_every_block_says_its_language():
    """Otherwise its commands and its code would not be tried."""
    for page in PAGES:
        fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.M)
        known = [block for language in ("bash", "python", "toml", "") for block in blocks(page, language)]
        assert len(fences) == 2 * len(known), page
        for block in blocks(page, ""):
            assert not re.search(r"^(\.venv/|(make|tpformer|python3?|torchrun|import|from) )", block, re.M), page
        for block in blocks(page, "toml"):
            build_config(tomllib.loads(block))


@pytest.fixture(scope="module")
def folder(commands, tmp_path_factory) -> Path:
    """A folder with what code on the pages reads: runs/gpt_tiny, made smaller, and its export my-model."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "text.txt").write_text("def f(x):\n    return x * 2 + 1\n" * 40)
    build_dataset([folder / "text.txt"], folder / "text", "bytes", quiet=True)
    smaller = {
        "run": {"dir": str(folder / "runs/gpt_tiny")}, "data": {"train": [str(folder / "text")], "valid": []},
        "model": {"seq_length": 32, "n_layers": 1, "hidden_size": 32}, "train": {"steps": 1},
    }  # fmt: skip
    (folder / "run.toml").write_text(to_toml(build_config(read_toml(ROOT / "examples/gpt_tiny.toml"), smaller)))
    with contextlib.chdir(folder):
        for line in ("pretrain run.toml", "export runs/gpt_tiny --out my-model"):
            code, out, err = commands.run(*line.split())
            assert code == 0, out + err
    return folder


def run_code(page: str, folder: Path) -> None:
    """Run a page's pieces of code in order, with shared names, as a program in that folder."""
    names = {"__name__": page}
    with contextlib.chdir(folder):
        for code in blocks(page, "python"):
            exec(compile(code, f"<{page}>", "exec"), names)


@pytest.mark.parametrize(
    "page", [*FEW, *in_turns(page for page in PAGES if blocks(page, "python") and page not in FEW)]
)
def test_code_runs_on_two_ranks(page, folder, ranks):
    if page == "README.md":
        assert max(block.count("\n") for block in blocks(page, "python")) <= 12, "a snippet is at most 12 lines"
    elif "transformers" in (ROOT / page).read_text():
        pytest.importorskip("transformers")
    ranks(2).run(run_code, page, folder)  # the import of transformers takes its time


@pytest.fixture
def clone(tmp_path) -> Iterator[Path]:
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    yield tmp_path / "clone"
    shutil.rmtree(tmp_path / "clone")


def shell(clone: Path, command: str) -> str:
    """What a command prints, in a clone as a user would give it: commands share out the cores by themselves."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "VIRTUAL_ENV")}
    environment["PATH"] = f"{clone}/.venv/bin:{environment['PATH']}"
    done = subprocess.run(command, shell=True, cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def trained(clone: Path) -> float:
    """The last validation loss of runs/gpt_tiny."""
    return json.loads((clone / "runs/gpt_tiny/metrics.jsonl").read_text().splitlines()[-1])["val_loss"]


def shorten(clone: Path) -> None:
    """Give the example that `make train` runs 20 steps, and 8 samples to validate. The whole one stays in the clone."""
    example = clone / "examples/gpt_tiny.toml"
    shutil.copy(example, clone / "whole.toml")
    text = example.read_text()
    for line, few in {
        "steps = 600": "steps = 20\nvalidation_samples = 8",
        "validation_interval = 200": "validation_interval = 10", "interval = 200": "interval = 10",
    }.items():  # fmt: skip
        assert text.count(f"\n{line}\n") == 1, line
        text = text.replace(f"\n{line}\n", f"\n{few}\n")
    example.write_text(text)


@of_turn(0)
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_the_front_doors_commands_in_a_fresh_clone(clone):
    """But that the example trains for a few steps, and is counted as it is: test_make_train_learns has the others."""
    shorten(clone)
    for command in commands(FRONT):
        printed = shell(clone, command)
        if command == "make train":
            assert trained(clone) < math.log(256), "it has learned something of which bytes there are"
            assert printed.split("val_loss")[-1].count("def ") >= 1, "the sample begins with its prompt"
            assert ": fits, " in shell(clone, ".venv/bin/tpformer dry-run whole.toml")
    shell(clone, ".venv/bin/pip wheel --quiet --no-deps --wheel-dir dist .")
    with zipfile.ZipFile(next((clone / "dist").glob("*.whl"))) as packed:
        assert {"tpformer/py.typed", "tpformer/kernels/protocol.py"} <= set(packed.namelist())


@of_turn(TRAIN)
@pytest.mark.alone
@pytest.mark.timeout(2400)
def test_make_train_learns(clone):
    """All of its steps, in this environment: the front door's proof makes its own."""
    (clone / ".venv").symlink_to(sys.prefix)
    shell(clone, "make --old-file=.venv/ready train")
    assert trained(clone) <= 2.1


@pytest.mark.proof
@pytest.mark.alone
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("pages", [
    pytest.param(RUNS, marks=pytest.mark.rotates(TRAINING_PAGES), id="runs"),
    pytest.param([page for page in PAGES if page not in RUNS], marks=pytest.mark.rotates(3), id="others"),
])  # fmt: skip
def test_the_other_pages_commands_in_a_clone(clone, pages):
    (clone / ".venv").symlink_to(sys.prefix)
    shorten(clone)
    shell(clone, "tpformer data stdlib --out data && tpformer pretrain examples/gpt_tiny.toml")
    done = set(commands(FRONT))
    for command in commands(pages):
        if command not in done:
            shell(clone, command)


def test_the_example_sets_no_derivable_field():
    values = tomllib.loads((ROOT / "examples/gpt_tiny.toml").read_text())
    keys = set().union(*values.values())
    assert not keys & {"vocab_size", "ffn_hidden_size", "n_kv_heads", "tokenizer", "dtype", "device", "microbatch_size"}


SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
OF_SCRIPT = re.compile(r"^ *((?:torchrun --nproc-per-node \d+|python) examples/(\w+)\.py(?: [^\s\[#]+)*)", re.M)
SCRIPT_COMMANDS = [
    found[1].split() for path in SCRIPTS for found in OF_SCRIPT.finditer(path.read_text()) if found[2] == path.stem
]
ON_A_PAGE = [line.split(" # ")[0].removeprefix(".venv/bin/").split() for line in lines()]


def test_each_script_is_short_and_has_a_command():
    assert [path.name for path in SCRIPTS if path.read_text().count("\n") >= 80] == []
    assert {path.name for path in SCRIPTS} <= {Path(word).name for command in SCRIPT_COMMANDS for word in command}


def shorter(name: str) -> None:
    """A script, whose samples have 32 tokens if it says how many they have. A proof runs it as it is."""
    script = import_module(name)
    with patch.dict(vars(script), {"SEQ": 32} if hasattr(script, "SEQ") else {}):
        script.main()


@pytest.mark.parametrize("name", ["drop_in", "own_block"])
def test_a_script_agrees_with_one_process(ranks, monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    ranks(2).run(shorter, name)


@pytest.mark.parametrize("command", in_turns(each for each in SCRIPT_COMMANDS if each not in ON_A_PAGE), ids=" ".join)
def test_a_scripts_command_runs(command, tmp_path):
    path = next(path for path in SCRIPTS if f"examples/{path.name}" in command)
    for needed in re.findall(r"^(?:from|import) (transformers|peft|accelerate)\b", path.read_text(), re.M):
        pytest.importorskip(needed)
    words = [str(path) if word.startswith("examples/") else word for word in command]
    if words[0] == "torchrun":
        words.insert(1, "--standalone")  # a port of its own
    ours = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | ours, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@of_turn(5)
def test_the_notebook_runs(tmp_path):
    """Its cells are plain Python, so they run as one script; matplotlib draws without a screen."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples/walk.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
    script = tmp_path / "walk.py"
    script.write_text("import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join(code))
    assert "logits differ by" in python(script)

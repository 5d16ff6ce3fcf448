"""The scripts of examples/ are short, and run as the commands in their docstrings say. Each checks its own result.

A rank is a fork of a server that has imported transformers. Commands of a page are run as written, by test_readme.py.
"""

import re
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import Commands
from pool import WorkerPool
from test_readme import lines
from torch.distributed import TCPStore

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
COMMAND = re.compile(r"^ *((?:torchrun --nproc-per-node \d+|python) examples/(\w+)\.py(?: [^\s\[#]+)*)", re.M)
COMMANDS = [
    found[1].split() for path in SCRIPTS for found in COMMAND.finditer(path.read_text()) if found[2] == path.stem
]
ON_A_PAGE = [line.split(" # ")[0].removeprefix(".venv/bin/").split() for line in lines()]
HUGGING_FACE = ("transformers", "peft", "accelerate")
# transformers imports a model's classes when they are asked for
PRELOAD = (*filter(find_spec, HUGGING_FACE), *(["transformers.models.llama.modeling_llama"] * bool(find_spec("peft"))))


def test_each_script_is_short_and_has_a_command():
    assert [path.name for path in SCRIPTS if path.read_text().count("\n") >= 80] == []
    assert {path.name for path in SCRIPTS} <= {Path(word).name for command in COMMANDS for word in command}


@pytest.mark.parametrize("name", ["drop_in", "own_block"])
def test_a_script_agrees_with_one_process(ranks, monkeypatch, name):
    monkeypatch.syspath_prepend(SCRIPTS[0].parent)
    ranks(2).run(import_module(name).main)


@pytest.fixture(scope="module")
def processes() -> Iterator[Commands]:
    with WorkerPool(preload=PRELOAD) as pool:
        yield Commands(pool.server)


def script(path: str, *arguments: str) -> None:
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).parent)]
    runpy.run_path(path, run_name="__main__")


@pytest.mark.proof
@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in ON_A_PAGE], ids=" ".join)
def test_a_command_runs(command, processes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = next(i for i, word in enumerate(command) if word.startswith("examples/"))
    path = next(path for path in SCRIPTS if command[place] == f"examples/{path.name}")
    for needed in re.findall(rf"^(?:from|import) ({'|'.join(HUGGING_FACE)})\b", path.read_text(), re.M):
        pytest.importorskip(needed)
    environments: list[dict[str, str]] = [{}]
    store = None
    if command[0] == "torchrun":
        size = int(command[place - 1])
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        environments = [{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), **agent, **rank} for rank in ranks]
    started = [processes.call(script, str(path), *command[place + 1 :], **each) for each in environments]
    results = [each.finish() for each in started]
    for code, _, err in results:
        assert code == 0, err
    assert results[0][1].strip()

"""Benches that train, each as a whole on tiny models for a few steps: it ends, and writes results with every row.

Belongs here: benches that need a process of their own, as they join and leave a process group or start commands.
"""

import json
import math
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import Commands
from test_results import PROBLEMS
from testing import build_small_split

from bench import moe, pretrain
from bench.__main__ import BENCHES
from harness.runner import main
from tpformer import cli
from tpformer.models import GPTConfig

TINY = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=16, n_heads=2)


def small_pretrain() -> None:
    pretrain.build_stdlib, pretrain.STEPS = build_small_split, 6
    pretrain.MODELS = {"cpu": (pretrain.Model("small", TINY, 2, 1e-3),)}


def small_moe() -> None:
    example = moe.read_toml(moe.EXAMPLE)
    example["model"] |= {"hidden_size": 32, "n_layers": 1, "expert_ffn_size": 16, "seq_length": 16, "n_experts": 4}
    example["train"] |= {"steps": 4, "global_batch_size": 8}
    example["log"], example["parallel"] = {"interval": 2}, {}
    moe.read_toml = lambda path: {section: dict(keys) for section, keys in example.items()}
    moe.build_stdlib, moe.QUICK_STEPS, moe.SEEDS, moe.subprocess = build_small_split, 2, (3,), SimpleNamespace(run=fork)


def fork(command: list[str], **options: Any) -> SimpleNamespace:
    """In place of subprocess.run: a command that need not import torch again."""
    assert command[:3] == [sys.executable, "-m", "tpformer.cli"] and options["cwd"] == moe.ROOT
    process = get_context("fork").Process(target=cli.main, args=(command[3:],))
    process.start()
    process.join()
    return SimpleNamespace(returncode=process.exitcode, stderr="")


SMALLER = {"moe": small_moe, "pretrain": small_pretrain}


def run_small(name: str, results: Path) -> None:
    """The bench, made smaller: --quick, which writes nothing, then as a whole."""
    SMALLER[name]()
    if name in ("moe", "pretrain"):
        assert main([name, "--quick"], BENCHES, results) == 0 and not results.exists()
    sys.exit(main([name], BENCHES, results))


def result_of(name: str, commands: Commands, folder: Path) -> tuple[dict[str, Any], str]:
    """What the bench has written, and what it printed. Few steps may miss what is required: the exit code says it."""
    code, out, err = commands.call(run_small, name, folder / "results", CUDA_VISIBLE_DEVICES="").finish()
    assert code in (0, 1), err
    path = folder / "results" / "cpu" / f"{name}.json"
    ElementTree.parse(path.with_suffix(".svg"))
    result = json.loads(path.read_text())
    head = "schema bench description date machine commit dirty versions note"
    assert list(result)[:9] == head.split() and result["bench"] == name
    assert code == bool(PROBLEMS[name](result))
    return result, out


@pytest.mark.timeout(300)
def test_moe(commands, tmp_path):
    result, out = result_of("moe", commands, tmp_path)
    assert "nothing is written: called with an option" in out
    sparse, dense = result["rows"]
    assert len(sparse["losses"]) == len(dense["losses"]) == 1 and result["seeds"] == [3]
    assert dense["expert_load"] is None and all(1 <= load <= 2 for load in sparse["expert_load"])
    assert result["tokens"] == 4 * 8 * 16


def test_pretrain(commands, tmp_path):
    result, out = result_of("pretrain", commands, tmp_path)
    assert "nothing is written: called with an option" in out
    assert "pretrain: small: final loss" in out and "not below 0.8 of" in out
    (row,) = result["rows"]
    assert len(row["losses"]) == row["steps"] == 6 and row["first_loss"] == row["losses"][0]
    assert row["final_loss"] == pytest.approx(math.fsum(row["losses"]) / 6)
    assert row["mfu"] is None and row["peak_bytes"] > 2**26
    assert row["tokens_per_second"] > 0 and row["saved_bytes"] > 0 and 2 < row["unigram_entropy"] < 4

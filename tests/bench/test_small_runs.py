"""Benches that train, each as a whole on tiny models for a few steps: it ends, and writes results with every row.

Belongs here: benches that need a process of their own, as they join and leave a process group or start commands.
"""

import dataclasses
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
from test_results import PROBLEMS, committed
from testing import build_small_split

from bench import learning_rate, moe, pretrain
from bench.__main__ import BENCHES
from bench.packing import bench as packing
from bench.packing import outliers
from bench.packing.forms import LARGEST_GROUP
from bench.packing.training import SHAPES, Size
from bench.runner import main
from tpformer import cli
from tpformer.models import GPTConfig

TINY = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=16, n_heads=2)


def small_learning_rate() -> None:
    learning_rate.build_stdlib, learning_rate.MODEL, learning_rate.RATES = build_small_split, TINY, (1e-3, 2e-3)
    learning_rate.SAMPLES, learning_rate.VALIDATION, learning_rate.SEEDS, learning_rate.WARM_UP = 128, 4, (1, 2), 0.5


def small_packing() -> None:
    sizes = {"n_layers": 2, "seq_length": 16, "hidden_size": 16, "n_heads": 2, "ffn_hidden_size": 48}
    experts = {"expert_ffn_size": 16, "shared_expert_size": 16}
    packing.SHAPES = {
        name: dataclasses.replace(config, **sizes, **(experts if config.n_experts else {}))
        for name, config in SHAPES.items()
    }
    packing.build_stdlib, packing.Size = build_small_split, lambda: Size(4, 2)
    outliers.ROWS, outliers.HIDDEN = 16, 512


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


SMALLER = {
    "learning_rate": small_learning_rate, "moe": small_moe, "packing": small_packing, "pretrain": small_pretrain,
}  # fmt: skip


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


def test_learning_rate(commands, tmp_path):
    result, _ = result_of("learning_rate", commands, tmp_path)
    assert [len(row["losses"]) for row in result["rows"]] == [2] * 8
    by_rule = {(row["rule"], row["warmup"]): row["losses"] for row in result["rows"]}
    assert by_rule["linear", True] != by_rule["linear", False] != by_rule["unscaled", False]
    assert all(row["noise_scale"] is None for row in result["rows"][2:])


@pytest.mark.timeout(300)
def test_moe(commands, tmp_path):
    result, out = result_of("moe", commands, tmp_path)
    assert "nothing is written: called with an option" in out
    sparse, dense = result["rows"]
    assert len(sparse["losses"]) == len(dense["losses"]) == 1 and result["seeds"] == [3]
    assert dense["expert_load"] is None and all(1 <= load <= 2 for load in sparse["expert_load"])
    assert result["tokens"] == 4 * 8 * 16


@pytest.mark.timeout(300)
def test_packing(commands, tmp_path):
    result, out = result_of("packing", commands, tmp_path)
    assert "it did not learn" in out
    assert "were saved, not" not in out, out  # all that layers keep has the name and the size that docs/memory.md says
    steps = [(each["shape"], each["step"]) for each in result["steps_recorded"]]
    assert steps == [(shape, step) for shape in ("GPT", "Llama", "MoE") for step in (1, 4)]
    sizes = {(row["shape"], row["tensor"]): row["values"] for row in result["rows"] if row["step"] == 4}
    assert len(sizes) == 7 + 8 + 8 and sizes["Llama", "gate pre-activation"] == 2 * LARGEST_GROUP  # filled up
    assert result["recompute"] == committed("packing")["recompute"]  # it depends on no size
    watched = {row["shape"]: row for row in result["watched"] if row["group"] == 8192}
    assert len(watched["MoE"]["worst"]) == 4 and all(", " in where for where in watched["MoE"]["where"])


def test_pretrain(commands, tmp_path):
    result, out = result_of("pretrain", commands, tmp_path)
    assert "nothing is written: called with an option" in out
    assert "pretrain: small: final loss" in out and "not below 0.8 of" in out
    (row,) = result["rows"]
    assert len(row["losses"]) == row["steps"] == 6 and row["first_loss"] == row["losses"][0]
    assert row["final_loss"] == pytest.approx(math.fsum(row["losses"]) / 6)
    assert row["mfu"] is None and row["peak_bytes"] > 2**26
    assert row["tokens_per_second"] > 0 and row["saved_bytes"] > 0 and 2 < row["unigram_entropy"] < 4

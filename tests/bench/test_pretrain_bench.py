"""The pretraining bench: its run on a CPU, its row and drawing, what it requires, and what it counts under FSDP2."""

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from commands import Commands, execute
from pool import WorkerPool

from bench import pretrain
from bench.layer_memory import Layer, expected_items
from bench.pretrain import GPT2, LARGE, Model, Row, problems, run_config, saved_bytes
from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.models import GPTConfig
from tpformer.training.setup import build_model

ROOT = Path(__file__).resolve().parents[2]

SMALL = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=32, n_heads=2)
# Runs in a process of its own, as it joins and leaves a process group. It does so twice, as one process may.
RUN = """
import bench.pretrain as pretrain
from bench.runner import main
from tpformer.models import GPTConfig
config = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=32, n_heads=2)
pretrain.MODELS = {"cpu": (pretrain.Model("small", config, 2, 1e-3),)}
pretrain.STEPS = 6
results = Path(sys.argv[1])
assert main(["pretrain", "--quick"], [pretrain.BENCH], results) == 0 and not results.exists()
sys.exit(main(["pretrain"], [pretrain.BENCH], results))
"""


def test_a_run_on_a_cpu(commands: Commands, tmp_path: Path) -> None:
    code, out, err = commands.call(execute, RUN, str(tmp_path / "results"), CUDA_VISIBLE_DEVICES="").finish()
    assert code == 1, err  # after six steps the loss is still above the bar
    assert "nothing is written: called with an option" in out
    assert "pretrain: small: final loss" in out and "not below 0.8 of" in out
    result = json.loads((tmp_path / "results" / "cpu" / "pretrain.json").read_text())
    header = "schema bench description date machine commit dirty versions"
    assert list(result) == [*header.split(), "note", "rows"]
    (row,) = result["rows"]
    sizes = (
        "model parameters dtype samples_per_step seq_length steps tokens_per_second mfu peak_bytes peak_is saved_bytes"
    )
    assert list(row) == [*sizes.split(), "unigram_entropy", "first_loss", "final_loss", "losses"]
    assert len(row["losses"]) == row["steps"] == 6 and row["first_loss"] == row["losses"][0]
    assert row["final_loss"] == pytest.approx(sum(row["losses"]) / 6)
    assert row["mfu"] is None and row["peak_is"] == "ru_maxrss of the process" and row["peak_bytes"] > 2**26
    assert row["dtype"] == "float32" and row["parameters"] == SMALL.n_parameters
    assert row["tokens_per_second"] > 0 and row["saved_bytes"] > 0 and 2 < row["unigram_entropy"] < 4
    svg = ElementTree.parse(tmp_path / "results" / "cpu" / "pretrain.svg")
    (curve,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    assert len(curve.attrib["points"].split()) == 6


def row_of(losses: list[float], entropy: float = 3.0) -> Row:
    final = sum(losses[-pretrain.LAST :]) / len(losses[-pretrain.LAST :])
    row: Row = {"model": "GPT", "unigram_entropy": entropy, "first_loss": losses[0], "final_loss": final}
    return {**row, "losses": losses}


def test_what_is_required_of_the_losses() -> None:
    assert problems(row_of([5.5] * 10 + [2.39] * 20)) == []
    assert "final loss 2.4100, not below 0.8 of 3.0000" in problems(row_of([5.5] * 10 + [2.41] * 20))[0]
    assert problems(row_of([5.5] * 10 + [2.0] * 19 + [float("nan")])) == ["GPT: a loss is not finite"]
    assert problems(row_of([float("inf")] + [2.0] * 20)) == ["GPT: a loss is not finite"]


def test_models_are_the_named_ones() -> None:
    sizes = {model.name: round(model.config.n_parameters / 1e6) for model in (GPT2, LARGE)}
    assert sizes == {"GPT-2 124M": 124, "GPT 1.3B": 1316}
    config = run_config(LARGE, 300, Path("data/train"))
    assert config.model.hidden_size == 2048 and config.data.train == ("data/train",) and config.train.steps == 300
    assert config.optimizer == OptimizerSection(lr=LARGE.lr, warmup_steps=30)


def saved_with_layers(n_layers: int) -> int:
    """What a bfloat16 model under FSDP2 keeps of a forward."""
    config = GPTConfig(vocab_size=257, seq_length=16, n_layers=n_layers, hidden_size=32, n_heads=2)
    options = run_config(Model("small", config, 2, 1e-3), 1, Path("unused"))
    mesh = build_mesh("cpu", tensor_parallel=1)
    options = dataclasses.replace(options, train=dataclasses.replace(options.train, dtype="bfloat16"))
    (model,) = build_model(options, mesh).parts
    return saved_bytes(model, torch.randint(257, (2, 17)))


def test_parameters_that_fsdp_gathers_do_not_count(ranks: WorkerPool) -> None:
    (one,), (three,) = ranks(1).run(saved_with_layers, 1), ranks(1).run(saved_with_layers, 3)
    layer = Layer("layer", SMALL, 1)
    assert three - one == 2 * 2 * sum(expected_items(layer).values())  # of 2 samples each


@pytest.mark.gpu
def test_quick_on_gpu() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench", "pretrain", "--quick"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("GPT")]
    assert len(lines) == 2 and all("bfloat16" in line for line in lines)

"""What does DiLoCo cost in loss at small scale? A byte GPT on two replicas, synchronous and in rounds.

Belongs here: the runs and their table. The model and its data are those of optimizers.py; that layouts do not matter is
shown by `python -m bench replicas`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from harness.bars import Bar, write_bars
from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report, columns
from tpformer.config import Layout, RunConfig
from tpformer.training.data import build_stdlib
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, open_data, run_mesh
from tpformer.training.step import batch, evaluate, train_step

from .optimizers import BATCH, MODEL, VALIDATION, run_config

STEPS, REPLICAS, SEEDS = 600, 2, (1234, 7)
RUNS = (  # (optimizer, its rate, parallel.exchange)
    *(("adamw", 3e-3, "library"), ("adamw", 3e-3, "diloco every=10"), ("adamw", 3e-3, "diloco every=30")),
    *(("adamw", 3e-3, "diloco every=100"), ("adamw", 3e-3, "diloco every=30 send=int8")),
    ("adamw", 3e-3, "diloco every=30 fragments=2 delay=5 mix=0.5"),
    *(("adamw", 3e-3, "diloco every=10 lr=1 momentum=0"), ("adamw", 3e-3, "diloco every=30 lr=1 momentum=0")),
    *(("muon", 1.2e-2, "library"), ("muon", 1.2e-2, "diloco every=30 lr=0.7 momentum=0.5")),
)
NOTE = (
    f"Validation loss in nats a byte over {VALIDATION} samples of the model that {REPLICAS} replicas have in common, "
    f"after {STEPS} steps of {BATCH} samples of {MODEL['seq_length']} bytes of the standard library, of a GPT of "
    f"{MODEL['n_layers']} layers of {MODEL['hidden_size']} in float32. Mean over {len(SEEDS)} seeds."
)
Row = dict[str, Any]


def train(config: RunConfig) -> float:
    """This rank's part of a run: the validation loss in the end."""
    torch.set_num_threads(1)
    model, data = build_model(config, run_mesh(config, "cpu")), open_data(config)
    optimizers, steps = build_optimizers(model, config.optimizer), config.train.steps
    for step in range(1, steps + 1):
        first, share = model.own_samples((step - 1) * BATCH, BATCH)
        lr = learning_rate(step, steps, config.optimizer)
        train_step(model, optimizers, batch(data.train, first, share), first_sample=first, lr=lr, clip_norm=1.0)
    model.exchange.finish()
    return evaluate(model, data.valid, VALIDATION, torch.device("cpu"))


def setup(runs: dict[str, RunConfig]) -> Calls:
    """A rank's calls: the runs, by name."""
    return {name: partial(train, config) for name, config in runs.items()}


def configs(prefixes: Sequence[Path], steps: int, seeds: Sequence[int]) -> dict[tuple[str, str, int], RunConfig]:
    """The runs by optimizer, exchange and seed."""
    found = {}
    for name, lr, exchange in RUNS:
        for seed in seeds:
            config = run_config(name, lr, seed, steps, prefixes)
            layout = Layout(data_parallel_replicate=REPLICAS, exchange=exchange)
            found[name, exchange, seed] = dataclasses.replace(config, parallel=layout)
    return found


def run(options: argparse.Namespace) -> Report:
    """Train all, one after the other, on two ranks."""
    steps, seeds = (4, SEEDS[:1]) if options.quick else (STEPS, SEEDS)
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        runs = configs(build_stdlib(Path(directory), quiet=True), steps, seeds)
        losses: dict[tuple[str, str, int], float] = {}
        with Ranks(REPLICAS, 1, setup, {str(key): config for key, config in runs.items()}) as ranks:
            for key in runs:
                losses[key] = round(ranks.call(str(key))[0], 5)
                print(*key, losses[key], flush=True)
    table = columns(("optimizer", "parallel.exchange"), (*(f"seed {seed}" for seed in seeds), "mean", "more"))
    rows: list[Row] = []
    for name, _, exchange in RUNS:
        found, own = ([losses[name, each, seed] for seed in seeds] for each in (exchange, "library"))
        rows.append({"optimizer": name, "exchange": exchange, "losses": found})
        table.add_row(name, exchange, *(f"{x:.3f}" for x in (*found, mean(found))), f"{mean(found) - mean(own):+.3f}")
    return Report([table], {"steps": steps, "seeds": list(seeds), "rows": rows}, [], "all runs ended")


def draw(path: Path) -> Path:
    """The mean losses, by optimizer and exchange."""
    rows = json.loads(path.read_text())["rows"]
    bars = [
        Bar(row["optimizer"], row["exchange"], {"loss": mean(row["losses"])}, f"{mean(row['losses']):.3f}")
        for row in rows
    ]
    return write_bars(path, NOTE, "validation loss, nats a byte", bars)


BENCH = Bench(
    name="rounds",
    description="validation loss of a byte GPT on two replicas, synchronous and in rounds of DiLoCo",
    options={"--quick": {"action": "store_true", "help": "4 steps and one seed, nothing written"}},
    run=run,
    draw=draw,
    note=NOTE,
)

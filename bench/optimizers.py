"""Does Muon reach AdamW's best loss in half of the steps? A byte GPT, each at four learning rates, three seeds. With
--variants: what do other coefficients, bfloat16 iterations and the other scale change?

Belongs here: the runs, the bar, table and picture. That layouts do not matter is shown by `python -m bench layouts`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from harness.plot import COLOURS, HEIGHT, TOP, WIDTH, frame, step_x, text, ticks, write_document
from harness.runner import QUICK, Bench, Report, columns
from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.distributed import build_mesh, close
from tpformer.training.data import build_stdlib
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, join_ranks, open_data
from tpformer.training.step import batch, evaluate, train_step

STEPS, BATCH, VALIDATION, INTERVAL = 250, 8, 96, 25
SEEDS = (1234, 7, 2026)
Rates = Mapping[str, Sequence[float]]
RATES: Rates = {"adamw": (1.5e-3, 3e-3, 6e-3, 1.2e-2), "muon": (3e-3, 6e-3, 1.2e-2, 2.4e-2)}
# by name: what [optimizer] says beside name and rate
VARIANTS: dict[str, dict[str, str]] = {
    "quintic": {},
    "polar_express": {"newton_schulz": "polar_express"},
    "quintic in bfloat16": {"muon_dtype": "bfloat16"},
    "polar_express in bfloat16": {"newton_schulz": "polar_express", "muon_dtype": "bfloat16"},
    "spectral": {"muon_scale": "spectral"},
}
# at Muon's two best rates, between which one seed cannot choose; its other scale wants another
VARIANT_RATES: Rates = {**dict.fromkeys(VARIANTS, RATES["muon"][2:]), "spectral": (1.2e-2, 2.4e-2, 4.8e-2, 9.6e-2)}
MODEL: dict[str, Any] = {
    **{"vocab_size": 257, "seq_length": 96, "n_layers": 4, "hidden_size": 96, "n_heads": 4, "ffn_hidden_size": 256},
    **{"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False},
}
NOTE = (
    f"Validation loss in nats a byte over {VALIDATION} samples of {MODEL['seq_length']} bytes of the standard library, "
    f"of a GPT of {MODEL['n_layers']} layers of {MODEL['hidden_size']} in float32, {BATCH} samples a step, warm-up of "
    f"a tenth of the steps, then a cosine to a twentieth of the rate. Mean over {len(SEEDS)} seeds. half: runs of half "
    f"as many steps, with a schedule of their own. passed: the first validation, every {INTERVAL} steps of the whole "
    "runs, that is at most AdamW's best at the end of its own, in the mean over the seeds. The bar: half of the steps "
    "with Muon at its best rate end at most where AdamW ends at its best rate, for every seed. With --variants nothing "
    "is required: quintic is Muon as above."
)

Row = dict[str, Any]


def run_config(name: str, lr: float, seed: int, steps: int, prefixes: Sequence[Path]) -> RunConfig:
    train, valid = ((str(prefix),) for prefix in prefixes)
    keys: dict[str, Any] = {"name": "muon", **VARIANTS[name]} if name in VARIANTS else {"name": name}
    return RunConfig(
        model=ModelSection(**MODEL),
        data=DataSection(train=train, valid=valid),
        optimizer=OptimizerSection(**keys, lr=lr, warmup_steps=steps // 10, min_lr_ratio=0.05),
        train=TrainSection(steps=steps, dtype="float32", device="cpu", global_batch_size=BATCH, seed=seed),
    )


def train(name: str, config: RunConfig, mesh: DeviceMesh) -> Row:
    """A run: validation losses by step. name: of the row."""
    model, data, valid = build_model(config, mesh), open_data(config), []
    optimizers, steps = build_optimizers(model, config.optimizer), config.train.steps
    for step in range(1, steps + 1):
        first = (step - 1) * BATCH
        lr = learning_rate(step, steps, config.optimizer)
        train_step(model, optimizers, batch(data.train, first, BATCH), first_sample=first, lr=lr, clip_norm=1.0)
        if step % INTERVAL == 0 or step == steps:
            valid.append([step, round(evaluate(model, data.valid, VALIDATION, torch.device("cpu")), 5)])
    return {"optimizer": name, "lr": config.optimizer.lr, "seed": config.train.seed, "steps": steps, "valid": valid}


def last(rows: Sequence[Row], name: str, lr: float, steps: int) -> dict[int, float]:
    """The last validation loss of each seed."""
    own = [row for row in rows if (row["optimizer"], row["lr"], row["steps"]) == (name, lr, steps)]
    return {row["seed"]: row["valid"][-1][1] for row in own}


def rates_of(rows: Sequence[Row]) -> Rates:
    """The learning rates of each optimizer in these rows, in their order."""
    names = dict.fromkeys(row["optimizer"] for row in rows)
    return {name: list(dict.fromkeys(row["lr"] for row in rows if row["optimizer"] == name)) for name in names}


def best(rows: Sequence[Row], name: str, steps: int) -> float:
    """The learning rate whose last validation loss is the least, in the mean over the seeds."""
    return min(sorted(rates_of(rows)[name]), key=lambda lr: mean(last(rows, name, lr, steps).values()))


def curve(rows: Sequence[Row], name: str, lr: float, steps: int) -> list[tuple[int, float]]:
    """(step, mean validation loss over the seeds)."""
    own = [row["valid"] for row in rows if (row["optimizer"], row["lr"], row["steps"]) == (name, lr, steps)]
    return [(points[0][0], mean(point[1] for point in points)) for points in zip(*own, strict=True)]


def problems(rows: Sequence[Row], steps: int) -> list[str]:
    """The seeds in which half of the steps with Muon do not reach AdamW's best."""
    adamw, half = best(rows, "adamw", steps), best(rows, "muon", steps // 2)
    theirs, ours = last(rows, "adamw", adamw, steps), last(rows, "muon", half, steps // 2)
    return [
        f"seed {seed}: {ours[seed]:.4f} after {steps // 2} steps of Muon at {half:g}, and {theirs[seed]:.4f} after "
        f"{steps} of AdamW at {adamw:g}"
        for seed in theirs
        if not ours[seed] <= theirs[seed]
    ]


def result_table(rows: Sequence[Row], steps: int) -> Table:
    """A line for each optimizer and rate."""
    rates = rates_of(rows)
    bar = mean(last(rows, "adamw", best(rows, "adamw", steps), steps).values()) if "adamw" in rates else -math.inf
    table = columns(("optimizer",), ("rate", *(f"seed {seed}" for seed in SEEDS), "mean", "half", "passed"))
    for name, own in rates.items():
        for lr in own:
            found = last(rows, name, lr, steps)
            half = last(rows, name, lr, steps // 2)
            passed = next((step for step, loss in curve(rows, name, lr, steps) if loss <= bar), None)
            of_seeds = [f"{found[seed]:.4f}" if seed in found else "" for seed in SEEDS]
            means = [f"{mean(losses.values()):.4f}" if losses else "" for losses in (found, half)]
            table.add_row(name, f"{lr:g}", *of_seeds, *means, "" if passed is None else str(passed))
    return table


def draw(path: Path) -> Path:
    """Validation losses by step, the mean over the seeds: every rate thin, the best one of each optimizer thick."""
    result = json.loads(path.read_text())
    rows, steps = result["rows"], max(row["steps"] for row in result["rows"])
    names = list(rates_of(rows))
    curves = {(name, lr): curve(rows, name, lr, steps) for name, rates in rates_of(rows).items() for lr in rates}
    low = min(loss for points in curves.values() for _, loss in points) - 0.1
    high = max(loss for points in curves.values() for _, loss in points) + 0.1

    def y(loss: float) -> float:
        return TOP + 20 + HEIGHT * (high - loss) / (high - low)

    parts = frame(TOP + 20, HEIGHT, steps, {y(tick): f"{tick:g}" for tick in ticks(low, high)})
    for (name, lr), points in curves.items():
        colour, width = COLOURS[names.index(name)], 2.5 if lr == best(rows, name, steps) else 0.8
        drawn = " ".join(f"{step_x(step, steps):.1f},{y(loss):.1f}" for step, loss in points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for index, name in enumerate(names):
        label = f"{name}, best at {best(rows, name, steps):g}"
        parts.append(text(WIDTH - 30, TOP + 40 + 18 * index, label, "end", fill=COLOURS[index], font_weight="bold"))
    note = "validation loss (nats a byte) by step, mean of three seeds; thin: the other learning rates"
    return write_document(path.with_suffix(".svg"), result, note, WIDTH, TOP + HEIGHT + 80, parts)


def run(options: argparse.Namespace) -> Report:
    """Train all, one after the other, in one process."""
    torch.set_num_threads(1)
    steps, seeds = (4, SEEDS[:1]) if options.quick else (STEPS, SEEDS)
    chosen = VARIANT_RATES if options.variants else RATES
    wanted = [(name, lr, seed, steps) for seed in seeds for name, rates in chosen.items() for lr in rates]
    wanted += [("muon", lr, seed, steps // 2) for seed in seeds for lr in chosen.get("muon", ())]
    rows: list[Row] = []
    join_ranks("cpu")
    mesh = build_mesh("cpu", tensor_parallel=1)
    try:
        with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
            prefixes = build_stdlib(Path(directory), quiet=True)
            for each in wanted:
                rows.append(train(each[0], run_config(*each, prefixes), mesh))
                print(json.dumps(rows[-1]), flush=True)
    finally:
        close(mesh.get_group("tp"))
        dist.destroy_process_group()
    if options.quick or options.variants:
        return Report([result_table(rows, steps)], {"rows": rows}, [], "nothing is required of few steps or variants")
    found, outcome = problems(rows, steps), "half of the steps with Muon reach AdamW's best"
    return Report([result_table(rows, steps)], {"rows": rows}, found, outcome)


BENCH = Bench(
    name="optimizers",
    description="validation loss of a byte GPT by AdamW and by Muon, at four learning rates and three seeds; on a CPU",
    run=run,
    draw=draw,
    options={**QUICK, "--variants": {"action": "store_true", "help": "Muon's coefficients, dtypes and scales instead"}},
    note=NOTE,
)

"""`python -m bench moe`: does a mixture of experts learn more than a dense model with as many active parameters?

Belongs here: the two models, their runs, the rows, what must hold, and the section of docs/moe.md that tells it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from harness.bars import Bar, write_bars
from harness.marks import write_page
from harness.provenance import ROOT
from harness.runner import Bench, Report, columns
from tpformer.config import RunConfig, build_config, read_toml, to_toml
from tpformer.training.data import build_stdlib
from tpformer.training.metrics import read_metrics
from tpformer.training.resolve import resolve

EXAMPLE, PAGE = ROOT / "examples" / "moe_tiny.toml", ROOT / "docs" / "moe.md"
SECTION = "## What experts gain, measured\n"
SPARSE, DENSE = "experts", "dense"
SEEDS, QUICK_SEEDS, QUICK_STEPS = (1, 2, 3), (1,), 20
EQUAL = 0.01  # how far the two may differ in active parameters, as a share
OF_EXPERTS = re.compile("expert|router|balance|first_dense")  # the names of keys that the dense model does not have
NOTE = (
    "Both models train with the same settings on the same samples in the same order, on two ranks. A seed fixes "
    "weights and data. `loss` is the loss on the validation set at the end. `tokens/s` is the median over a run's "
    "intervals without the first, validation left out; of that, the table shows the median over the seeds. `load` "
    "divides the tokens of the busiest expert by the mean, in the layer where this is largest. `entropy` divides the "
    "entropy of the loads by its maximum, and is averaged over the layers. Both belong to the last step."
)
Row = dict[str, Any]


def settings(name: str, folder: Path, data: tuple[Path, Path], seed: int, steps: int | None) -> RunConfig:
    """The run of a model: the example, or with a dense MLP as wide as all experts of a token. steps None: all."""
    values = read_toml(EXAMPLE)
    width = build_config(values).model.active_expert_size
    if name == DENSE:
        for section in ("model", "train"):
            values[section] = {key: value for key, value in values[section].items() if not OF_EXPERTS.search(key)}
        values["model"]["ffn_hidden_size"] = width
    train: dict[str, Any] = {"seed": seed}
    if steps is not None:
        train.update(steps=steps, validation_samples=8)
    return build_config(
        values,
        {
            "run": {"dir": str(folder / f"{name}-{seed}")},
            "data": {"train": [str(data[0])], "valid": [str(data[1])]},
            "train": train,
            "checkpoint": {"interval": 0},
            "log": {"plot": False} if steps is None else {"plot": False, "interval": max(1, steps // 4)},
        },
    )


def train(config: RunConfig) -> list[Row]:
    """The rows of metrics of a run, which is one command as a user gives it."""
    directory = Path(config.run.dir)
    directory.parent.mkdir(parents=True, exist_ok=True)
    file = directory.with_suffix(".toml")
    file.write_text(to_toml(config))
    command = [sys.executable, "-m", "tpformer.cli", "pretrain", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{directory.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_metrics(directory / "metrics.jsonl")


def last_loss(rows: Sequence[Row]) -> float:
    """The validation loss at the end of a run."""
    return next(row["val_loss"] for row in reversed(rows) if "val_loss" in row)


def make_row(name: str, config: RunConfig, runs: Sequence[Sequence[Row]]) -> Row:
    """The row of a model, from the metrics of its seeds."""
    losses = [last_loss(rows) for rows in runs]
    logged = [[row for row in rows if "tokens_per_second" in row] for rows in runs]
    speeds = [median(row["tokens_per_second"] for row in rows[1:] or rows) for rows in logged]
    found = {
        "model": name,
        "parameters": config.model.n_parameters,
        "active_parameters": config.model.n_active_parameters,
        "losses": [round(loss, 4) for loss in losses],
        "loss": round(mean(losses), 4),
        "tokens_per_second": round(median(speeds)),
    }
    for key in ("expert_load", "expert_entropy"):
        found[key] = [round(rows[-1][key], 3) for rows in logged] if key in logged[0][-1] else None
    return found


def measure(seeds: Sequence[int], steps: int | None) -> Row:
    """The content of the results file. The models take turns, seed by seed."""
    runs: dict[str, list[list[Row]]] = {SPARSE: [], DENSE: []}
    configs: dict[str, RunConfig] = {}
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
        data = build_stdlib(Path(directory), quiet=True)
        for seed in seeds:
            for name, found in runs.items():
                configs[name] = resolve(settings(name, Path(directory), data, seed, steps))
                found.append(train(configs[name]))
                print(f"{name}, seed {seed}: {last_loss(found[-1]):.4f}", flush=True)
    config = configs[SPARSE]
    tokens = config.train.steps * config.train.global_batch_size * config.model.seq_length
    sizes = {"steps": config.train.steps, "tokens": tokens, "seeds": list(seeds)}
    rows = [make_row(name, configs[name], found) for name, found in runs.items()]
    return {**sizes, "speed_ratio": round(rows[0]["tokens_per_second"] / rows[1]["tokens_per_second"], 3), "rows": rows}


def problems(content: Row) -> list[str]:
    """What is not as required: the comparison is not one at equal active parameters, or experts do not learn more."""
    sparse, dense = content["rows"]
    ratio = sparse["active_parameters"] / dense["active_parameters"]
    found = [] if abs(ratio - 1) <= EQUAL else [f"the active parameters are {ratio:.3f} of the dense model's"]
    if not sparse["loss"] < dense["loss"]:
        found.append(f"experts end at {sparse['loss']}, not below the dense model's {dense['loss']}")
    return found


HEADER = ("model", "parameters", "active", "loss, nats/byte", "of the seeds", "tokens/s", "load", "entropy")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the tables."""
    ends = ["-" if row[key] is None else f"{mean(row[key]):.2f}" for key in ("expert_load", "expert_entropy")]
    sizes = [f"{row[key] / 1e6:.2f}M" for key in ("parameters", "active_parameters")]
    losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
    return row["model"], *sizes, f"{row['loss']:.3f}", losses, f"{row['tokens_per_second']:,}", *ends


def result_table(rows: Sequence[Row]) -> Table:
    table = columns(HEADER[:1], HEADER[1:])
    for row in rows:
        table.add_row(*cells(row))
    return table


def draw(path: Path) -> Path:
    """A bar for the loss of each seed and model, on one scale from 0."""
    result = json.loads(path.read_text())
    bars = [
        Bar(f"seed {seed}", row["model"], {"validation loss": row["losses"][index]}, f"{row['losses'][index]:.3f}")
        for index, seed in enumerate(result["seeds"])
        for row in result["rows"]
    ]
    return write_bars(path, NOTE, "validation loss, nats/byte", bars)


def section(result: Row) -> str:
    """The section of docs/moe.md that a results file gives."""
    sparse, dense = result["rows"]
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    table = "\n".join(lines)
    return f"""{SECTION}
`python -m bench moe` trains [moe_tiny.toml](../examples/moe_tiny.toml) and a dense model whose MLP is as wide as the
experts of one token together. Both get the same {result["tokens"] / 1e6:.1f}M bytes of the standard library's source,
in {result["steps"]} steps ([results](../bench/results/cpu/moe.json), [picture](../bench/results/cpu/moe.svg)):

{table}

{textwrap.fill(NOTE, 118)}

Experts end {dense["loss"] - sparse["loss"]:.3f} nats/byte lower, at {result["speed_ratio"]:.2f} of the dense speed.
{result["machine"]["cpu"]}, {result["machine"]["cores"]} cores, torch {result["versions"]["torch"]}, {result["date"]}.
"""


def page(text: str, result: Row) -> str:
    """docs/moe.md with its section made again."""
    before, rest = text.split(SECTION)
    _, mark, after = rest.partition("\n## ")
    return before + section(result) + mark + after


def write_files(folder: Path) -> None:
    """The section in docs/moe.md of the repository's own results."""
    write_page(folder / "moe.json", PAGE, page)


def run(options: argparse.Namespace) -> Report:
    """Train both models with every seed; quick: with one seed, for a few steps, after which nothing is required."""
    content = measure(*((QUICK_SEEDS, QUICK_STEPS) if options.quick else (SEEDS, None)))
    sparse, dense = content["rows"]
    outcome = f"experts {sparse['loss']} below dense {dense['loss']} at {content['speed_ratio']} of its tokens/s"
    if options.quick:
        return Report([result_table(content["rows"])], content, [], "the runs ended, a few steps say nothing of losses")
    return Report([result_table(content["rows"])], content, problems(content), outcome, write_files)


BENCH = Bench(
    name="moe",
    description="a mixture of experts beside a dense model of equal active parameters: losses of three seeds, tokens/s",
    run=run,
    draw=draw,
    options={"--quick": {"action": "store_true", "help": "one seed, few steps, nothing written"}},
    note=NOTE,
)

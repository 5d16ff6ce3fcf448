"""Which learning rate does a batch of eight times the samples want? Rules, tried on as many samples as the small batch.

Belongs here: the cases, the loop, the rows, what must hold, the page docs/learning_rate.md. The rules with their
sources: tpformer/planner/advice.py.
"""

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from tpformer.config import DataSection, ModelSection, OptimizerSection, RunConfig, TrainSection
from tpformer.distributed import build_mesh, close
from tpformer.models import GPTConfig
from tpformer.planner.advice import scaled_learning_rates
from tpformer.training.data import build_stdlib, read_sidecar
from tpformer.training.norms import NoiseScale, batch_gradient_norm
from tpformer.training.optimizer import build_optimizers
from tpformer.training.schedules import learning_rate
from tpformer.training.setup import build_model, join_ranks, open_data
from tpformer.training.step import batch, evaluate, train_step

from .bars import Bar, write_bars
from .provenance import RESULTS, ROOT
from .runner import Bench, Report, columns

PAGE = ROOT / "docs" / "learning_rate.md"
MODEL = GPTConfig(vocab_size=257, seq_length=64, n_layers=2, hidden_size=64, n_heads=4)
BATCH, TIMES = 8, 8
SAMPLES, VALIDATION = 5120, 256
WARM_UP = 0.1  # of the steps, so of the samples
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)  # tried with the small batch; its best one is scaled
SEEDS = (1, 2, 3)
ESTIMATES = 32  # of the noise scale in a run of the small batch
LEARNED = 0.8  # the small batch's loss must be below this share of the best loss without context
RULES = ("unscaled", "square root", "linear")
NOTE = (
    "All rows train on as many samples in the same order. They show the validation loss after that: the mean and the "
    "range of three seeds, which differ in weights and data. The schedule is a cosine down to a tenth, and a warm-up "
    "takes a tenth of the steps."
)
Row = dict[str, Any]


class Case(NamedTuple):
    """A way to train: the rule that gave the peak learning rate, samples of a step, and whether there is a warm-up."""

    rule: str
    samples: int
    rate: float
    warmup: bool


def cases(rate: float) -> list[Case]:
    """The small batch, and the large one by each rule, with and without warm-up."""
    linear, root = (each.value for each in scaled_learning_rates(rate, BATCH, BATCH * TIMES))
    rates = dict(zip(RULES, (rate, root, linear), strict=True))
    small = [Case("small batch", BATCH, rate, warmup) for warmup in (True, False)]
    return small + [Case(rule, BATCH * TIMES, rates[rule], warmup) for warmup in (True, False) for rule in RULES]


def train(case: Case, seed: int, train_data: Path, valid_data: Path, mesh: DeviceMesh) -> tuple[float, float]:
    """(validation loss, gradient noise scale in samples, NaN unless it is the small batch's) of a training."""
    steps = SAMPLES // case.samples
    config = RunConfig(
        model=ModelSection(**dataclasses.asdict(MODEL)),
        data=DataSection(train=(str(train_data),), valid=(str(valid_data),)),
        optimizer=OptimizerSection(lr=case.rate, warmup_steps=round(WARM_UP * steps) if case.warmup else 0),
        train=TrainSection(steps=steps, global_batch_size=case.samples, seed=seed),
    )
    data, model, noise, scale = open_data(config), build_model(config, mesh), NoiseScale(), math.nan
    optimizers = build_optimizers(model, config.optimizer)
    for step in range(1, steps + 1):
        first = (step - 1) * case.samples
        rows = batch(data.train, first, case.samples)
        half = None
        if case.samples == BATCH and step % max(1, steps // ESTIMATES) == 0:
            half = float(batch_gradient_norm(model, rows[: BATCH // 2], first, 1.0))
        rate = learning_rate(step, steps, config.optimizer)
        result = train_step(model, optimizers, rows, first_sample=first, lr=rate, clip_norm=config.optimizer.clip_norm)
        if half is not None:
            scale = noise.add(case.samples, float(result.norm), half)
    return evaluate(model, data.valid, VALIDATION, torch.device("cpu")), scale


def make_row(case: Case, results: Sequence[tuple[float, float]]) -> Row:
    """The row of a case, from the results of its seeds. noise_scale: the mean of those that are finite, or None."""
    losses = [round(loss, 4) for loss, _ in results]
    scales = [scale for _, scale in results if math.isfinite(scale)]
    noise = round(mean(scales), 1) if scales else None
    return {**case._asdict(), "losses": losses, "loss": round(mean(losses), 4), "noise_scale": noise}


def measure(seeds: Sequence[int]) -> Row:
    """The content of the results file: rates tried with the small batch, and the rows of the cases."""
    join_ranks("cpu")
    mesh = build_mesh("cpu", tensor_parallel=1)
    try:
        with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as directory:
            train_data, valid_data = build_stdlib(Path(directory), quiet=True)

            def trained(case: Case, seed: int) -> tuple[float, float]:
                found = train(case, seed, train_data, valid_data, mesh)
                print(f"{case}, seed {seed}: {found[0]:.4f}", flush=True)
                return found

            tried = {rate: trained(Case("small batch", BATCH, rate, True), 0)[0] for rate in RATES}
            best = min(tried, key=lambda rate: tried[rate])
            rows = [make_row(case, [trained(case, seed) for seed in seeds]) for case in cases(best)]
            entropy = read_sidecar(train_data)["entropy_nats_per_token"]  # type: ignore[index]
    finally:
        close(mesh.get_group("tp"))
        dist.destroy_process_group()
    sizes = {"parameters": MODEL.n_parameters, "seq_length": MODEL.seq_length, "samples": SAMPLES}
    rates = {f"{rate:g}": round(loss, 4) for rate, loss in tried.items()}
    return {**sizes, "unigram_entropy": entropy, "rates_tried": rates, "rows": rows}


def problems(content: Row) -> list[str]:
    """Why the rows say nothing: the small batch did not learn from context, or its best rate is at an end of those."""
    loss, bar = content["rows"][0]["loss"], LEARNED * content["unigram_entropy"]
    found = [] if loss < bar else [f"the small batch ends at {loss:.4f}, not below {bar:.4f}: it did not learn"]
    tried = content["rates_tried"]
    best = min(tried, key=lambda rate: tried[rate])
    ends = (min(tried, key=float), max(tried, key=float))
    return found + ([f"its best learning rate {best} is at an end of those tried"] if best in ends else [])


def cells(row: Row, small: Row) -> tuple[str, ...]:
    """A row of the tables. small: the row with which its loss is compared."""
    spread = f"{row['loss']:.3f} ({min(row['losses']):.3f} to {max(row['losses']):.3f})"
    sizes = (str(row["samples"]), row["rule"], f"{row['rate']:.3g}", "yes" if row["warmup"] else "no")
    return (*sizes, spread, f"{row['loss'] - small['loss']:+.3f}")


HEADER = ("samples a step", "rule", "peak learning rate", "warm-up", "loss, nats/byte", "beside the first row")


def result_table(rows: Sequence[Row]) -> Table:
    table = columns(HEADER[:2], HEADER[2:])
    for row in rows:
        table.add_row(*cells(row, rows[0]))
    return table


def draw(path: Path) -> Path:
    """A bar for each row, on one scale from 0."""
    rows = json.loads(path.read_text())["rows"]
    bars = [
        Bar(
            f"{row['samples']} samples a step, {'with' if row['warmup'] else 'without'} warm-up",
            f"{row['rule']}, {row['rate']:.3g}",
            {"validation loss": row["loss"]},
            f"{row['loss']:.3f}",
        )
        for row in rows
    ]
    return write_bars(path, NOTE, "validation loss, nats/byte", bars)


INTRODUCTION = """# The learning rate of a larger batch

More data-parallel ranks make the batch larger, and the learning rate that was good for the small one need not be good
for it. `tpformer/planner/advice.py` has the published rules with their sources. `python -m bench learning_rate` tries
three of them with AdamW: batch x {times} at equal samples, on the project's own corpus. It writes this page,
[the results](../bench/results/cpu/learning_rate.json) and a [picture](../bench/results/cpu/learning_rate.svg).

A byte GPT of {parameters:.2f}M parameters sees {samples} samples of {seq_length} tokens of the Python standard
library's source. {note} The scaled rate, {rate:g}, is the best for the small batch of {tried}, by one other seed.

"""


def page(path: Path) -> str:
    """The text of docs/learning_rate.md, from a results file."""
    result = json.loads(path.read_text())
    rows, tried = result["rows"], result["rates_tried"]
    sizes = {key: result[key] for key in ("samples", "seq_length")}
    rates = ", ".join(f"{float(rate):g} ({loss:.3f})" for rate, loss in tried.items())
    text = INTRODUCTION.format(
        times=TIMES, parameters=result["parameters"] / 1e6, note=NOTE, rate=rows[0]["rate"], tried=rates, **sizes
    )
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row, rows[0])) + " |" for row in rows]
    large = min((row for row in rows if row["samples"] > BATCH), key=lambda row: row["loss"])
    by = f"{large['rule']}, {'with' if large['warmup'] else 'without'} warm-up"
    closing = f"\nThe lowest loss of the large batch: {by}. "
    if (noise := rows[0]["noise_scale"]) is not None:
        closing += f"The gradient noise scale at the end of the small batch's runs is {noise:.0f} samples. "
    closing += f"{result['machine']['cpu']}, one thread, torch {result['versions']['torch']}, {result['date']}.\n"
    limits = "It is one small model on one corpus, after few steps: what a rule does for yours, a trial has to show.\n"
    return text + "\n".join(lines) + "\n" + closing + limits


def run(options: argparse.Namespace) -> Report:
    """Train every case; quick: with one seed."""
    content = measure(SEEDS[:1] if options.quick else SEEDS)
    outcome = f"{len(content['rows'])} ways to train, the small batch learned"
    return Report([result_table(content["rows"])], content, problems(content), outcome, write_page)


def write_page(folder: Path) -> None:
    """Write docs/learning_rate.md, when the results are the repository's own."""
    if folder.parent == RESULTS:
        PAGE.write_text(page(folder / "learning_rate.json"))


BENCH = Bench(
    name="learning_rate",
    description="learning-rate rules for a batch eight times as large, at equal samples, with and without warm-up",
    run=run,
    draw=draw,
    options={"--quick": {"action": "store_true", "help": "one seed, nothing written"}},
    note=NOTE,
)

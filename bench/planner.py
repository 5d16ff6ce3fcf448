"""`python -m bench planner`: does the planner order layouts as they turn out, on two CPU ranks with one core each?

Belongs here: the models and layouts, how a layout's step is timed, and what is required of the predicted order. The
planner knows of the machine what `python -m bench cpu` has measured.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch

from harness.bars import Bar, write_bars
from harness.provenance import RESULTS
from harness.ranks import Calls, Ranks
from harness.runner import QUICK, Bench, Report, columns
from harness.timing import interleave, timed
from tpformer.config import RunConfig, build_config
from tpformer.planner.calibration import calibrated
from tpformer.planner.candidates import Question
from tpformer.planner.devices import load_device
from tpformer.planner.layouts import parse_layout, with_layout
from tpformer.planner.published import spearman
from tpformer.planner.search import evaluate
from tpformer.planner.software import ours
from tpformer.processes.cpu import keep_freed_memory
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

MODELS: dict[str, dict[str, Any]] = {
    "GPT, 4 layers of 256": {"n_layers": 4, "hidden_size": 256, "n_heads": 4, "vocab_size": 257, "seq_length": 256},
    "Llama, 4 layers of 384": {
        "n_layers": 4, "hidden_size": 384, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 2048, "seq_length": 128,
        "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False,
    },
}  # fmt: skip
LAYOUTS = (
    "tp=2,microbatch=8",
    "tp=2,microbatch=1",
    "tp=2,microbatch=8,recompute=full",
    "pp=2,microbatch=1",
    "pp=2,microbatch=4",
    "pp=2,microbatch=1,schedule=Interleaved1F1B,stages=2",
    "pp=2,microbatch=1,schedule=ZBVZeroBubble",
    "pp=2,microbatch=2,recompute=mlp",
    "dp=2,microbatch=4",
    "dp=2,zero=1,microbatch=4",
    "dp=2,zero=3,microbatch=4",
    "dp=2,zero=3,microbatch=1",
)
ORDER, BEHIND = 0.8, 0.1  # the least Spearman correlation; how much slower than the fastest the chosen layout may be
ROUNDS, TURNS = 5, 2
NOTE = (
    "Two ranks with one core each, 8 samples a step, float32. The planner's rates are those that `bench cpu` has "
    "measured (bench/results/cpu/cpu.json); nothing is fitted to these rows. spread: the standard deviation of a "
    "layout's rounds. Layouts within twice the median spread count as ties."
)


def configuration(model: str, layout: str) -> RunConfig:
    """A model in a layout."""
    train = {"global_batch_size": 8, "device": "cpu", "dtype": "float32"}
    return with_layout(build_config({"model": MODELS[model], "train": train}), parse_layout(layout))


def step_call(config: RunConfig) -> Calls:
    """A rank's timed training steps, set up as the trainer does. The first one opens its connections."""
    keep_freed_memory()
    whole = build_model(config, run_mesh(config, "cpu"))
    optimizers = build_optimizers(whole, config.optimizer)
    size = (config.train.global_batch_size // config.parallel.data_parallel, config.model.seq_length + 1)
    batch = torch.randint(config.model.vocab_size or 0, size, generator=torch.Generator().manual_seed(0))
    step = partial(train_step, whole, optimizers, batch, first_sample=0, lr=1e-4, clip_norm=1.0)
    step()
    return {"step": timed(step, 1)}


def judge(rows: list[dict[str, Any]], model: str) -> tuple[str, list[str]]:
    """(what was found of a model's rows, what is not as required)."""
    own = [row for row in rows if row["model"] == model]
    same = 2 * median(row["spread"] for row in own)
    predicted, measured = ([row[name] for row in own] for name in ("predicted", "measured"))
    order = spearman(predicted, measured, same)
    chosen, fastest = min(own, key=lambda row: row["predicted"]), min(own, key=lambda row: row["measured"])
    behind = chosen["measured"] / fastest["measured"] - 1
    error = median(abs(row["predicted"] / row["measured"] - 1) for row in own)
    found = (
        f"{model}: Spearman {order:.2f} with layouts within {same:.1%} as ties; the chosen layout, {chosen['layout']}, "
        f"takes {behind:.1%} longer than the fastest, {fastest['layout']}; median error of a step {error:.0%}"
    )
    problems = [f"{model}: Spearman {order:.2f} < {ORDER}"] if order < ORDER else []
    if behind > BEHIND:
        problems.append(f"{model}: {chosen['layout']} takes {behind:.1%} longer than {fastest['layout']}")
    return found, problems


def run(options: argparse.Namespace) -> Report:
    """Time every layout of a model in turn, all of them beside one another."""
    device, rounds = calibrated(load_device("cpu"), RESULTS / "cpu"), 2 if options.quick else ROUNDS
    rows: list[dict[str, Any]] = []
    for model in list(MODELS)[: 1 if options.quick else None]:
        configs = {layout: configuration(model, layout) for layout in LAYOUTS}
        with ExitStack() as stack:
            samples = {
                layout: partial(stack.enter_context(Ranks(2, 1, step_call, config)).sample, "step")
                for layout, config in configs.items()
            }
            seconds = interleave(samples, rounds, TURNS)
        for layout, each in seconds.items():
            question = Question(configs[layout], 2, device, ours(configs[layout].parallel, device))
            predicted = evaluate(question, configs[layout]).step.seconds
            measured = {"measured": median(each), "spread": stdev(each) / median(each)}
            rows.append({"model": model, "layout": layout, "predicted": predicted, **measured})
    table = columns(["model", "layout"], ["predicted ms", "measured ms", "spread"])
    for row in rows:
        cells = (f"{1e3 * row[name]:.0f}" for name in ("predicted", "measured"))
        table.add_row(row["model"], row["layout"], *cells, f"{row['spread']:.1%}")
    judged = [judge(rows, model) for model in dict.fromkeys(row["model"] for row in rows)]
    problems = [problem for _, problems in judged for problem in problems]
    return Report([table, *(found for found, _ in judged)], {"rows": rows}, problems, "the order is as predicted")


def draw(path: Path) -> Path:
    """A bar for each layout's measured step, with a mark where it was predicted."""
    note = "Milliseconds of a step on two CPU ranks: bars are measured, red lines predicted."
    bars = [
        Bar(row["model"], row["layout"], {"ms": 1e3 * row["measured"]}, f"{1e3 * row['measured']:.0f}",
            1e3 * row["predicted"])
        for row in json.loads(path.read_text())["rows"]
    ]  # fmt: skip
    return write_bars(path, note, "ms", bars)


BENCH = Bench(
    name="planner",
    description="steps of 12 layouts of two models on two CPU ranks, beside those that the planner predicts",
    options=QUICK,
    run=run,
    draw=draw,
    note=NOTE,
)

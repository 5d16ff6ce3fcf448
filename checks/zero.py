"""`python -m bench zero`: bytes of parameters, gradients and optimizer state per rank under ZeRO, beside the formulas.

Belongs here: which layouts, the step that is measured, what must hold, tables and picture. The formulas are a dry run's
(tpformer.planner.states). The counting is in held.py and step_counts.py, the table of --split in split_backward.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from harness.bars import Bar, write_bars
from harness.ranks import Calls, Ranks
from harness.runner import Bench, Report, columns
from harness.step_counts import DATA, StepCounts, by_name, count_step, run_config
from tpformer.config import RunConfig
from tpformer.planner.states import (
    ACCUMULATED,
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Moments,
    rank_moments,
    stage_elements,
)
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizers
from tpformer.training.setup import build_model, run_mesh

from .held import KINDS, Held, held, live_bytes, watch_layers
from .split_backward import split_rows, split_table

# 18 positions: FSDP2 pads them, as 4 ranks do not divide 18
MODEL = {"vocab_size": 1024, "seq_length": 18, "n_layers": 8, "hidden_size": 128, "n_heads": 4}
RANKS, MICROBATCHES, BAR = 4, 4, 0.03
MOMENTS = IDLE, FORWARD, BACKWARD, STEP, PEAK = (
    *("idle", "end of forward", "end of backward", "after step"),
    "peak at layers",
)
GROUPS = ((PARAMETERS, COPIES), (ACCUMULATED, GRADIENTS), (OPTIMIZER,))  # each must be within BAR
PP = {"pipeline_parallel": 2}
CASES: dict[str, dict[str, Any]] = {
    "ZeRO 0 x4": {"data_parallel_replicate": 4},
    **{f"ZeRO {stage} x4": {"data_parallel_shard": 4, "zero_stage": stage} for stage in (1, 2, 3)},
    "ZeRO 3 2x2": {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 3},
    "PP2 1F1B ZeRO 0 x2": {**PP, "data_parallel_replicate": 2},
    **{f"PP2 1F1B ZeRO {stage} x2": {**PP, "data_parallel_shard": 2, "zero_stage": stage} for stage in (1, 2, 3)},
    **{
        f"PP2 {schedule} ZeRO {stage} x2": {
            **PP,
            "data_parallel_shard": 2,
            "zero_stage": stage,
            "pipeline_schedule": schedule,
        }
        for schedule, stage in (("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 1))
    },
}
DTYPES = ("bfloat16", "float32")
NOTE = (
    "Bytes per parameter of the rank's own parts. N: ranks that share; x4: four data-parallel ranks, 2x2: two groups "
    "of two that share. Columns: FSDP2's tensors, each storage once; formula: tpformer dry-run's; memory: all live "
    "storages, less those of before the model was built (no activations live at these moments). slides: 2 + 2 + 16 "
    "(16-bit parameters and gradients; float32 parameters, gradients, two moments), paper: 2 + 2 + 12 "
    "(arXiv:1910.02054), both divided by N as the stage says, and both for all moments; docs/zero.md names the "
    "differences."
)


Row = dict[str, Any]


class Measured(NamedTuple):
    """One rank's step: what it held at each moment, by kind and in all, and its collectives."""

    moments: dict[str, Held]
    memory: dict[str, int]
    collectives: StepCounts


class _Largest:
    """Keeps the largest of what `sample` sees."""

    def __init__(self, sample: Callable[[], Held]) -> None:
        self.sample, self.held = sample, Held()

    def __call__(self) -> None:
        now = self.sample()
        if sum(now.values()) > sum(self.held.values()):
            self.held = now


def measure(config: RunConfig) -> Measured:
    """Measure this rank's second step: the first creates the optimizer's state."""
    mesh = run_mesh(config, "cpu")
    gc.collect()
    before = live_bytes()
    model = build_model(config, mesh)
    optimizers = build_optimizers(model, config.optimizer)
    moments: dict[str, Held] = {}
    memory: dict[str, int] = {}

    def look(moment: str) -> None:
        # a thread of gloo lets go of a collective's tensors some time after its wait() has returned
        for wait in (0, 0.01, 0.1, 1, 5):
            time.sleep(wait)
            gc.collect()
            moments[moment], memory[moment] = held(model, optimizers), live_bytes() - before
            if memory[moment] <= (1 + BAR) * sum(moments[moment].values()):
                return

    forward, peak = (_Largest(lambda: held(model, optimizers)) for _ in range(2))
    watch_layers(model, sample=peak, at_end=forward)
    for step in (1, 2):
        with count_step(mesh) as counts:
            _backward(model, step)
        moments |= {FORWARD: forward.held, PEAK: peak.held}
        look(BACKWARD)
        for optimizer in optimizers:
            optimizer.step()
        look(STEP)
        for optimizer in optimizers:
            optimizer.zero_grad()
        look(IDLE)
    return Measured(moments, memory, counts)


def _backward(model: ModelParts, step: int) -> None:
    length = model.config.seq_length
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(model.config.vocab_size or 0, (MICROBATCHES, length + 1), generator=generator)
    model.gradients(batch, first_sample=step * 1000 + model.data_rank * MICROBATCHES)


def close(measured: Held, formula: Mapping[str, float]) -> bool:
    """Whether parameters, gradients and optimizer state are each within BAR of the formula."""
    pairs = [(sum(measured[k] for k in kinds), sum(formula.get(k, 0) for k in kinds)) for kinds in GROUPS]
    return all(abs(ours - theirs) <= BAR * theirs for ours, theirs in pairs)


def moment_rows(measured: Measured, formula: Moments) -> dict[str, Row]:
    """Each moment beside its formula, peaks in total only. held: bytes by kind, in the order of KINDS; memory: bytes of
    all live storages, None where activations live too."""
    by_kind = {IDLE: formula.idle, FORWARD: formula.forward, BACKWARD: formula.backward, STEP: formula.backward}
    rows: dict[str, Row] = {}
    for moment in MOMENTS:
        sizes, wanted, memory = measured.moments[moment], by_kind.get(moment), measured.memory.get(moment)
        total, expected = sum(sizes.values()), formula.peak if wanted is None else sum(wanted.values())
        right = [
            abs(total - expected) <= BAR * expected,
            wanted is None or close(sizes, wanted),
            memory is None or abs(memory - total) <= BAR * total,
        ]
        rows[moment] = {"held": list(sizes.values()), "formula": round(expected), "memory": memory, "ok": all(right)}
    return rows


def published(parameters: float, zero: int, shards: int, optimizer: int) -> int:
    """2 + 2 + `optimizer` bytes a parameter: 16 bits, its gradient, and state; divided by shards as the stage says."""
    sizes = ((2, zero == 3), (2, zero >= 2), (optimizer, zero >= 1))
    return round(sum(size * parameters / (shards if shared else 1) for size, shared in sizes))


def expected_collectives(config: RunConfig, pipeline_rank: int) -> list[int]:
    """All-gathers, reduce-scatters and all-reduces of a step.

    A unit of FSDP2 is a layer, or the root, which has all else. All-gathers of a unit: one a step below stage 3; in
    stage 3 a layer has two a microbatch and the root one, as the root stays gathered for the backward. Reduce-scatters
    of a unit: one a microbatch in stages 2 and 3, one a step below. All-reduces of a unit: one a step, among copies.
    """
    layout, sizes = config.parallel, stage_elements(config, pipeline_rank).values()
    layers, roots = sum(size.n_layers for size in sizes), sum(size.rest > 0 for size in sizes)
    shares, copies = layout.data_parallel_shard > 1, layout.data_parallel_replicate > 1
    gathers = MICROBATCHES * (2 * layers + roots) if layout.zero == 3 else layers + roots
    scatters = (layers + roots) * (MICROBATCHES if layout.zero >= 2 else 1)
    return [gathers * shares, scatters * shares, (layers + roots) * copies]


def zero_row(case: str, config: RunConfig, pipeline_rank: int, measured: Measured) -> Row:
    """What a rank held and communicated, beside the planner's formulas for its configuration. slides, paper: bytes by
    published formulas, for 16-bit compute only."""
    layout, low = config.parallel, config.train.dtype == "bfloat16"
    m = sum(size.total for size in stage_elements(config, pipeline_rank).values())
    numbers = by_name(measured.collectives, DATA)
    slides, paper = (published(m, layout.zero, layout.data_parallel_shard, size) if low else None for size in (16, 12))
    return {
        "case": case,
        "dtype": config.train.dtype,
        "rank": pipeline_rank,
        "shards": layout.data_parallel_shard,
        "parameters": round(m),
        "slides": slides,
        "paper": paper,
        "moments": moment_rows(measured, rank_moments(config, pipeline_rank)),
        "collectives": [numbers.get(name, 0) for name in ("all_gather", "reduce_scatter", "all_reduce")],
        "expected": expected_collectives(config, pipeline_rank),
    }


def problems_of(rows: Sequence[Row]) -> list[str]:
    """The moments and counts that are not as they should be."""
    found = []
    for row in rows:
        where = f"{row['case']}, {row['dtype']}, pp rank {row['rank']}"
        for moment, each in row["moments"].items():
            if not each["ok"]:
                found.append(f"{where}, {moment}: {sum(each['held']) / each['formula'] - 1:+.2%}")
        if row["collectives"] != row["expected"]:
            found.append(f"{where}: {row['collectives']} collectives, not {row['expected']}")
    return found


def zero_table(rows: Sequence[Row]) -> Table:
    """A line for each moment."""
    kinds = ("N", "pp rank", "shards", "gathered", "grads", "grad shards", "optimizer", "buffers")
    sums = ("total", "formula", "off by", "memory", "slides", "paper", "ok")
    table = columns(("layout", "moment"), (*kinds, *sums))
    for row in rows:
        for moment, found in row["moments"].items():
            total, formula = sum(found["held"]), found["formula"]
            sizes = (*found["held"], total, formula, found["memory"], row["slides"], row["paper"])
            cells = ["" if size is None else f"{size / row['parameters']:.3f}" for size in sizes]
            cells.insert(8, f"{total / formula - 1:+.2%}")
            table.add_row(
                f"{row['case']}, {row['dtype']}" if moment == IDLE else "",
                *(moment, str(row["shards"]), str(row["rank"]), *cells, "yes" if found["ok"] else "NO"),
            )
    return table


def collective_table(rows: Sequence[Row]) -> Table:
    """Counts, and what they should be where they are not."""
    table = Table("layout", "pp rank", "all-gather", "reduce-scatter", "all-reduce", "ok", box=None, pad_edge=False)
    for row in rows:
        pairs = list(zip(row["collectives"], row["expected"], strict=True))
        cells = (f"{ours}" if ours == wanted else f"{ours}, not {wanted}" for ours, wanted in pairs)
        ok = all(ours == wanted for ours, wanted in pairs)
        table.add_row(f"{row['case']}, {row['dtype']}", str(row["rank"]), *cells, "yes" if ok else "NO")
    return table


def draw(path: Path) -> Path:
    """Bars of what the first pipeline rank of each layout holds in bfloat16."""
    result, bars = json.loads(path.read_text()), []
    for row in result["rows"]:
        if row["dtype"] == "bfloat16" and row["rank"] == 0:
            m = row["parameters"]
            for moment, found in row["moments"].items():
                sizes = {kind: size / m for kind, size in zip(result["kinds"], found["held"], strict=True)}
                total = f"{sum(sizes.values()):.2f}"
                bars.append(Bar(row["case"], moment, sizes, total, mark=found["formula"] / m))
    note = (
        "Bytes per parameter on one rank: bfloat16 compute, float32 master weights, 4 microbatches. Red lines: the "
        "formulas of tpformer dry-run. x4: four data-parallel ranks; 2x2: two groups of two that share; PP2: two "
        "pipeline ranks, the first is shown."
    )
    return write_bars(path, note, "bytes per parameter", bars)


def setup(configs: Mapping[str, RunConfig]) -> Calls:
    """A rank's calls: `measure` of each configuration, by name."""
    return {name: partial(measure, config) for name, config in configs.items()}


def measure_all(dtypes: Sequence[str]) -> list[Row]:
    """Rows of all cases: of each pipeline rank's ranks the first one's, and any other's that has a problem."""
    rows: list[Row] = []
    configs = {(case, dtype): run_config(CASES[case], dtype, MODEL, MICROBATCHES) for dtype in dtypes for case in CASES}
    with Ranks(RANKS, 1, setup, {str(key): config for key, config in configs.items()}) as ranks:
        for key, config in configs.items():
            share = RANKS // config.parallel.pipeline_parallel
            for rank, measured in enumerate(ranks.call(str(key))):
                row = zero_row(key[0], config, rank // share, measured)
                rows += [row] if rank % share == 0 or problems_of([row]) else []
    return rows


def run(options: argparse.Namespace) -> Report:
    """Measure both dtypes and the counts of split backwards, or what an option leaves of that."""
    content: Row = {"model": MODEL, "microbatches": MICROBATCHES, "bar": BAR, "kinds": KINDS}
    tables: list[Table | str] = []
    problems: list[str] = []
    if not options.split:
        content["rows"] = rows = measure_all([options.dtype] if options.dtype else DTYPES)
        tables += [zero_table(rows), "", collective_table(rows)]
        problems += problems_of(rows)
    if options.dtype is None:
        content["splits"], found = split_rows()
        title = "\nTP 2 x PP 2 x DP 2, all ranks together, 4 microbatches, untied embeddings"
        tables += [title, split_table(content["splits"])]
        problems += found
    return Report(tables, content, problems, f"every size is within {BAR:.0%} of its formula, every count is exact")


BENCH = Bench(
    name="zero",
    description="bytes per rank of parameters, gradients, optimizer state under ZeRO 0-3, beside formulas; on a CPU",
    options={
        "--split": {"action": "store_true", "help": "only the counts of split-backward schedules; not written"},
        "--dtype": {"choices": DTYPES, "help": "only this compute dtype, no other counts; nothing written"},
    },
    run=run,
    draw=draw,
    note=NOTE,
)

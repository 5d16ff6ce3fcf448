"""`python -m bench zero`: bytes of parameters, gradients and optimizer state per rank under ZeRO, beside the formulas.

Belongs here: which layouts, the step that is measured, the rows, what must hold, the tables, the result file. The
counting is in held.py and step_counts.py, the formulas are in zero_formulas.py, the table of --split in
split_backward.py.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tpformer.config import RunConfig, build_config, check_config
from tpformer.models import GPT
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, default_dtype, run_mesh

from .held import (
    GATHERED,
    OPTIMIZER,
    SHARDED,
    SHARDED_GRADIENTS,
    WHOLE_GRADIENTS,
    Held,
    at_layers,
    held,
    live_bytes,
)
from .ranks import Calls, Ranks
from .runner import Tool, write
from .split_backward import split_rows, split_table
from .step_counts import StepCounts, count_step
from .zero_chart import draw_moments
from .zero_formulas import BACKWARD, FORWARD, IDLE, STEP, Expected, Move, PartSizes, Plan, expected, paper, slides

# 18 positions: FSDP2 pads them, as 4 ranks do not divide 18
MODEL = {"vocab_size": 1024, "seq_length": 18, "n_layers": 8, "hidden_size": 128, "n_heads": 4}
RANKS, MICROBATCHES, BAR = 4, 4, 0.03
PEAK = "peak at layers"
GROUPS = {
    "parameters": (SHARDED, GATHERED),
    "gradients": (WHOLE_GRADIENTS, SHARDED_GRADIENTS),
    "optimizer": (OPTIMIZER,),
}
PP = {"pipeline_parallel": 2}
CASES: dict[str, dict[str, Any]] = {
    "ZeRO 0 x4": {"data_parallel_replicate": 4},
    **{f"ZeRO {stage} x4": {"data_parallel_shard": 4, "zero_stage": stage} for stage in (1, 2, 3)},
    "ZeRO 3 2x2": {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 3},
    "PP2 1F1B ZeRO 0 x2": {**PP, "data_parallel_replicate": 2},
    **{f"PP2 1F1B ZeRO {stage} x2": {**PP, "data_parallel_shard": 2, "zero_stage": stage} for stage in (1, 2, 3)},
    **{
        f"PP2 Interleaved1F1B ZeRO {stage} x2": {
            **PP,
            "data_parallel_shard": 2,
            "zero_stage": stage,
            "pipeline_schedule": "Interleaved1F1B",
        }
        for stage in (2, 3)
    },
    "PP2 ZBVZeroBubble ZeRO 1 x2": {**PP, "data_parallel_shard": 2, "pipeline_schedule": "ZBVZeroBubble"},
}
DTYPES = ("bfloat16", "float32")
NOTE = (
    "Bytes per parameter of the rank's own parts. N: ranks that share. Columns: FSDP2's tensors, each storage once; "
    "memory: all live storages, less those of before the model was built (no activations live at these moments). "
    "slides: 2 + 2 + 16 (16-bit parameters and gradients; float32 parameters, gradients, two moments), paper: 2 + 2 + "
    "12 (arXiv:1910.02054), both divided by N as the stage says, and both for all moments; docs/zero.md names the "
    "differences."
)


class ZeroRow(TypedDict):
    """One moment of one rank. bytes by kind of thing held; expected_bytes: the formula's, peaks only in total; memory:
    of all live storages, None where activations live too."""

    case: str
    dtype: str
    zero: int
    shards: int
    rank: int
    parameters: int
    moment: str
    bytes: Held
    total: int
    expected_bytes: Held | None
    expected_total: int
    relative: float
    memory: int | None
    slides: int | None
    paper: int | None
    ok: bool


class CollectiveRow(TypedDict):
    """FSDP2's collectives in one step of one rank."""

    case: str
    dtype: str
    rank: int
    all_gather: int
    reduce_scatter: int
    all_reduce: int
    expected: list[int]
    ok: bool


class Measured(NamedTuple):
    """One rank's step."""

    parts: list[PartSizes]
    plan: Plan
    moves: list[Move]
    moments: dict[str, Held]
    memory: dict[str, int]
    collectives: StepCounts


def _padded(parameter: nn.Parameter, shards: int) -> int:
    """Elements of a sharded parameter, with FSDP2's padding."""
    assert isinstance(parameter, DTensor)
    dim = next((p.dim for p in reversed(parameter.placements[:-1]) if isinstance(p, Shard)), 0)
    size = parameter.shape[dim]
    return parameter.numel() // size * (-(-size // shards) * shards)


def part_sizes(part: GPT, stage: int, shards: int) -> PartSizes:
    """Of a part with FSDP2 applied, before its first forward or after a backward."""
    layers = [list(layer.parameters()) for layer in part.layers.values()]
    root = [parameter for name, parameter in part.named_parameters() if not name.startswith("layers.")]
    return PartSizes(
        stage=stage,
        total=sum(parameter.numel() for parameter in part.parameters()),
        padded=sum(_padded(parameter, shards) for parameter in part.parameters()),
        root=sum(_padded(parameter, shards) for parameter in root),
        layer=max(sum(parameter.numel() for parameter in layer) for layer in layers),
        n_layers=len(layers),
        queued=sum(parameter.numel() for layer in layers for parameter in layer if parameter.ndim > 1),
        early=sum(parameter.numel() for parameter in root) if part.is_last and not part.is_first else 0,
    )


def run_config(parallel: Mapping[str, Any], dtype: str, model: Mapping[str, Any] = MODEL) -> RunConfig:
    """MICROBATCHES microbatches of one sample for every data-parallel rank."""
    share = parallel.get("data_parallel_shard", 1) * parallel.get("data_parallel_replicate", 1)
    config = build_config(
        {
            "model": dict(model),
            "data": {"train": ["unused"]},
            "parallel": dict(parallel),
            "train": {
                "steps": 2,
                "dtype": dtype,
                "global_batch_size": share * MICROBATCHES,
                "microbatch_size": 1,
            },
        }
    )
    check_config(config)
    return config


class _Largest:
    """Keeps the largest of what `sample` sees."""

    def __init__(self, sample: Callable[[], Held]) -> None:
        self.sample, self.held = sample, Held()

    def __call__(self) -> None:
        now = self.sample()
        if sum(now.values()) > sum(self.held.values()):
            self.held = now


def measure(parallel: Mapping[str, Any], dtype: str, model: Mapping[str, Any] = MODEL) -> Measured:
    """This rank's second step, when the optimizer's state is there."""
    config = run_config(parallel, dtype, model)
    layout, compute = config.parallel, default_dtype(config)
    mesh = run_mesh(config, "cpu")
    gc.collect()
    before = live_bytes()
    whole = build_model(config, mesh)
    stages = layout.stages_of(mesh["pp"].get_local_rank())
    parts = [part_sizes(p, stage, layout.data_parallel_shard) for p, stage in zip(whole.parts, stages, strict=True)]
    optimizers = [build_optimizer(part, config.optimizer) for part in whole.parts]
    moments: dict[str, Held] = {}
    memory: dict[str, int] = {}

    def look(moment: str) -> None:
        gc.collect()
        moments[moment], memory[moment] = held(whole, optimizers), live_bytes() - before

    for step in (1, 2):
        forward, peak = (_Largest(lambda: held(whole, optimizers)) for _ in range(2))
        recording = nullcontext([]) if whole.pipeline is None else whole.pipeline.recording()
        with at_layers(whole, sample=peak, at_end=forward), recording as actions, count_step() as counts:
            _backward(whole, step)
        moments |= {FORWARD: forward.held, PEAK: peak.held}
        look(BACKWARD)
        for optimizer in optimizers:
            optimizer.step()
        look(STEP)
        for optimizer in optimizers:
            optimizer.zero_grad()
        look(IDLE)
    moves = [Move(action.stage, action.kind) for action in actions]
    if whole.pipeline is None:
        moves = [*(Move(0, kind) for _ in range(MICROBATCHES) for kind in "FB"), Move(0, "R")]
    accumulate = max(compute.itemsize, getattr(torch, layout.reduce_dtype).itemsize)
    plan = Plan(layout.zero, layout.data_parallel_shard, compute.itemsize, accumulate)
    return Measured(parts, plan, moves, moments, memory, counts)


def _backward(model: ModelParts, step: int) -> None:
    length = model.config.seq_length
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(model.config.vocab_size or 0, (MICROBATCHES, length + 1), generator=generator)
    model.gradients(batch, first_sample=step * 1000 + model.data_rank * MICROBATCHES, step=step)


def close(measured: Held, formula: Held) -> bool:
    """Whether parameters, gradients and optimizer state are each within BAR of the formula."""
    pairs = [(sum(measured[k] for k in kinds), sum(formula[k] for k in kinds)) for kinds in GROUPS.values()]
    return all(abs(ours - theirs) <= BAR * theirs for ours, theirs in pairs)


def zero_rows(case: str, dtype: str, rank: int, measured: Measured) -> list[ZeroRow]:
    formula: Expected = expected(measured.parts, measured.plan, measured.moves, pipeline="PP" in case)
    parameters, plan = sum(part.total for part in measured.parts), measured.plan
    rows: list[ZeroRow] = []
    for moment in (IDLE, FORWARD, BACKWARD, STEP, PEAK):
        sizes, wanted = measured.moments[moment], formula.moments.get(moment)
        total, wanted_total = sum(sizes.values()), sum(wanted.values()) if wanted else formula.peak
        memory = measured.memory.get(moment)
        right = [
            abs(total - wanted_total) <= BAR * wanted_total,
            wanted is None or close(sizes, wanted),
            memory is None or abs(memory - total) <= BAR * total,
        ]
        rows.append(
            {
                "case": case,
                "dtype": dtype,
                "zero": plan.zero,
                "shards": plan.shards,
                "rank": rank,
                "parameters": parameters,
                "moment": moment,
                "bytes": sizes,
                "total": total,
                "expected_bytes": wanted,
                "expected_total": wanted_total,
                "relative": round(total / wanted_total - 1, 5),
                "memory": memory,
                "slides": slides(parameters, plan) if plan.compute == 2 else None,
                "paper": paper(parameters, plan) if plan.compute == 2 else None,
                "ok": all(right),
            }
        )
    return rows


def collective_row(case: str, dtype: str, rank: int, parallel: Mapping[str, Any], measured: Measured) -> CollectiveRow:
    """One all-gather a unit and step below stage 3, where it is two a microbatch (the root's stays for the backward);
    one reduce-scatter a unit and microbatch in stages 2 and 3, below one a step; one all-reduce a unit and step."""
    plan, parts = measured.plan, measured.parts
    layers, roots = sum(part.n_layers for part in parts), sum(part.root > 0 for part in parts)
    shares, copies = plan.shards > 1, parallel.get("data_parallel_replicate", 1) > 1
    gathers = MICROBATCHES * (2 * layers + roots) if plan.zero == 3 else layers + roots
    scatters = (layers + roots) * (MICROBATCHES if plan.zero >= 2 else 1)
    wanted = [gathers * shares, scatters * shares, (layers + roots) * copies]
    counted = [measured.collectives.number(name) for name in ("all_gather", "reduce_scatter", "all_reduce")]
    return {
        "case": case,
        "dtype": dtype,
        "rank": rank,
        "all_gather": counted[0],
        "reduce_scatter": counted[1],
        "all_reduce": counted[2],
        "expected": wanted,
        "ok": counted == wanted,
    }


def zero_table(rows: Sequence[ZeroRow]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layout", "moment"):
        table.add_column(name, no_wrap=True)
    for name in (
        *("N", "pp rank", "shards", "gathered", "grads", "grad shards", "optimizer", "buffers"),
        *("total", "formula", "off by", "memory", "slides", "paper", "ok"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        m, first = row["parameters"], row["moment"] == IDLE

        def per(size: int | None, m: int = m) -> str:
            return "" if size is None else f"{size / m:.3f}"

        table.add_row(
            *(f"{row['case']}, {row['dtype']}" if first else "", row["moment"], str(row["shards"]), str(row["rank"])),
            *(per(size) for size in row["bytes"].values()),
            *(per(row["total"]), per(row["expected_total"]), f"{row['relative']:+.2%}", per(row["memory"])),
            *(per(row["slides"]), per(row["paper"]), "yes" if row["ok"] else "NO"),
        )
    return table


def collective_table(rows: Sequence[CollectiveRow]) -> Table:
    table = Table("layout", "pp rank", "all-gather", "reduce-scatter", "all-reduce", "ok", box=None, pad_edge=False)
    for row in rows:
        counts = (row["all_gather"], row["reduce_scatter"], row["all_reduce"])
        cells = (
            f"{ours}" if ours == wanted else f"{ours}, not {wanted}"
            for ours, wanted in zip(counts, row["expected"], strict=True)
        )
        table.add_row(f"{row['case']}, {row['dtype']}", str(row["rank"]), *cells, "yes" if row["ok"] else "NO")
    return table


def setup(cases: Mapping[str, Mapping[str, Any]]) -> Calls:
    """A rank's calls: `measure` of each case and dtype."""
    return {
        f"{case} {dtype}": partial(measure, parallel, dtype) for case, parallel in cases.items() for dtype in DTYPES
    }


def measure_all(dtypes: Sequence[str]) -> tuple[list[ZeroRow], list[CollectiveRow]]:
    """Rows of all cases: the first rank of each pipeline rank is shown, all must hold."""
    rows: list[ZeroRow] = []
    collectives: list[CollectiveRow] = []
    with Ranks(RANKS, 1, setup, CASES) as ranks:
        for dtype in dtypes:
            for case, parallel in CASES.items():
                results = ranks.call(f"{case} {dtype}")
                share = RANKS // parallel.get("pipeline_parallel", 1)
                for rank, measured in enumerate(results):
                    of_rank = zero_rows(case, dtype, rank // share, measured)
                    moved = collective_row(case, dtype, rank // share, parallel, measured)
                    shown = rank % share == 0
                    rows += [row for row in of_rank if shown or not row["ok"]]
                    collectives += [moved] if shown or not moved["ok"] else []
    return rows, collectives


def run(arguments: Sequence[str], results: Path, console: Console) -> int:
    """The tool; the exit code: 1 where bytes or counts are not what the formulas say."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {TOOL.name}", description=TOOL.description)
    parser.add_argument("--split", action="store_true", help="only the counts of split-backward schedules; not written")
    parser.add_argument("--dtype", choices=DTYPES, help="only this compute dtype, no other counts; nothing written")
    options = parser.parse_args(arguments)
    rows: list[ZeroRow] = []
    moved: list[CollectiveRow] = []
    problems: list[str] = []
    content: dict[str, Any] = {"note": NOTE, "model": MODEL, "microbatches": MICROBATCHES, "bar": BAR}
    if not options.split:
        rows, moved = measure_all([options.dtype] if options.dtype else DTYPES)
        console.print(zero_table(rows), highlight=False)
        console.print(f"\n{NOTE}\n", highlight=False, soft_wrap=True)
        console.print(collective_table(moved), highlight=False)
        problems += [f"{r['case']}, {r['dtype']}, {r['moment']}: {r['relative']:+.2%}" for r in rows if not r["ok"]]
        problems += [f"{r['case']}, {r['dtype']}: {r}" for r in moved if not r["ok"]]
    if options.dtype is None:
        splits, found = split_rows()
        console.print("\nTP 2 x PP 2 x DP 2, all ranks together, 4 microbatches, untied embeddings", highlight=False)
        console.print(split_table(splits), highlight=False)
        problems += found
        content |= {"rows": rows, "collectives": moved, "splits": splits}
    if not options.split and options.dtype is None:
        write(TOOL, content, device="cpu", results=results, draw=draw_moments, console=console)
    for problem in problems or [f"every size is within {BAR:.0%} of its formula, every count is exact"]:
        console.print(f"zero: {problem}", highlight=False, soft_wrap=True)
    return 1 if problems else 0


TOOL = Tool(
    name="zero",
    description="bytes per rank of parameters, gradients, optimizer state under ZeRO 0-3, beside formulas; on a CPU",
    run=run,
)

"""The table of `python -m bench zero --split`: split-backward schedules do exactly what 1F1B does, counted.

Belongs here: the counted cases, the rows, what must hold. The counting is in step_counts.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from harness.ranks import Calls, Ranks
from harness.runner import columns
from harness.step_counts import (
    DATA,
    GEMMS,
    LAYERS,
    SENDS,
    Call,
    StepCounts,
    by_name,
    bytes_of,
    count_step,
    run_config,
)
from tpformer.config import RECOMPUTE
from tpformer.training.setup import build_model, run_mesh

BASELINE = "1F1B"
SCHEDULES = (BASELINE, "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# untied: a tied table costs an all-reduce between the first and the last rank, none where a V schedule has both on one
MODEL = {"vocab_size": 250, "seq_length": 16, "n_layers": 4, "hidden_size": 32, "n_heads": 4, "tie_embeddings": False}
EXPERTS = {  # the same with experts, of which each microbatch's tokens choose some
    **{"n_experts": 4, "expert_ffn_size": 24, "shared_expert_size": 16, "activation": "swiglu", "bias": False},
    **{"router_bias": True, "first_dense_layers": 1},
}
MICROBATCHES = 4


def count_schedule(schedule: str, recompute: str, data_parallel: int, experts: bool = False) -> StepCounts:
    """This rank's counts of one step of the schedule: forward and backward of all microbatches, and the reduction."""
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel_shard": data_parallel}
    parallel = {**sizes, "pipeline_schedule": schedule, "recompute": recompute}
    config = run_config(parallel, "float32", MODEL | (EXPERTS if experts else {}), MICROBATCHES)
    mesh = run_mesh(config, "cpu")
    model = build_model(config, mesh)
    assert model.pipeline is not None
    tokens = torch.randint(MODEL["vocab_size"], (MICROBATCHES, MODEL["seq_length"]))
    index = torch.arange(MICROBATCHES)
    step = partial(model.pipeline.step, tokens, tokens, targets=tokens, sample_index=index, step=1)
    step()  # which also opens the engine's connections
    with count_step(mesh) as counts:
        step()
    return counts


def differences(counts: StepCounts, baseline: StepCounts) -> list[str]:
    """A sentence for each call that one of the two steps makes more often than the other, messages left out."""
    return [
        f"{call}: {counts[call]}, not {baseline[call]}"
        for call in {**counts, **baseline}
        if call.of != SENDS and counts[call] != baseline[call]
    ]


def make_row(schedule: str, recompute: str, counts: StepCounts, ok: bool) -> dict[str, Any]:
    """What all ranks do together in one step. sends: point-to-point messages; more stages exchange more."""
    return {
        "schedule": schedule,
        "recompute": recompute,
        "stages": 2 if schedule == BASELINE else 4,
        "gemm_flops": counts[Call(GEMMS)],
        "layer_collectives": by_name(counts, LAYERS),
        "layer_bytes": bytes_of(counts, LAYERS),
        "data_collectives": by_name(counts, DATA),
        "data_bytes": bytes_of(counts, DATA),
        "sends": sum(by_name(counts, SENDS).values()),
        "ok": ok,
    }


def setup(data_parallel: int) -> Calls:
    """A rank's calls: count_schedule of each schedule and recompute mode."""
    return {
        f"{schedule} {recompute}": partial(count_schedule, schedule, recompute, data_parallel)
        for schedule, recompute in itertools.product(SCHEDULES, RECOMPUTE)
    }


def split_rows(data_parallel: int = 2) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of all schedules under TP 2, PP 2 and data_parallel, on that many processes; and what is not as it should
    be."""
    rows, problems = [], []
    with Ranks(4 * data_parallel, 1, setup, data_parallel) as ranks:
        for recompute in RECOMPUTE:
            counts: dict[str, StepCounts] = {
                each: sum(ranks.call(f"{each} {recompute}"), Counter()) for each in SCHEDULES
            }
            for schedule in SCHEDULES:
                found = differences(counts[schedule], counts[BASELINE])
                problems += [f"{schedule}, recompute {recompute}: {problem}" for problem in found]
                rows.append(make_row(schedule, recompute, counts[schedule], not found))
    return rows, problems


def split_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each schedule and recompute mode."""
    table = columns(("schedule", "recompute"))
    for name in (
        "stages",
        "GEMM MFLOPs",
        "layers' collectives",
        "bytes",
        "FSDP2's collectives",
        "bytes",
        "sends",
        "ok",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        layers, data = (
            ", ".join(f"{n} {name}" for name, n in calls.items())
            for calls in (row["layer_collectives"], row["data_collectives"])
        )
        table.add_row(
            *(row["schedule"], row["recompute"], str(row["stages"]), f"{row['gemm_flops'] / 1e6:.3f}"),
            *(layers, f"{row['layer_bytes']:,}", data, f"{row['data_bytes']:,}", str(row["sends"])),
            "yes" if row["ok"] else "NO",
        )
    return table

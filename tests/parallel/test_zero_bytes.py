"""What ranks hold at each moment of a ZeRO step, and FSDP2's collectives in it, are what docs/zero.md says. A pipeline
frees its messages."""

import gc
import itertools
from typing import Any

import pytest
import torch
from pool import WorkerPool
from turns import in_turns, of_turn

from checks import zero
from harness.step_counts import DATA, by_name, run_config
from tpformer.planner.states import ACCUMULATED, stage_elements
from tpformer.planner.storages import live_storages
from tpformer.training.setup import build_model, run_mesh

SMALL = {**zero.MODEL, "vocab_size": 250, "hidden_size": 64, "n_layers": 4}
CHOSEN = [("PP2 Interleaved1F1B ZeRO 3 x2", "bfloat16")]
OTHERS = [(case, dtype) for case, dtype in zip(zero.CASES, itertools.cycle(zero.DTYPES)) if case not in dict(CHOSEN)]


@pytest.mark.parametrize("case, dtype", [*CHOSEN, *in_turns(OTHERS)])
def test_bytes_and_collectives(ranks: WorkerPool, case: str, dtype: str) -> None:
    """What four ranks hold and communicate is what the planner's formulas say."""
    config = run_config(zero.CASES[case], dtype, SMALL)
    measured, share = ranks(4).run(zero.measure, config), 4 // config.parallel.pipeline_parallel
    rows = [zero.zero_row(case, config, rank // share, each) for rank, each in enumerate(measured)]
    assert all(len(row["moments"]) == 5 for row in rows)
    assert zero.problems_of(rows) == []


@of_turn(1)
def test_reduction_in_16_bits(ranks: WorkerPool) -> None:
    """Microbatches add up in bfloat16 only where FSDP2 can do nothing else: before its reduction, below stage 2."""
    parallel = {"data_parallel_shard": 2, "data_parallel_replicate": 2, "reduce_dtype": "bfloat16"}
    model, units = {**SMALL, "n_layers": 1}, 2
    configs = [run_config({**parallel, "zero_stage": stage}, "bfloat16", model) for stage in (1, 2)]
    first, second = (ranks(4).run(zero.measure, config) for config in configs)
    once, each = (by_name(measured[0].collectives, DATA) for measured in (first, second))
    assert each["all_reduce"] == each["reduce_scatter"] == units * zero.MICROBATCHES
    assert once["all_reduce"] == units
    (size,) = stage_elements(configs[0], 0).values()
    assert first[0].moments[zero.FORWARD][ACCUMULATED] == 2 * size.total
    assert second[0].moments[zero.FORWARD][ACCUMULATED] == 0


def boundary_tensors(schedule: str, n_microbatches: int) -> tuple[int, int]:
    """Count the storages of the size of what passes between stages, a size that no parameter has. Returns the most at
    the end of a part's forward, and those after a step."""
    model = {"vocab_size": 250, "seq_length": 24, "position": "rope", "n_layers": 4, "hidden_size": 32, "n_heads": 2}
    layout = {"pipeline_parallel": 2, "pipeline_schedule": schedule}
    config = run_config(layout, "float32", model, n_microbatches)
    parallel = build_model(config, run_mesh(config, "cpu"))
    counts, batch = [], torch.randint(250, (n_microbatches, 25))

    def count(*_: Any) -> None:
        counts.append(sum(storage.nbytes() == 24 * 32 * 4 for storage in live_storages(lambda x: not x.is_meta)))

    gc.collect()
    count()
    for step in (1, 2):
        for part in parallel.parts if step == 2 else ():
            part.register_forward_hook(count)
        parallel.gradients(batch, first_sample=0)
    gc.collect()
    count()
    before, *within, after = counts
    return max(within) - before, after - before


def test_messages_do_not_outlive_their_microbatch(ranks: WorkerPool) -> None:
    """torch's stages would keep for good what all microbatches received, and its gradients."""
    few, many = (ranks(2).run(boundary_tensors, "1F1B", n) for n in (4, 8))
    assert [after for _, after in (*few, *many)] == [0] * 4
    assert [largest for largest, _ in few] == [largest for largest, _ in many]
    # with several stages on a rank the engine keeps what was sent to the end of the step, and frees it there
    assert [after for _, after in ranks(2).run(boundary_tensors, "ZBVZeroBubble", 4)] == [0, 0]

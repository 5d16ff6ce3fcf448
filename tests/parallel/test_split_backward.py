"""Schedules that split the backward have exactly the GEMMs and collectives of 1F1B, with any recomputation."""

from collections import Counter

import pytest
from pool import WorkerPool
from turns import in_turns

from checks.split_backward import BASELINE, MICROBATCHES, SCHEDULES, count_schedule, differences
from harness.step_counts import DATA, GEMMS, LAYERS, SENDS, Call, StepCounts, by_name


def counts(ranks: WorkerPool, recompute: str, data_parallel: int, experts: bool = False) -> dict[str, StepCounts]:
    world = ranks(4 * data_parallel)
    options = recompute, data_parallel, experts
    return {name: sum(world.run(count_schedule, name, *options), Counter()) for name in SCHEDULES}


def check(by_schedule: dict[str, StepCounts], data_parallel: int) -> None:
    baseline = by_schedule[BASELINE]
    assert baseline[Call(GEMMS)] > 0 and by_name(baseline, LAYERS)
    assert bool(by_name(baseline, DATA)) == (data_parallel > 1)
    for name in SCHEDULES:
        assert differences(by_schedule[name], baseline) == [], name
    # at each boundary between ranks activations and gradients are sent; schedules with more stages have more of them
    pipelines = 2 * data_parallel  # one of 2 ranks for every tensor-parallel and data-parallel index
    boundaries = {BASELINE: 1, "InterleavedZeroBubble": 3, "ZBVZeroBubble": 2, "DualPipeV": 2}
    sent = {name: sum(by_name(each, SENDS).values()) for name, each in by_schedule.items()}
    assert sent == {name: pipelines * 2 * MICROBATCHES * number for name, number in boundaries.items()}


def test_schedules_multiply_and_communicate_the_same(ranks: WorkerPool) -> None:
    """Where a layer's experts are recomputed, and its attention is not."""
    check(counts(ranks, "mlp", 1, experts=True), 1)


def test_the_comparison_notices_gemms_and_gathers_that_are_repeated(ranks: WorkerPool) -> None:
    modes = ("none", "full")
    kept, recomputed = (sum(ranks(4).run(count_schedule, BASELINE, mode, 1), Counter()) for mode in modes)
    found = differences(recomputed, kept)
    assert {problem.split(",")[0].split(":")[0] for problem in found} == {LAYERS, GEMMS}
    assert recomputed[Call(GEMMS)] > kept[Call(GEMMS)]


@pytest.mark.parametrize(
    "recompute, data_parallel, experts",
    in_turns([("none", 1, False), ("mlp", 2, False), ("full", 2, False), ("full", 1, True)]),
)
def test_other_counts(ranks: WorkerPool, recompute: str, data_parallel: int, experts: bool) -> None:
    check(counts(ranks, recompute, data_parallel, experts), data_parallel)

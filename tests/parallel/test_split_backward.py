"""Schedules that split the backward have exactly the GEMMs and collectives of 1F1B, with any recomputation."""

from collections import Counter

import pytest
from pool import WorkerPool
from turns import in_turns, of_turn

from checks.split_backward import BASELINE, MICROBATCHES, SCHEDULES, count_schedule, differences
from harness.step_counts import DATA, GEMMS, LAYERS, SENDS, Call, by_name


@pytest.mark.parametrize("recompute, data_parallel, experts, schedules", [
    ("mlp", 1, True, (BASELINE, "ZBVZeroBubble")),  # a layer's experts are recomputed, and its attention is not
    *in_turns((*case, tuple(SCHEDULES)) for case in (
        ("none", 1, False), ("mlp", 2, False), ("full", 2, False), ("full", 1, True), ("mlp", 1, True)
    )),
])  # fmt: skip
def test_schedules_multiply_and_communicate_the_same(
    ranks: WorkerPool, recompute: str, data_parallel: int, experts: bool, schedules: tuple[str, ...]
) -> None:
    world, options = ranks(4 * data_parallel), (recompute, data_parallel, experts)
    by_schedule = {name: sum(world.run(count_schedule, name, *options), Counter()) for name in schedules}
    baseline = by_schedule[BASELINE]
    assert baseline[Call(GEMMS)] > 0 and by_name(baseline, LAYERS)
    assert bool(by_name(baseline, DATA)) == (data_parallel > 1)
    for name, found in by_schedule.items():
        assert differences(found, baseline) == [], name
    # at each boundary between ranks activations and gradients are sent; schedules with more stages have more of them
    pipelines = 2 * data_parallel  # one of 2 ranks for every tensor-parallel and data-parallel index
    boundaries = {BASELINE: 1, "InterleavedZeroBubble": 3, "ZBVZeroBubble": 2, "DualPipeV": 2}
    sent = {name: sum(by_name(each, SENDS).values()) for name, each in by_schedule.items()}
    assert sent == {name: pipelines * 2 * MICROBATCHES * boundaries[name] for name in schedules}


@of_turn(1)
def test_the_comparison_notices_gemms_and_gathers_that_are_repeated(ranks: WorkerPool) -> None:
    modes = ("none", "full")
    kept, recomputed = (sum(ranks(4).run(count_schedule, BASELINE, mode, 1), Counter()) for mode in modes)
    found = differences(recomputed, kept)
    assert {problem.split(",")[0].split(":")[0] for problem in found} == {LAYERS, GEMMS}
    assert recomputed[Call(GEMMS)] > kept[Call(GEMMS)]

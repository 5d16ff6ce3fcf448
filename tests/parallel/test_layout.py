"""A layout's sizes follow from its fields, and contradictions are refused before a process group exists."""

import pytest

from tpformer.parallel import SCHEDULES, Layout


def test_sizes_and_defaults():
    layout = Layout(tensor_parallel=2, pipeline_parallel=4, data_parallel_replicate=3, data_parallel_shard=5)
    assert layout.world_size == 2 * 4 * 3 * 5 and layout.data_parallel == 15
    assert layout.zero == 1 and layout.n_stages == 4
    assert Layout().zero == 0 and Layout(data_parallel_shard=2, zero_stage=3).zero == 3
    assert Layout(pipeline_schedule="ZBVZeroBubble").n_stages == 1, "without a pipeline there is one stage"


def test_every_stage_is_on_one_rank_and_what_is_possible_is_not_refused():
    for name, kind in SCHEDULES.items():
        layout = Layout(pipeline_parallel=2, pipeline_schedule=name, data_parallel_shard=2)
        layout.check()
        layout.check_pipeline(4, 1 if name == "naive" else 4)
        layout = Layout(pipeline_parallel=3, pipeline_schedule=name)
        stages = [layout.stages_of(rank) for rank in range(3)]
        assert sorted(stage for each in stages for stage in each) == list(range(layout.n_stages))
        assert (layout.n_stages - 1 in stages[0]) == kind.v_shaped
    looped = Layout(pipeline_parallel=2, pipeline_schedule="LoopedBFS", pipeline_stages_per_rank=3)
    assert looped.stages_of(1) == [1, 3, 5]
    Layout().check_pipeline(1, 1)
    Layout(zero_stage=3).check()  # on one rank every ZeRO stage is the same


def two(schedule: str, **fields: int) -> dict:
    return {"pipeline_parallel": 2, "pipeline_schedule": schedule, **fields}


# (fields, (layers, microbatches) of those that have too little work, words)
REFUSED = [
    ({"tensor_parallel": 0}, ["tensor_parallel=0"]),
    ({"pipeline_schedule": "2F2B"}, ["'2F2B'", "1F1B", "DualPipeV"]),
    ({"pipeline_split": "layers"}, ["'layers'", "parameters, time"]),
    ({"zero_stage": 4}, ["zero_stage=4", "in [0, 3]"]),
    ({"reduce_dtype": "float8"}, ["'float8'", "bfloat16"]),
    ({"zero_stage": 0, "data_parallel_shard": 4}, ["data_parallel_replicate=4", "zero_stage to 1"]),
    ({"zero_stage": 3, "data_parallel_replicate": 4}, ["zero_stage=3", "data_parallel_shard=4", "hybrid"]),
    # schedules that split the backward
    (two("ZBVZeroBubble", zero_stage=2, data_parallel_shard=2), ["zero_stage=2", "ZBVZeroBubble", "stage=1", "1F1B"]),
    (two("DualPipeV", zero_stage=3, data_parallel_shard=2), ["zero_stage=3", "DualPipeV"]),
    (two("DualPipeV", zero_stage=3), ["zero_stage=3", "DualPipeV"]),
    (two("1F1B", pipeline_stages_per_rank=2), ["1F1B has 1", "Interleaved1F1B"]),
    (two("ZBVZeroBubble", pipeline_stages_per_rank=3), ["ZBVZeroBubble has 2"]),
    (two("LoopedBFS", pipeline_stages_per_rank=0), ["pipeline_stages_per_rank=0"]),
    ({"pipeline_parallel": 4}, 3, 8, ["n_layers=3", "4 stages"]),
    ({"pipeline_parallel": 4, "pipeline_schedule": "LoopedBFS"}, 7, 8, ["n_layers=7", "8 stages"]),
    ({"pipeline_parallel": 4}, 8, 3, ["at least 4 microbatches", "there are 3"]),
    (two("DualPipeV"), 8, 3, ["at least 4", "4 stages"]),
    (two("Interleaved1F1B"), 8, 5, ["2 equal rounds", "multiple of 2"]),
    (two("naive"), 8, 2, ["one microbatch", "GPipe"]),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[-1][0])
def test_contradictions_are_refused(case):
    fields, *work, words = case
    with pytest.raises(ValueError) as error:
        Layout(**fields).check_pipeline(*work) if work else Layout(**fields).check()
    assert all(word in str(error.value) for word in words), error.value

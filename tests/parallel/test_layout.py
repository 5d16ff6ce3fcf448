"""A layout's sizes follow from its fields, and contradictions are refused before a process group exists. No pipeline
split is better than the one found; a GPT's costs are its parts' parameters and FLOPs."""

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpformer.models import GPT, GPTConfig, preset_config
from tpformer.parallel import SCHEDULES, Layout, split_stages


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
@pytest.mark.parametrize("case", [
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
], ids=lambda case: case[-1][0])  # fmt: skip
def test_contradictions_are_refused(case):
    fields, *work, words = case
    with pytest.raises(ValueError) as error:
        Layout(**fields).check_pipeline(*work) if work else Layout(**fields).check()
    assert all(word in str(error.value) for word in words), error.value


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
@example([2, 3, 5, 1, 6], 4)  # the best split of the first four items in three stages is not part of the best one
def test_no_split_is_better(costs, stages):
    stages = min(stages, len(costs))
    found = split_stages(costs, stages)
    assert [i for each in found for i in each] == list(range(len(costs))) and all(found)

    def quality(bounds):
        sums = [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
        return max(sums), sum(value**2 for value in sums)

    every = [quality((0, *inner, len(costs))) for inner in combinations(range(1, len(costs)), stages - 1)]
    assert quality((*(each.start for each in found), len(costs))) == min(every)


def test_embedding_and_head_are_counted():
    """A vocabulary as heavy as two layers takes layers from the first and the last stage. None is without a layer."""
    config = GPTConfig(vocab_size=24 * 64, n_layers=8, hidden_size=64, n_heads=4, seq_length=8)
    assert [len(part) for part in split_stages(config.layer_costs("parameters"), 4)] == [1, 3, 3, 1]
    *others, last = [len(part) for part in split_stages(config.layer_costs("time"), 4)]
    assert sorted(others) == [2, 2, 3] and last == 1, "an embedding takes no time, a head does"
    with pytest.raises(ValueError, match="3 layers cannot be divided among 4 stages"):
        split_stages([1.0] * 3, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_costs_are_the_parts_parameters_and_flops(tied):
    config = GPTConfig(vocab_size=128, n_layers=4, hidden_size=32, n_heads=4, tie_embeddings=tied, qk_norm=tied)
    costs = config.layer_costs("parameters")
    for part in split_stages(costs, 3):
        built = GPT(config, part=part, device="meta")
        assert sum(parameter.numel() for parameter in built.parameters()) == sum(costs[part.start : part.stop])
    assert sum(costs) == config.n_parameters + (128 * 32 if tied else 0)
    config = preset_config("llama3-8b")
    assert sum(config.layer_costs("time")) == config.flops_per_token
    assert sum(preset_config("megatron-1008b").layer_costs("time")) / 1e12 == pytest.approx(6.17, rel=0.02)

"""Items 7, 15, 19-22 and 26: pipelines, ZeRO and tensor parallelism together, each layout beside one process.

The model of a layout is the one that a run builds, on the mesh that it builds.
"""

from typing import Any

import pytest
import torch
from runs import MODEL as SHALLOW
from runs import alone, as_alone, run_config, step
from testing import assert_identical, assert_kernel_close

MODEL = {**SHALLOW, "n_layers": 4}


@pytest.fixture(scope="module")
def one_process(ranks) -> dict[str, Any]:
    return alone(ranks, MODEL)


@pytest.mark.parametrize(("schedule", "zero_stage"), [("1F1B", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3)])
def test_items_07_20_22_pipelines_with_zero_2_and_3(ranks, one_process, schedule, zero_stage):
    """Others refuse this composition; here it runs on CPUs. Fails if a rank keeps whole parameters, or if gradients are
    not those of one process."""
    layout = {"pipeline_parallel": 2, "data_parallel_shard": 2, "pipeline_schedule": schedule, "zero_stage": zero_stage}
    for result in as_alone(ranks, one_process, MODEL, layout):
        assert set(result["shares"].values()) == {0.5}


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_items_15_21_norm_gradients_and_clipping_on_two_axes(ranks, one_process, zero_stage):
    """Norm weights and biases are on the mesh of all other parameters. Fails if their gradients are not added over tp
    ranks, or counted twice in the global norm, by which all are clipped."""
    layout = {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": zero_stage}
    results = as_alone(ranks, one_process, MODEL, layout)
    assert {result["meshes"] for result in results} == {1}
    for one, other in (results[:2], results[2:]):  # ranks 0 and 1, 2 and 3 share samples and differ in tp
        assert {"norm.weight", "layers.0.input_layernorm.bias"} <= one["shared"].keys()
        assert_identical(other["shared"], one["shared"])


def test_item_19_sequence_parallelism_in_bfloat16(ranks, one_process):
    """With and without it, gradients of norms, and all others, are as near to float64 as one process's in bfloat16. The
    report's were 9.8% apart. Fails if a norm's gradient, or the sum over ranks of a row-parallel result, is taken in a
    lower precision on shards."""
    baseline = alone(ranks, MODEL, dtype="bfloat16")
    norms = {name for name in one_process["gradients"] if "norm" in name}
    for sequence_parallel in (True, False):
        layout = {"tensor_parallel": 2, "sequence_parallel": sequence_parallel}
        result, _ = ranks(2).run(step, MODEL, layout, {"dtype": "bfloat16"})
        assert result["norm"] != one_process["norm"], "it must not have run in float64"
        for names in (norms, one_process["gradients"].keys() - norms):
            gradients = (
                torch.cat([each["gradients"][name].flatten() for name in sorted(names)])
                for each in (result, one_process, baseline)
            )
            assert_kernel_close(*gradients, f"{layout} {min(names)}")


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_item_26_chunks_of_one_rank_start_from_different_values(ranks, one_process, schedule):
    """Fails if the second stage of a rank begins with the first one's numbers. A generator that both begin with would
    do so, or a layer's index within its stage."""
    expected = one_process["initial"][0]
    seen = set()
    for result in ranks(2).run(step, MODEL, {"pipeline_parallel": 2, "pipeline_schedule": schedule}, {}):
        assert len(result["initial"]) == 2
        one, other = (next(n for n in part if n.endswith("mlp.fc1.weight")) for part in result["initial"])
        assert one != other and not torch.equal(result["initial"][0][one], result["initial"][1][other])
        for part in result["initial"]:
            seen |= part.keys()
            assert_identical(part, {name: expected[name] for name in part})
    assert seen == expected.keys()


def test_item_26_flops_are_those_of_the_model_in_every_layout():
    """Utilisation follows from them. Fails if a pipeline counts those of a part, or none."""
    one = run_config(MODEL, {}).model.flops_per_token
    assert one > 6 * 4 * 12 * 16**2
    for axis in ("tensor_parallel", "pipeline_parallel", "data_parallel_shard"):
        assert run_config(MODEL, {axis: 4}).model.flops_per_token == one

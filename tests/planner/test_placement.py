"""The ranks of a placement are the mesh's, its bytes are those that a dry run counts."""

import xml.etree.ElementTree as ElementTree

import pytest

from tpformer.config import RunConfig, build_config
from tpformer.distributed.mesh import AXES
from tpformer.parallel import Layout
from tpformer.planner.devices import load_device
from tpformer.planner.dry_run import count_rank, fake_world, plan_config
from tpformer.planner.placement import (
    SPLITS,
    across_nodes_lines,
    axis_bytes,
    axis_groups,
    placement,
    rank_grid,
    sent_bytes,
    tensor_parallel_times,
)
from tpformer.planner.placement_pictures import placement_svg
from tpformer.training.setup import run_mesh

MODEL = {"vocab_size": 256, "seq_length": 64, "n_layers": 4, "hidden_size": 64, "n_heads": 4, "position": "rope"}


def configuration(parallel: dict, model: dict = MODEL, **train: object) -> RunConfig:
    values = {"global_batch_size": 32, "microbatch_size": 1, "device": "cpu", "dtype": "bfloat16", **train}
    return plan_config(build_config({"model": model, "parallel": parallel, "train": values}))


EXAMPLE = {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel_replicate": 2}
LARGE = {**MODEL, "vocab_size": 51200, "seq_length": 2048, "n_layers": 36, "hidden_size": 4096, "n_heads": 32}


@pytest.mark.parametrize(
    "sizes", [EXAMPLE, {**EXAMPLE, "data_parallel_shard": 3}, {"data_parallel_shard": 4, "tensor_parallel": 4}]
)
def test_ranks_are_the_meshs(sizes):
    config = configuration({**sizes}, global_batch_size=96)
    layout = config.parallel
    groups, grid = axis_groups(layout), rank_grid(layout)
    for rank in range(0, layout.world_size, 5):
        with fake_world(rank, layout.world_size):
            mesh = run_mesh(config, "cpu")
            assert mesh.mesh.equal(grid) and mesh.mesh_dim_names == AXES
            for axis in AXES:
                assert mesh[axis].mesh.tolist() in groups[axis] and rank in mesh[axis].mesh.tolist()


def test_the_example_of_two_nodes():
    found = {each.axis: each for each in placement(configuration(EXAMPLE, LARGE), 8)}
    assert list(found) == ["pp", "dp_replicate", "tp"]
    assert found["tp"].groups[0] == [0, 1] and found["dp_replicate"].groups[0] == [0, 2]
    assert found["pp"].groups[0] == [0, 4, 8, 12]
    assert [each.nodes for each in found.values()] == [2, 1, 1]
    assert found["pp"].sent < found["dp_replicate"].sent < found["tp"].sent
    assert str(found["pp"]).startswith("pp: 4 groups of 4 over 2 nodes, ")
    with pytest.raises(ValueError, match="holds no rank"):
        placement(configuration(EXAMPLE), 0)


SHALLOW = {**MODEL, "n_layers": 2}
EXPERTS = {
    **SHALLOW, "activation": "swiglu", "bias": False, "n_experts": 8, "experts_per_token": 4, "expert_ffn_size": 32,
    "shared_expert_size": 32, "first_dense_layers": 1,
}  # fmt: skip
SPLIT = {"tensor_parallel": 2, "pipeline_parallel": 2}
# (model, layout, a place in its pipeline)
COUNTED = [
    (MODEL, {**EXAMPLE, "recompute": "mlp"}, 0),
    (MODEL, EXAMPLE, 2),
    (SHALLOW, {**SPLIT, "recompute": "full", "sequence_parallel": False}, 1),
    (SHALLOW, {"tensor_parallel": 2, "data_parallel_shard": 2, "data_parallel_replicate": 2}, 0),
    (SHALLOW, {"data_parallel_shard": 4, "zero_stage": 2}, 0),
    (SHALLOW, {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 3, "recompute": "full"}, 0),
    (MODEL, {**SPLIT, "pipeline_schedule": "Interleaved1F1B"}, 0),
    (MODEL, {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2}, 0),
    ({**EXPERTS, "n_layers": 4}, {**EXAMPLE, "recompute": "mlp"}, 0),
    (
        {**EXPERTS, "n_layers": 4},
        {"tensor_parallel": 4, "data_parallel_shard": 2, "zero_stage": 3, "recompute": "full"},
        0,
    ),
    (EXPERTS, {**SPLIT, "sequence_parallel": False}, 1),
]


@pytest.mark.parametrize("model, parallel, place", COUNTED, ids=range(len(COUNTED)))
def test_bytes_are_those_that_a_dry_run_counts(model, parallel, place):
    config = configuration(parallel, model)
    layout, groups = config.parallel, axis_groups(config.parallel)
    counted = dict.fromkeys(AXES, 0.0)
    for call, times in count_rank(config, layout.world_size // layout.pipeline_parallel * place).collectives.items():
        ranks = 2 if call.axis == "pp" and call.operation == "all_reduce" else len(groups[call.axis][0])
        counted[call.axis] += times * sent_bytes(call.operation, call.nbytes, ranks)
    assert axis_bytes(config, place) == pytest.approx(counted, rel=0.02, abs=100)


def test_tensor_parallelism_over_two_nodes():
    """The same rows go to twice the ranks through slower links, while each computes half."""
    config = configuration({}, LARGE)
    a100 = load_device("a100-80")
    eight, sixteen = tensor_parallel_times(config, a100)
    assert (eight.nodes, sixteen.nodes) == (1, 2) and sixteen.compute == eight.compute / 2
    assert sixteen.communication / eight.communication == pytest.approx(15 / 16 / (7 / 8) * 0.874 * 250 / (8 * 21))
    assert sixteen.communication / sixteen.compute > 2.7 * eight.communication / eight.compute
    assert len(list(across_nodes_lines(config))) == 4


def test_splits_of_sixteen_cores():
    data, model, both, expert, all_three = (
        [split.pieces(axes) for axes in (split.weights, split.data)] for split in SPLITS
    )
    every, one = list(range(16)), [0] * 16
    assert data == [one, every] and model == [every, one] and expert == [every, every]
    assert both == [[0, 1, 2, 3] * 4, sorted([0, 1, 2, 3] * 4)]
    assert all_three == [every, sorted([0, 1, 2, 3] * 4)]
    grid = rank_grid(Layout(data_parallel_shard=4, tensor_parallel=4))
    assert [both[0][rank] for rank in grid[0, 0, 2]] == [0, 1, 2, 3] and len(
        {both[1][rank] for rank in grid[0, 0, 2]}
    ) == 1


def test_a_picture_of_many_nodes_shows_the_first_ones():
    layout = {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel_shard": 2, "data_parallel_replicate": 2}
    text = placement_svg(configuration(layout, {**LARGE, "n_layers": 4}), 8)
    texts = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert "128 ranks on 16 nodes of 8" in texts and "12 more nodes, filled in the same order" in texts
    assert texts.count("node 3") == 1 and "rank 31" in texts and "rank 32" not in texts
    assert [each for each in texts if each.startswith("tp, ")] == ["tp, 8 ranks in one node: 0, 1, 2, 3, ..."]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it loads nothing"

"""The ranks of a placement are the mesh's, and what pages say of nodes and bytes is what it gives.

tests/planner/test_rank_memory.py compares its bytes with those that a dry run counts.
"""

import re
import shlex
import xml.etree.ElementTree as ElementTree

import pytest
from commands import ROOT
from turns import in_turns

from tpformer.cli.plan import plan_command
from tpformer.config import RunConfig, build_config, read_toml
from tpformer.distributed.mesh import AXES, data_mesh, expert_mesh
from tpformer.planner import placement
from tpformer.planner.costs import pipeline_speedup
from tpformer.planner.counting import EXPERT_AXES
from tpformer.planner.devices import load_device
from tpformer.planner.dry_run import fake_world, plan_config
from tpformer.planner.placement_pictures import placement_svg
from tpformer.training.setup import run_mesh

STRATEGIES = (ROOT / "docs" / "strategies.md").read_text()
MODEL = {"vocab_size": 256, "seq_length": 64, "n_layers": 4, "hidden_size": 64, "n_heads": 4, "position": "rope"}
EXAMPLE = {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel_replicate": 2}
LARGE = {**MODEL, "vocab_size": 51200, "seq_length": 2048, "n_layers": 36, "hidden_size": 4096, "n_heads": 32}
CP2 = {"context_parallel": 2}
EXPERTS = {
    **MODEL, "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_experts": 8, "expert_ffn_size": 16,
}  # fmt: skip
COMMANDS = re.findall(r"```bash\ntpformer plan (.*)\n```\n```\n((?:.*\n)*?)```", STRATEGIES)


def configuration(parallel: dict, model: dict = MODEL, **train: object) -> RunConfig:
    values = {"global_batch_size": 32, "microbatch_size": 1, "device": "cpu", "dtype": "bfloat16", **train}
    return plan_config(build_config({"model": model, "parallel": parallel, "train": values}))


@pytest.mark.parametrize("sizes", [
    {**EXAMPLE, "data_parallel_shard": 3}, {"data_parallel_shard": 4, "tensor_parallel": 4},
    *({**EXAMPLE, **CP2, "data_parallel_shard": shard, "zero_stage": zero} for shard, zero in ((3, 1), (1, 0), (1, 3))),
])  # fmt: skip
def test_ranks_are_the_meshs(sizes):
    config = configuration(sizes, global_batch_size=96)
    layout = config.parallel
    groups, grid = placement.axis_groups(layout), placement.rank_grid(layout)
    for rank in range(0, layout.world_size, 5):
        with fake_world(rank, layout.world_size):
            mesh = run_mesh(config, "cpu")
            assert mesh.mesh.equal(grid) and mesh.mesh_dim_names == AXES
            for axis in AXES:
                assert mesh[axis].mesh.tolist() in groups[axis] and rank in mesh[axis].mesh.tolist()
            data = data_mesh(mesh, layout.replicas)
            for dim, axis in enumerate(placement.data_axes(layout)):
                ranks = data[data.mesh_dim_names[dim]].mesh.tolist()
                assert ranks in groups[axis] or len(ranks) == 1


@pytest.mark.parametrize("sizes", [
    {**EXAMPLE, "data_parallel_shard": 2, "zero_stage": 1, "expert_parallel": 2},
    {**CP2, "data_parallel_replicate": 4, "zero_stage": 0, "expert_parallel": 4},
])  # fmt: skip
def test_ranks_that_exchange_tokens_are_the_meshs(sizes):
    layout = configuration(sizes, EXPERTS).parallel
    groups = placement.axis_groups(layout)
    for rank in range(0, layout.world_size, 3):
        with fake_world(rank, layout.world_size):
            mesh = run_mesh(configuration(sizes, EXPERTS), "cpu")
            view = expert_mesh(mesh, layout.expert_replicas, layout.expert_parallel)
            for name, axis in zip(EXPERT_AXES, view.mesh_dim_names, strict=True):
                ranks = view[axis].mesh.tolist()
                assert rank in ranks and ranks in groups[name]


def test_the_example_of_two_nodes():
    found = {each.axis: each for each in placement.placement(configuration(EXAMPLE, LARGE), 8)}
    assert list(found) == ["pp", "dp_replicate", "tp"]
    assert found["tp"].groups[0] == [0, 1] and found["dp_replicate"].groups[0] == [0, 2]
    assert found["pp"].groups[0] == [0, 4, 8, 12]
    assert [each.nodes for each in found.values()] == [2, 1, 1]
    assert found["pp"].sent < found["dp_replicate"].sent < found["tp"].sent
    assert str(found["pp"]).startswith("pp: 4 groups of 4 over 2 nodes, ")
    with pytest.raises(ValueError, match="holds no rank"):
        placement.placement(configuration(EXAMPLE), 0)


def test_tensor_parallelism_over_two_nodes():
    """The same rows go to twice the ranks through slower links, while each computes half."""
    eight, sixteen = placement.tensor_parallel_times(configuration({}, LARGE), load_device("a100-80"))
    assert (eight.nodes, sixteen.nodes) == (1, 2) and sixteen.compute == eight.compute / 2
    assert sixteen.communication / eight.communication == pytest.approx(15 / 16 / (7 / 8) * 0.874 * 250 / (8 * 21))
    lines = list(placement.across_nodes_lines(example("gpt_145b")))
    assert len(lines) == 4 and "```\n" + "\n".join(lines) + "\n```" in (ROOT / "docs/planner.md").read_text()


def test_a_picture_of_many_nodes_shows_the_first_ones():
    layout = {"tensor_parallel": 8, "pipeline_parallel": 4, "data_parallel_shard": 2, "data_parallel_replicate": 2}
    text = placement_svg(configuration(layout, {**LARGE, "n_layers": 4}), 8)
    texts = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert "128 ranks on 16 nodes of 8" in texts and "12 more nodes, filled in the same order" in texts
    assert texts.count("node 3") == 1 and "rank 31" in texts and "rank 32" not in texts
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it loads nothing"


def example(name: str, train: dict | None = None, **parallel: object) -> RunConfig:
    given = {"parallel": parallel, "train": train or {}}
    return plan_config(build_config(read_toml(ROOT / f"examples/{name}.toml"), given))


def test_the_page_of_strategies():
    axis_bytes, transfers = placement.axis_bytes, placement.TRANSFERS
    replicas = axis_bytes(example("gpt_1.7b"))["dp_replicate"]
    shares = {"data_parallel_replicate": 1, "data_parallel_shard": 32}
    first, second, third = (axis_bytes(example("gpt_1.7b", **shares, zero_stage=z))["dp_shard"] for z in (1, 2, 3))
    assert first / replicas == pytest.approx(0.75) and "three quarters of what replicas send" in STRATEGIES
    assert first == second < third  # one microbatch
    halved = example("gpt_1.7b", train={"microbatch_size": 8}, **shares, zero_stage=2)
    assert axis_bytes(halved)["dp_shard"] > 1.5 * first
    assert transfers[True]["none"] / transfers[False]["none"] == 1.25 and "a quarter more" in STRATEGIES
    assert f"{pipeline_speedup(4, 9):.1f} times as fast" in STRATEGIES


@pytest.mark.parametrize("command, printed", in_turns(COMMANDS), ids=range(len(COMMANDS)))
def test_crossovers(command, printed, capsys):
    plan_command(shlex.split(command))
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line for line in lines if " is the fastest" in line or line.startswith("no layout works")]
    assert verdicts == printed.splitlines()

"""The weights that ZeRO gathers in blocks are, by the configuration's table, those that FSDP2 was told of."""

import re
from typing import Any

import pytest
from turns import in_turns

from tpformer.cli.plan import plan_command
from tpformer.config import build_config, check_config
from tpformer.config.zero_gather import gathered_weights, in_whole_blocks
from tpformer.parallel.block_gather import BlockGather
from tpformer.parallel.zero import _groups, fully_shard
from tpformer.planner.dry_run import fake_world
from tpformer.planner.layouts import layout_text, parse_kind, parse_layout, with_layout
from tpformer.training.setup import build_parts, run_mesh

OLD = {"vocab_size": 256, "seq_length": 64, "n_layers": 1, "hidden_size": 512, "n_heads": 8, "head_dim": 128,
       "ffn_hidden_size": 1536}  # fmt: skip
NEW = {**OLD, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "n_kv_heads": 2}
EXPERTS = {**NEW, "n_experts": 8, "expert_ffn_size": 128, "shared_expert_size": 512, "router_bias": True}
TP2, TP4 = {"tensor_parallel": 2}, {"tensor_parallel": 4}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (OLD, {"data_parallel_shard": 3}),
    (NEW, {**TP4, "data_parallel_shard": 4}),
    (EXPERTS, {"expert_parallel": 4, "data_parallel_shard": 4, **TP2}),
]
OTHERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((OLD, {**tp, "data_parallel_shard": shards}) for tp in ({}, TP2) for shards in (2, 5, 8)),
    *((NEW, {**tp, "data_parallel_shard": shards}) for tp in ({}, TP2) for shards in (2, 3, 8)),
    *((EXPERTS, {**tp, "data_parallel_shard": shards}) for tp in ({}, TP2, TP4) for shards in (2, 3, 4, 16)),
    *((EXPERTS, {"expert_parallel": ep, "data_parallel_shard": 8, **tp}) for ep in (1, 2, 8) for tp in ({}, TP2)),
    ({**EXPERTS, "shared_expert_size": 0}, {"context_parallel": 2, "data_parallel_shard": 2, **TP2}),
]  # fmt: skip


@pytest.mark.parametrize("model, parallel", [*CASES, *in_turns(OTHERS)])
def test_the_table_is_what_is_gathered(model: dict, parallel: dict) -> None:
    train = {"global_batch_size": 240, "precision": "fp8", "dtype": "bfloat16", "device": "cpu"}
    config = build_config({"model": model, "parallel": {**parallel, "zero_gather": "fp8"}, "train": train})
    weights = gathered_weights(config.model, config.parallel, experts="n_experts" in model)
    wanted = {each.name: (each.shard, in_whole_blocks(each.shard)) for each in weights}
    if any(whole for _, whole in wanted.values()):
        check_config(config, trains=False)
    else:
        with pytest.raises(ValueError, match="in blocks of e4m3: none"):
            check_config(config, trains=False)
    with fake_world(0, config.parallel.world_size):
        (part,) = build_parts(config, run_mesh(config, "cpu"))
        (block,) = part.layers.values()
        found = {}
        for group in _groups(fully_shard.state(block)):
            if isinstance(comm := group._all_gather_comm, BlockGather):
                sizes = [tuple(each.padded_sharded_param_size) for each in group.fsdp_params]
                assert [shard.shape for shard in comm.shards] == sizes
                found |= {named(shard.name): (shard.shape, shard.in_blocks) for shard in comm.shards if shard.quantised}
    in_blocks = {name: each for name, each in wanted.items() if each[1]}
    assert {name: each for name, each in found.items() if each[1]} == in_blocks
    assert found.items() <= wanted.items(), "a group without any weight in blocks has FSDP2's own gather"


def named(path: str) -> str:
    """The table's name of a parameter of a block."""
    parts = [part for part in path.split(".") if part not in ("self_attn", "mlp", "shared_experts", "weight")]
    return ".".join(parts)


def test_a_layout_says_how_it_gathers() -> None:
    train = {"global_batch_size": 8, "precision": "fp8", "dtype": "bfloat16", "device": "cuda"}
    config = build_config({"model": NEW, "train": train})
    shared = with_layout(config, parse_layout("dp=4,zero=3,gather=fp8"))
    assert layout_text(shared) == "tp=1,pp=1,dp=4,zero=3,gather=fp8,microbatch=1"
    for text, gather in (("dp=2,zero=2", "fp8"), ("dp=4", "16"), ("dp=1,zero=3", "16"), ("dp=4,gather=fp8", "fp8")):
        assert with_layout(shared, parse_layout(text)).parallel.zero_gather == gather, text
    with pytest.raises(ValueError, match="key='gather': choose one of"):
        parse_kind("zero=1|3,gather=fp8")


def test_a_plan_has_both(capsys: pytest.CaptureFixture) -> None:
    """Four tensor-parallel ranks leave each of these others a slow link of its own, whose bytes are the step's."""
    seconds, shards = {}, "tp=4,dp=32,zero=3,microbatch=1,gather="
    for gather in ("16", "fp8"):
        asked = "--preset llama3-70b --precision fp8 --gpus 128 --batch 128 --seq-length 4096".split()
        plan_command([*asked, "--explain", shards + gather])
        out = capsys.readouterr().out
        line = re.search(r"a step takes ([\d.]+) s with gather=16 and ([\d.]+) s with gather=fp8", out)
        assert line, out
        seconds[gather] = [float(each) for each in line.groups()]
        said = "ZeRO gathers shards in blocks of e4m3: q_proj 2048 x 256, k_proj 256 x 256"
        assert (said in out) == (gather == "fp8") == ("gathers in blocks *" in out)
    assert seconds["16"] == seconds["fp8"] and seconds["16"][1] < 0.9 * seconds["16"][0]

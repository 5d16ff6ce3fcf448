"""Models of memory and of messages beside the dry run's counts: every stage's bytes, the sum at the peak, and what a
rank sends over each axis."""

import dataclasses
import re

import pytest
from commands import ROOT
from test_dry_run import ILV, TP2, ZB, ZBV, ZERO1, ZERO2, ZERO3, configuration, held, order_of
from turns import in_turns

from tpformer.config import OptimizerSection, build_config, read_toml
from tpformer.planner.counting import OF_OWNERS
from tpformer.planner.dry_run import count_rank, plan_config
from tpformer.planner.placement import axis_bytes, axis_groups, axis_names, sent_bytes
from tpformer.planner.rank_memory import predicted_memory, predicted_stage
from tpformer.planner.report import rank_plan

GPT = {"vocab_size": 5000, "seq_length": 128, "n_layers": 2, "hidden_size": 256, "n_heads": 8}
LLAMA = {
    **GPT, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "n_kv_heads": 2, "qk_norm": True,
}  # fmt: skip
UNEVEN = {**LLAMA, "n_heads": 6, "head_dim": 32, "n_kv_heads": 3}
MOE = {**LLAMA, "n_experts": 4, "experts_per_token": 2, "expert_ffn_size": 128, "router_bias": True}
SHARED = {**MOE, "n_layers": 3, "first_dense_layers": 1, "shared_expert_size": 96, "router_score": "sigmoid"}
ROUTED = {**SHARED, "n_layers": 2, "hidden_size": 32, "n_experts": 8, "experts_per_token": 8}  # sends many indices
WIDE = {**LLAMA, "hidden_size": 256, "n_heads": 4, "head_dim": 128, "ffn_hidden_size": 768}  # for FP8 on two ranks
ROUTERS = {key: SHARED[key] for key in ("n_experts", "experts_per_token", "expert_ffn_size", "first_dense_layers")}
BLOCKED = {**WIDE, **ROUTERS, "n_layers": 3, "shared_expert_size": 256}
FOUR, MUON = {"n_layers": 4}, {"name": "muon"}
CP2, EP2 = {"context_parallel": 2}, {"expert_parallel": 2}
PACKED, OFFLOADED = {"pack_activations": True}, {"offload_activations": True}
REGIONS = {"recompute": "full", "recompute_interval": 2}
BLOCKS = {"precision": "fp8", "zero_gather": "fp8"}
FEW = {"microbatches": 2}  # a dry run counts as many; of more, three
# most parts of the sums are in one of these, by itself or beside others
LAYOUTS = [
    ({**UNEVEN, **FOUR, "seq_length": 96}, {**ZB, "tensor_parallel": 3}),
    ({**LLAMA, **FOUR}, {**ILV, **ZERO2}),
    ({**MOE, "n_layers": 3, "seq_length": 1024}, {"recompute": "mlp", "recompute_layers": "::2", **OFFLOADED, **FEW}),
    (SHARED, {**REGIONS, **FEW, "recompute_layers": "0:2", "balance_loss": 0.01}),
    (GPT, {**TP2, **ZERO1, "data_parallel_replicate": 2, "optimizer": MUON}),
    (LLAMA, {**CP2, **ZERO3, **FEW, "recompute": "full", "tensor_parallel": 4}),  # twice as many as keys' heads
    (SHARED, {**EP2, **ZERO1, **TP2, **FEW, "recompute": "mlp", "balance_loss": 0.01}),
    ({**BLOCKED, "n_kv_heads": 1}, {**TP2, **ZERO3, **FEW, **BLOCKS}),
]
# the rest, and the same parts in other combinations
OTHERS = [
    ({**GPT, "n_layers": 3}, {**ZERO3, "cpu_offload": True}),
    (GPT, {"data_parallel_replicate": 4, **FEW, "optimizer": {"name": "sgd", "momentum": 0.9}}),
    ({**LLAMA, **FOUR}, {"pipeline_parallel": 4, "pipeline_schedule": "GPipe", "recompute": "mlp"}),
    (ROUTED, {**TP2, **FEW}),
    ({**SHARED, **FOUR}, {**ZBV, **TP2, **PACKED, "sequence_parallel": False}),
    ({**GPT, "position": "rope"}, {**TP2, **ZERO2, "dtype": "float16"}),
    ({**SHARED, "n_layers": 2}, {**TP2, **FEW, "data_parallel_replicate": 2, "dtype": "float32"}),
    ({**SHARED, "n_layers": 2, "seq_length": 1024}, {**TP2, **PACKED, **OFFLOADED, **FEW, "recompute": "full"}),
    ({**GPT, **FOUR}, {**TP2, "pipeline_parallel": 4, "data_parallel_replicate": 2, "recompute": "mlp"}),
    ({**GPT, "n_layers": 3}, {**ZERO3, **PACKED, "recompute": "mlp", "pack_layers": "1:2"}),
    ({**LLAMA, "sliding_window": 48}, {**CP2, **FEW, "dtype": "float32"}),
    (GPT, {**CP2, **TP2}),
    ({**SHARED, **FOUR}, {**CP2, **ZBV, **TP2, "balance_loss": 0.01}),
    ({**MOE, **FOUR}, {**EP2, **ZBV, "data_parallel_replicate": 2, "data_parallel_shard": 2}),
    (MOE, {**CP2, **EP2, **FEW}),  # both exchange over the world's group
    ({**GPT, **FOUR}, {**REGIONS, "recompute_layers": "::3,2", **OFFLOADED}),
    ({**GPT, "seq_length": 2048}, {**PACKED, **OFFLOADED}),
    (GPT, {"data_parallel_shard": 4, "optimizer": {"name": "sgd"}}),
    ({**GPT, "n_layers": 8}, {**ILV, **ZERO3, "pipeline_stages_per_rank": 2}),
    ({**GPT, **FOUR}, {**ZB, **TP2}),
    (UNEVEN, TP2),
    ({**LLAMA, **FOUR}, {**ZBV, **PACKED, "recompute": "full"}),
    (MOE, {"tensor_parallel": 4, "sequence_parallel": False}),
    (SHARED, {**ZERO3, **TP2, **FEW, "recompute": "full", "balance_loss": 0.01}),
    ({**SHARED, "first_dense_layers": 2}, {**ZERO3, **TP2}),
    (GPT, {**ZERO3, "data_parallel_replicate": 2, "recompute": "full"}),
    (GPT, {**CP2, **TP2, "sequence_parallel": False, "data_parallel_replicate": 2, "zero_stage": 0}),
    ({**LLAMA, "seq_length": 1024}, {**ZERO2, **PACKED, **OFFLOADED, "context_parallel": 4}),
    ({**GPT, **FOUR}, {**CP2, **ZB, "recompute": "full", "zero_stage": 0}),
    (LLAMA, {**CP2, **TP2, "zero_stage": 3, "data_parallel_replicate": 2, "cpu_offload": True}),
    (SHARED, {**EP2, **ZERO3, **TP2, "data_parallel_replicate": 2, "recompute": "full"}),
    (MOE, {**CP2, **TP2, "expert_parallel": 4}),
    ({**MOE, "seq_length": 1024}, {**ZERO2, **PACKED, **OFFLOADED, "expert_parallel": 1, **TP2}),
    (MOE, {"expert_parallel": 2, "data_parallel_replicate": 4, "zero_stage": 0, "dtype": "float32"}),
    ({**SHARED, **FOUR}, {**EP2, **ZB, **TP2}),
    (MOE, {"expert_parallel": 2, **TP2, "data_parallel_shard": 4, "cpu_offload": True}),
    (SHARED, {**EP2, **ZERO3, **TP2, **FEW, "recompute": "full", "optimizer": MUON}),
    ({**GPT, **FOUR}, {**ZBV, "data_parallel_replicate": 2, "optimizer": MUON}),
    (WIDE, {**TP2, **FEW, "precision": "fp8", "recompute": "full"}),
    ({**WIDE, "n_layers": 3}, {**TP2, **ZERO3, "precision": "fp8", "recompute": "mlp", "recompute_layers": "::2"}),
    (WIDE, {**TP2, **FEW, "precision": "fp8", "sequence_parallel": False}),
    (BLOCKED, {**EP2, **ZERO1, **TP2, **FEW, "precision": "fp8", "recompute": "mlp"}),
    ({**BLOCKED, **FOUR}, {**TP2, **ZB, "precision": "fp8"}),
    ({**BLOCKED, **FOUR}, {**EP2, **ZB, **TP2, "precision": "fp8"}),
    (WIDE, {**ZERO2, **BLOCKS, "data_parallel_replicate": 2, "recompute": "full"}),
    ({**WIDE, "n_kv_heads": 1}, {**TP2, **FEW, "precision": "fp8", "sequence_parallel": False, "recompute": "full"}),
    ({**BLOCKED, "n_experts": 6}, {**EP2, **ZERO3, **FEW, **BLOCKS}),
    ({**WIDE, **FOUR}, {**ILV, **ZERO1, **TP2, **BLOCKS}),
    ({**WIDE, **FOUR}, {**TP2, **ZB, "precision": "fp8"}),
]


@pytest.mark.parametrize(
    "model, given", [*LAYOUTS, *in_turns(OTHERS)], ids=lambda value: ", ".join(map(str, value.values()))
)
def test_predicted_bytes_are_those_that_a_dry_run_counts(model, given):
    others = ("dtype", "precision", "balance_loss", "optimizer", "microbatches")
    parallel = {key: value for key, value in given.items() if key not in others}
    ranks = parallel.get("data_parallel_shard", 1) * parallel.get("data_parallel_replicate", 1)
    batch = 64 if "pipeline_parallel" in parallel else 2 * given.get("microbatches", 16) * ranks
    train = {"global_batch_size": batch, "microbatch_size": 2, "device": "cuda", "dtype": "bfloat16"}
    train |= {key: given[key] for key in ("dtype", "precision", "balance_loss") if key in given}
    config = plan_config(configuration(parallel, train, model, optimizer=given.get("optimizer", {})))
    layout = config.parallel
    last = layout.pipeline_parallel - 1
    count = count_rank(config, last * layout.world_size // layout.pipeline_parallel)
    for stage in count.stages:
        assert predicted_stage(config, stage.stage) == stage, "to the byte"
    counted, predicted = rank_plan(config, count, order_of(config)), predicted_memory(config, last)
    assert predicted.total == pytest.approx(counted.total, rel=0.02)
    assert predicted.host == pytest.approx(counted.host, rel=0.02)
    states, counted_states = [state.nbytes for state in predicted.states], held(count)
    uneven = 8 * config.model.hidden_size  # bytes of the row of a table that its ranks share unevenly
    assert states == pytest.approx(counted_states[: len(states)], rel=0, abs=uneven)
    assert not any(counted_states[len(states) :])
    groups, sent = axis_groups(layout), dict.fromkeys(axis_names(layout), 0.0)
    for call, times in count.collectives.items():
        if call.operation in OF_OWNERS:  # each rank sends something else, so test_muon_plans.py has their mean
            continue
        ranks = 2 if call.axis == "pp" and call.operation == "all_reduce" else len(groups[call.axis][0])
        sent[call.axis] += times * sent_bytes(call.operation, call.nbytes, ranks)
    config = dataclasses.replace(config, optimizer=OptimizerSection())
    assert axis_bytes(config, last) == pytest.approx(sent, rel=0.02, abs=100)


@pytest.mark.parametrize(
    "path",
    [path for path in ROOT.glob("examples/*.toml") if not path.stem.endswith("_tiny")],
    ids=lambda path: path.stem,
)
def test_every_example_is_as_its_comment_says(path):
    """The first rank holds most."""
    config, comment = plan_config(build_config(read_toml(path))), path.read_text()
    parameters, gpus = re.search(r"([\d.]+)B parameters.* on (\d+) GPUs", comment).groups()
    assert (f"{config.model.n_parameters / 1e9:.1f}", config.parallel.world_size) == (parameters, int(gpus))
    wanted = int(re.search(r"# predicted: (\d+) GB of 80,", comment)[1])
    assert predicted_memory(config, 0).total / 1e9 == pytest.approx(wanted, rel=0.03)

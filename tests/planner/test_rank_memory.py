"""Models of memory and of messages beside the dry run's counts: every stage's bytes, the sum at the peak, and what a
rank sends over each axis."""

import re
from pathlib import Path

import pytest

from tpformer.config import build_config, read_toml
from tpformer.distributed.mesh import AXES
from tpformer.planner.bubbles import schedule_order
from tpformer.planner.dry_run import count_rank, plan_config
from tpformer.planner.placement import axis_bytes, axis_groups, sent_bytes
from tpformer.planner.rank_memory import predicted_memory, predicted_stage
from tpformer.planner.report import rank_plan

GPT = {"vocab_size": 5000, "seq_length": 128, "n_layers": 2, "hidden_size": 256, "n_heads": 8}
LLAMA = {
    **GPT, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "n_kv_heads": 2, "qk_norm": True,
}  # fmt: skip
UNEVEN = {**LLAMA, "n_heads": 6, "head_dim": 32, "n_kv_heads": 3}
MOE = {**LLAMA, "n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128, "router_bias": True}
SHARED = {**MOE, "n_layers": 3, "first_dense_layers": 1, "shared_expert_size": 96, "router_score": "sigmoid"}
ROUTED = {**SHARED, "n_layers": 2, "hidden_size": 32, "experts_per_token": 8}  # sends many indices
FOUR = {"n_layers": 4}
TP2, PACKED, OFFLOADED = {"tensor_parallel": 2}, {"pack_activations": True}, {"offload_activations": True}
ZERO2, ZERO3 = ({"data_parallel_shard": 2, "zero_stage": stage} for stage in (2, 3))
ILV, ZB, ZBV = (
    {"pipeline_parallel": 2, "pipeline_schedule": name}
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
)
REGIONS = {"recompute": "full", "recompute_interval": 2}
LAYOUTS = [
    ({**GPT, "position": "rope"}, {**TP2, **ZERO2, "dtype": "float16"}),
    ({**GPT, **FOUR}, {**REGIONS, "recompute_layers": "::3,2", **OFFLOADED}),
    ({**GPT, "seq_length": 2048}, {**PACKED, **OFFLOADED}),
    ({**GPT, "n_layers": 3}, {**ZERO3, "cpu_offload": True}),
    ({**GPT, "n_layers": 3}, {**ZERO3, **PACKED, "recompute": "mlp", "pack_layers": "1:2"}),
    ({**GPT, "n_layers": 8}, {**ILV, **ZERO3, "pipeline_stages_per_rank": 2}),
    ({**GPT, **FOUR}, {**ZB, **TP2}),
    ({**UNEVEN, **FOUR, "seq_length": 96}, {**ZB, "tensor_parallel": 3}),
    (UNEVEN, TP2),
    ({**LLAMA, **FOUR}, {"pipeline_parallel": 4, "pipeline_schedule": "GPipe", "recompute": "mlp"}),
    ({**LLAMA, **FOUR}, {**ILV, **ZERO2}),
    ({**LLAMA, **FOUR}, {**ZBV, **PACKED, "recompute": "full"}),
    (MOE, {"tensor_parallel": 4, "sequence_parallel": False}),
    ({**MOE, "n_layers": 3, "seq_length": 1024}, {"recompute": "mlp", "recompute_layers": "::2", **OFFLOADED}),
    (SHARED, {**ZERO3, **TP2, "recompute": "full", "balance_loss": 0.01}),
    ({**SHARED, "first_dense_layers": 2}, {**ZERO3, **TP2}),
    ({**SHARED, "n_layers": 2}, {**TP2, "data_parallel_replicate": 2, "dtype": "float32"}),
    (ROUTED, TP2),
    (SHARED, {**REGIONS, "recompute_layers": "0:2", "balance_loss": 0.01}),
    ({**SHARED, **FOUR}, {**ZBV, **TP2, **PACKED, "sequence_parallel": False}),
    ({**SHARED, "n_layers": 2, "seq_length": 1024}, {**TP2, **PACKED, **OFFLOADED, "recompute": "full"}),
    ({**GPT, **FOUR}, {**TP2, "pipeline_parallel": 4, "data_parallel_replicate": 2, "recompute": "mlp"}),
    (GPT, {**TP2, "data_parallel_shard": 2, "data_parallel_replicate": 2}),
    (GPT, {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_stage": 3, "recompute": "full"}),
]


@pytest.mark.parametrize("model, parallel", LAYOUTS, ids=lambda value: ", ".join(map(str, value.values())))
def test_predicted_bytes_are_those_that_a_dry_run_counts(model, parallel):
    ranks = parallel.get("data_parallel_shard", 1) * parallel.get("data_parallel_replicate", 1)
    batch = 64 if "pipeline_parallel" in parallel else 32 * ranks
    train = {"global_batch_size": batch, "microbatch_size": 2, "device": "cuda"}
    train |= {"dtype": "bfloat16", **{key: parallel[key] for key in ("dtype", "balance_loss") if key in parallel}}
    parallel = {key: value for key, value in parallel.items() if key not in train}
    config = plan_config(build_config({"model": model, "parallel": parallel, "train": train}))
    layout = config.parallel
    last = layout.pipeline_parallel - 1
    order = None
    if last:
        order = schedule_order(
            layout.pipeline_schedule, layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank
        )
    count = count_rank(config, last * layout.world_size // layout.pipeline_parallel)
    for stage in count.stages:
        assert predicted_stage(config, stage.stage) == stage, "to the byte"
    counted, predicted = rank_plan(config, count, order), predicted_memory(config, last)
    assert predicted.total == pytest.approx(counted.total, rel=0.02)
    assert predicted.host == pytest.approx(counted.host, rel=0.02)
    held = count.parameters + count.gradients + count.optimizer + count.copies + count.accumulated
    assert sum(state.nbytes for state in predicted.states) == pytest.approx(held, rel=0.02)
    groups, sent = axis_groups(layout), dict.fromkeys(AXES, 0.0)
    for call, times in count.collectives.items():
        ranks = 2 if call.axis == "pp" and call.operation == "all_reduce" else len(groups[call.axis][0])
        sent[call.axis] += times * sent_bytes(call.operation, call.nbytes, ranks)
    predicted_sent = axis_bytes(config, last)
    if last and config.model.tie_embeddings and layout.data_parallel_shard > 1:
        # axis_bytes takes the gradients of the tied table, which are in shards, for whole
        assert predicted_sent.pop("pp") > sent.pop("pp")
    assert predicted_sent == pytest.approx(sent, rel=0.02, abs=100)


EXAMPLES = [path for path in Path(__file__).parents[2].glob("examples/*.toml") if not path.stem.endswith("_tiny")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits_as_its_comment_says(path):
    """The first rank holds most."""
    predicted = predicted_memory(plan_config(build_config(read_toml(path))), 0).total / 1e9
    assert predicted == pytest.approx(int(re.search(r"# predicted: (\d+) GB of 80,", path.read_text())[1]), rel=0.03)

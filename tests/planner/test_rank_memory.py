"""The memory model beside the dry run's counts: 46 layouts, every stage's bytes and the sum at the peak."""

import re
from pathlib import Path

import pytest

from tpformer.config import build_config, read_toml
from tpformer.planner.bubbles import schedule_order
from tpformer.planner.dry_run import count_rank, plan_config
from tpformer.planner.rank_memory import predicted_memory, predicted_stage
from tpformer.planner.report import rank_plan

GPT = {"vocab_size": 5000, "seq_length": 128, "n_layers": 8, "hidden_size": 256, "n_heads": 8}
LLAMA = {
    **GPT, "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": False, "tie_embeddings": False,
    "n_kv_heads": 2, "qk_norm": True,
}  # fmt: skip
ILV, ZB = {"pipeline_schedule": "Interleaved1F1B"}, {"pipeline_schedule": "InterleavedZeroBubble"}
MOE = {
    **LLAMA, "n_layers": 4, "n_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128, "router_bias": True,
}  # fmt: skip
SHARED = {**MOE, "n_layers": 5, "first_dense_layers": 1, "shared_expert_size": 96, "router_score": "sigmoid"}
ZBV = {"pipeline_schedule": "ZBVZeroBubble"}
PACKED = {"pack_activations": True}
LAYOUTS = [
    (GPT, {}),
    (GPT, {"tensor_parallel": 2, "zero_stage": 2, "data_parallel_shard": 2}),
    (GPT, {"tensor_parallel": 4, "sequence_parallel": False}),
    (GPT, {"recompute": "mlp", "data_parallel_shard": 4, "zero_stage": 3}),
    (GPT, {"recompute": "full", "recompute_interval": 2, "recompute_layers": "0:6"}),
    (GPT, {"offload_activations": True}),
    (GPT, {"data_parallel_replicate": 2, "tensor_parallel": 2}),
    (GPT, {"cpu_offload": True, "data_parallel_shard": 2, "zero_stage": 3}),
    (GPT, {"pipeline_parallel": 2}),
    (GPT, {"pipeline_parallel": 4, "tensor_parallel": 2, "recompute": "full"}),
    (GPT, {"pipeline_parallel": 2, **ILV, "pipeline_stages_per_rank": 4}),
    (GPT, {"pipeline_parallel": 2, **ZB, "tensor_parallel": 2}),
    (GPT, {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble"}),
    (LLAMA, {"tensor_parallel": 4, "data_parallel_shard": 2}),
    (
        {**LLAMA, "n_heads": 6, "head_dim": 32, "n_kv_heads": 3, "seq_length": 96},
        {"tensor_parallel": 3, "pipeline_parallel": 2, **ZB},
    ),
    (GPT, {"recompute": "full", "recompute_interval": 2, "recompute_layers": "::3,6"}),
    ({**GPT, "seq_length": 2048}, {"recompute": "mlp", "recompute_layers": "-1", "offload_activations": True}),
    ({**LLAMA, "n_heads": 6, "head_dim": 32, "n_kv_heads": 3}, {"tensor_parallel": 2}),
    (GPT, {"dtype": "float16"}),
    (LLAMA, {"pipeline_parallel": 4, "pipeline_schedule": "GPipe", "recompute": "mlp"}),
    (LLAMA, {"pipeline_parallel": 2, "data_parallel_shard": 2, "zero_stage": 2, **ILV}),
    (GPT, {"pipeline_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3, **ILV, "pipeline_stages_per_rank": 2}),
    (MOE, {}),
    (MOE, {"tensor_parallel": 2, "balance_loss": 0.01}),
    (MOE, {"tensor_parallel": 4, "sequence_parallel": False}),
    (SHARED, {"tensor_parallel": 2, "data_parallel_shard": 2}),
    (SHARED, {"tensor_parallel": 4, "data_parallel_shard": 2, "zero_stage": 2, "recompute": "mlp"}),
    (SHARED, {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3, "recompute": "full"}),
    (SHARED, {"data_parallel_shard": 4, "zero_stage": 3}),
    ({**SHARED, "first_dense_layers": 4}, {"data_parallel_shard": 2, "zero_stage": 3, "tensor_parallel": 2}),
    (SHARED, {"data_parallel_replicate": 2, "tensor_parallel": 2, "dtype": "float32"}),
    (SHARED, {"recompute": "full", "recompute_interval": 2, "recompute_layers": "0:3", "balance_loss": 0.01}),
    ({**MOE, "seq_length": 1024}, {"recompute": "mlp", "recompute_layers": "::2", "offload_activations": True}),
    (MOE, {"pipeline_parallel": 2, **ZBV, "tensor_parallel": 2}),
    (MOE, {"pipeline_parallel": 2, **ZBV, "tensor_parallel": 2, "balance_loss": 0.01}),
    (SHARED, {"pipeline_parallel": 2, **ZBV, "tensor_parallel": 2, "data_parallel_shard": 2, "recompute": "mlp"}),
    ({**SHARED, "n_layers": 8}, {"pipeline_parallel": 4, "data_parallel_shard": 2, "recompute": "full"}),
    ({**SHARED, "n_layers": 8}, {"pipeline_parallel": 2, **ILV, "data_parallel_shard": 2, "zero_stage": 2}),
    (GPT, {**PACKED}),
    (GPT, {**PACKED, "tensor_parallel": 4, "sequence_parallel": False}),
    (GPT, {**PACKED, "recompute": "mlp", "pack_layers": "1:5", "data_parallel_shard": 4, "zero_stage": 3}),
    (LLAMA, {**PACKED, "pipeline_parallel": 2, **ILV, "tensor_parallel": 2}),
    (LLAMA, {**PACKED, "pipeline_parallel": 2, **ZBV, "recompute": "full"}),
    (GPT, {**PACKED, "recompute": "full", "recompute_interval": 2, "recompute_layers": "0:6"}),
    ({**GPT, "seq_length": 2048}, {**PACKED, "offload_activations": True}),
    (SHARED, {**PACKED, "tensor_parallel": 2, "data_parallel_shard": 2}),
]


@pytest.mark.parametrize("model, parallel", LAYOUTS, ids=lambda value: ", ".join(map(str, value.values())))
def test_predicted_bytes_are_the_dry_runs(model, parallel):
    train = {"global_batch_size": 64, "microbatch_size": 2, "device": "cuda"}
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


EXAMPLES = [path for path in Path(__file__).parents[2].glob("examples/*.toml") if not path.stem.endswith("_tiny")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits_as_its_comment_says(path):
    """The first rank holds most."""
    predicted = predicted_memory(plan_config(build_config(read_toml(path))), 0).total / 1e9
    assert predicted == pytest.approx(int(re.search(r"# predicted: (\d+) GB of 80,", path.read_text())[1]), rel=0.03)

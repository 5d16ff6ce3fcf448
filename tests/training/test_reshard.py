"""A run saved under one layout goes on under any other with the same tensors and the same losses."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from checkpointed import everything, merged, spoil
from testing import assert_identical, assert_same

from tpformer.config import RunConfig, build_config
from tpformer.models import GPT, GPTConfig
from tpformer.training.checkpoint import Checkpointer, load_checkpoint
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import train_step

SAVED_AT, STEPS, BATCH = 1, 3, 4
EXTRA = {"skipped": 2, "scaler": {"scale": 0.2}}
MODEL = {"vocab_size": 100, "seq_length": 8, "n_layers": 4, "hidden_size": 32, "n_heads": 4, "dropout": 0.1}
EXPERTS = {  # of a run with them: a dense layer first, a shared expert, and a bias that each step moves
    **{"n_experts": 8, "expert_ffn_size": 12, "shared_expert_size": 16, "first_dense_layers": 1, "router_bias": True},
    **{"activation": "swiglu", "bias": False, "norm": "rmsnorm", "router_score": "sigmoid"},
}


def run_config(parallel: dict) -> RunConfig:
    """The run in a layout; with the key "experts" its model has some."""
    parallel = dict(parallel)
    model = MODEL | (EXPERTS if parallel.pop("experts", False) else {})
    train = {"dtype": "float64", "global_batch_size": BATCH, "microbatch_size": 1, "device": "cpu"}
    return build_config({"model": model, "parallel": parallel, "train": train, "data": {"train": ["none"]}})


def train(model: ModelParts, optimizers, first_step: int, last_step: int) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of the steps. Each rank takes its share of the same global batches."""
    share = BATCH // model.layout.data_parallel
    results = []
    for step in range(first_step, last_step + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(100, (BATCH, MODEL["seq_length"] + 1), generator=generator)
        first = model.data_rank * share
        options = {"first_sample": step * BATCH + first, "step": step, "lr": 1e-2 / step, "clip_norm": 1.0}
        result = train_step(model, optimizers, batch[first : first + share], **options)
        results.append((float(result.loss), float(result.norm)))
    return results


def build(parallel: dict):
    config = run_config(parallel)
    model = build_model(config, run_mesh(config, "cpu"))
    return model, [build_optimizer(part, config.optimizer) for part in model.parts]


def save_and_go_on(directory, parallel):
    model, optimizers = build(parallel)
    checkpointer = Checkpointer(directory)
    train(model, optimizers, 1, SAVED_AT)
    checkpointer.save(SAVED_AT, model.parts, optimizers, EXTRA)
    saved = everything(model.parts, optimizers)
    losses = train(model, optimizers, SAVED_AT + 1, STEPS)
    checkpointer.wait()
    return saved, losses


def load_and_go_on(directory, parallel):
    model, optimizers = build(parallel)
    spoil(model.parts)
    checkpointer = Checkpointer(directory)
    assert checkpointer.load(checkpointer.newest(), model.parts, optimizers) == EXTRA
    loaded = everything(model.parts, optimizers)
    return loaded, train(model, optimizers, SAVED_AT + 1, STEPS)


def in_one_process(directory, parallel):
    """`load_and_go_on` with plain tensors, without process groups or meshes."""
    assert not dist.is_initialized()
    config = run_config(parallel)
    fields = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(GPTConfig)}
    part = GPT(GPTConfig(**fields), seed=config.train.seed, dtype=torch.float64)
    spoil([part])
    model = ModelParts([part], microbatch_size=BATCH, router_bias_rate=config.train.router_bias_rate)
    optimizers = [build_optimizer(part, config.optimizer)]
    assert load_checkpoint(directory / f"step-{SAVED_AT}", [part], optimizers) == EXTRA
    loaded = everything([part], optimizers)
    return loaded, train(model, optimizers, SAVED_AT + 1, STEPS)


FULL = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3}
SMALL = {"pipeline_parallel": 2, "data_parallel_shard": 2, "zero_stage": 3}
HYBRID = {"data_parallel_replicate": 2, "data_parallel_shard": 2, "zero_stage": 2, "cpu_offload": True}
ALONE: dict = {}
MATRIX = [
    (SMALL, {"tensor_parallel": 2, "data_parallel_shard": 2, "zero_stage": 1}),
    (SMALL, ALONE),
    (FULL, {"tensor_parallel": 4, "data_parallel_shard": 2, "zero_stage": 1}),
    (FULL, {"pipeline_parallel": 4}),
    (FULL, FULL),
    (FULL, {"pipeline_parallel": 2, "pipeline_schedule": "DualPipeV"}),
    (FULL, HYBRID),
    (HYBRID, {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B", "data_parallel_replicate": 2}),
    ({"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "tensor_parallel": 2}, FULL),
    (ALONE, FULL),
]
MOE: dict = {"experts": True}
MATRIX += [
    ({"tensor_parallel": 2, **MOE}, other)
    for other in (MOE, {"pipeline_parallel": 2, **MOE}, {"data_parallel_shard": 2, "zero_stage": 3, **MOE})
]


def named(parallel: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in parallel.items()) or "one process"


BY_NAME = {named(before): before for before, _ in MATRIX}


@pytest.fixture(scope="module")
def save(ranks, tmp_path_factory):
    """save(layout): the directory, tensors and further losses of a run saved under it."""

    @functools.cache
    def save(name: str):
        directory, parallel = tmp_path_factory.mktemp("run"), BY_NAME[name]
        found = ranks(run_config(parallel).parallel.world_size).run(save_and_go_on, directory, parallel)
        losses = found[0][1]
        assert all(one == losses for _, one in found) and len(losses) == STEPS - SAVED_AT
        return directory, merged([tensors for tensors, _ in found]), losses

    return save


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            *pair,
            id=f"{named(pair[0])} to {named(pair[1])}",
            marks=[pytest.mark.proof] * (number > 1 and "experts" not in pair[0]),
        )
        for number, pair in enumerate(MATRIX)
    ],
)
def test_a_run_goes_on_under_another_layout(ranks, save, before, after):
    """Parameters and optimizer states are equal; losses and gradient norms agree to the rounding of float64."""
    directory, tensors, losses = save(named(before))
    if after in (ALONE, MOE):
        results = [in_one_process(directory, after)]
    else:
        size = run_config(after).parallel.world_size
        results = ranks(size).run(load_and_go_on, directory, after)
    assert_identical(merged([loaded for loaded, _ in results]), tensors)
    moe = {"layers.3.mlp.gate.bias", "layers.3.mlp.experts.down_proj exp_avg", "layers.0.mlp.up_proj.weight"}
    dense = {"layers.3.mlp.fc2.weight", "embed_tokens.weight exp_avg", "norm.weight step"}
    assert (moe if "experts" in before else dense) <= tensors.keys()
    assert "experts" not in before or tensors["layers.3.mlp.gate.bias"].any()
    for _, continued in results:
        assert_same(continued, losses, "losses and gradient norms")

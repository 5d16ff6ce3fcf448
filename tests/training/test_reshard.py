"""A run saved under one layout goes on under any other with the same tensors and the same losses; another model's
checkpoint is refused."""

import dataclasses
import functools
import json
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from small_runs import build, everything, merged, run_config, spoil, take_step
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from turns import in_turns

from tpformer.config import RunConfig
from tpformer.distributed import build_mesh
from tpformer.models import GPT
from tpformer.parallel import local_part, split_stages
from tpformer.training.checkpoint import Checkpointer, CheckpointError, load_checkpoint, newest_good, saved_tensors
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer

SAVED_AT, STEPS, BATCH = 1, 3, 4
EXTRA = {"skipped": 2, "scaler": {"scale": 0.2}}
MODEL = {"vocab_size": 100, "seq_length": 8, "hidden_size": 32, "n_heads": 4, "dropout": 0.1}
EXPERTS = {  # of a run with them: a dense layer first, a shared expert, and a bias that each step moves
    "n_experts": 8, "expert_ffn_size": 12, "shared_expert_size": 16, "first_dense_layers": 1, "router_bias": True,
    "activation": "swiglu", "bias": False, "norm": "rmsnorm", "router_score": "sigmoid",
}  # fmt: skip


def config_of(parallel: dict) -> RunConfig:
    """The run in a layout; with the key "experts" its model has some, with "muon" it trains by that, and with "deep" it
    has a layer for each of four stages, not for each of two."""
    parallel = dict(parallel)
    optimizer = {"name": "muon"} if parallel.pop("muon", False) else {}
    model = MODEL | {"n_layers": 4 if parallel.pop("deep", False) else 2}
    model |= EXPERTS if parallel.pop("experts", False) else {}
    return run_config(parallel, model, optimizer, dtype="float64", global_batch_size=BATCH, microbatch_size=1)


def train(model: ModelParts, optimizers, first_step: int, last_step: int) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of the steps. Each rank takes its share of the same global batches."""
    results = []
    for step in range(first_step, last_step + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(100, (BATCH, MODEL["seq_length"] + 1), generator=generator)
        result = take_step(model, optimizers, batch, step * BATCH, 1e-2 / step)
        results.append((float(result.loss), float(result.norm)))
    return results


def save_and_go_on(directory, parallel):
    model, optimizers = build(config_of(parallel))
    checkpointer = Checkpointer(directory)
    train(model, optimizers, 1, SAVED_AT)
    checkpointer.save(SAVED_AT, model.parts, optimizers, EXTRA)
    saved = everything(model.parts, optimizers)
    losses = train(model, optimizers, SAVED_AT + 1, STEPS)
    checkpointer.wait()
    return saved, losses


def load_and_go_on(directory, parallel):
    model, optimizers = build(config_of(parallel))
    spoil(model.parts)
    checkpointer = Checkpointer(directory)
    assert checkpointer.load(checkpointer.newest(), model.parts, optimizers) == EXTRA
    loaded = everything(model.parts, optimizers)
    return loaded, train(model, optimizers, SAVED_AT + 1, STEPS)


def in_one_process(directory, parallel):
    """`load_and_go_on` with plain tensors, without process groups or meshes."""
    assert not dist.is_initialized()
    config = config_of(parallel)
    part = GPT(config.model.architecture, seed=config.train.seed, dtype=torch.float64)
    spoil([part])
    model = ModelParts([part], microbatch_size=BATCH, router_bias_rate=config.train.router_bias_rate)
    optimizers = [build_optimizer(part, dataclasses.replace(config.optimizer, weight_decay=0.02))]
    assert newest_good(directory, print) == SAVED_AT
    assert load_checkpoint(directory / f"step-{SAVED_AT}", [part], optimizers) == EXTRA
    assert optimizers[0].param_groups[0]["weight_decay"] == 0.02, "hyperparameters are the configuration's"
    optimizers = [build_optimizer(part, config.optimizer)]
    load_checkpoint(directory / f"step-{SAVED_AT}", [part], optimizers)
    spoil([part])
    load_checkpoint(directory / f"step-{SAVED_AT}", [part])  # without an optimizer
    loaded = everything([part], optimizers)
    return loaded, train(model, optimizers, SAVED_AT + 1, STEPS)


TP2, PP2, CP2, EP2 = ({f"{axis}_parallel": 2} for axis in ("tensor", "pipeline", "context", "expert"))
TP4, PP4, CP4 = ({f"{axis}_parallel": 4} for axis in ("tensor", "pipeline", "context"))
DP2, DP4, ZERO3, COPIES = {"data_parallel_shard": 2}, {"data_parallel_shard": 4}, {"zero_stage": 3}, {"zero_stage": 0}
REPLICAS = {"data_parallel_replicate": 2}
SMALL, FULL, CONTEXT, ALONE = {**PP2, **REPLICAS}, {**TP2, **PP2, **DP2, **ZERO3}, {**CP2, **TP2, **ZERO3}, {}
HYBRID = {**REPLICAS, **DP2, "zero_stage": 2, "cpu_offload": True}
MOE, MUON, DEEP = ({name: True} for name in ("experts", "muon", "deep"))
MATRIX = [(SMALL, ALONE), ({**CP2, **DP2, **EP2, **MOE}, {**TP2, **COPIES, **MOE})]
PROOFS = [
    (SMALL, {**TP2, **DP2, "zero_stage": 1}), ({**TP2, **DP2, **ZERO3, **MUON}, {**PP2, **MUON}), (CONTEXT, CP4),
    ({**TP2, **MOE}, MOE), ({**CP2, **MOE}, {**TP2, **MOE}), ({**DP4, **EP2, **MOE}, {**TP2, **COPIES, **MOE}),
    ({**TP2, **MOE}, {**PP2, **MOE}), (FULL, {**TP4, **DP2, "zero_stage": 1}), (FULL, FULL), (FULL, HYBRID),
    (FULL | DEEP, {**PP4, **DEEP}), (FULL | DEEP, {**PP2, "pipeline_schedule": "DualPipeV", **DEEP}),
    (HYBRID | DEEP, {**PP2, "pipeline_schedule": "Interleaved1F1B", **REPLICAS, **DEEP}),
    ({**PP2, "pipeline_schedule": "ZBVZeroBubble", **TP2, **DEEP}, FULL | DEEP), (ALONE, FULL),
    (ALONE, {**CP2, **DP2}), (HYBRID, CONTEXT), ({**CP2, **REPLICAS, **COPIES}, FULL),
    ({**TP2, **MOE}, {**DP2, **ZERO3, **MOE}), ({**DP4, **EP2, **MOE}, {**CONTEXT, "expert_parallel": 4, **MOE}),
    ({**REPLICAS, **DP2, **EP2, **MOE}, {**TP4, **EP2, **MOE}), (MOE, {"data_parallel_replicate": 4, **EP2, **MOE}),
    (FULL | MUON, MUON), (MUON, HYBRID | MUON),
    ({**DP4, **ZERO3, **EP2, **MOE, **MUON}, {**CP2, **TP2, **MOE, **MUON}),
]  # fmt: skip


def named(parallel: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in parallel.items()) or "one process"


BY_NAME = {named(before): before for before, _ in MATRIX + PROOFS}


@pytest.fixture(scope="module")
def save(ranks, tmp_path_factory):
    """save(layout): the directory, tensors and further losses of a run saved under it."""

    @functools.cache
    def save(name: str):
        directory, parallel = tmp_path_factory.mktemp("run"), BY_NAME[name]
        found = ranks(config_of(parallel).parallel.world_size).run(save_and_go_on, directory, parallel)
        losses = found[0][1]
        assert all(one == losses for _, one in found) and len(losses) == STEPS - SAVED_AT
        return directory, merged([tensors for tensors, _ in found]), losses

    return save


@pytest.mark.parametrize(("before", "after"), [*MATRIX, *in_turns(PROOFS)], ids=named)
def test_a_run_goes_on_under_another_layout(ranks, save, before, after):
    """Parameters and optimizer states are equal; losses and gradient norms agree to the rounding of float64."""
    directory, tensors, losses = save(named(before))
    size = config_of(after).parallel.world_size
    results = [in_one_process(directory, after)] if size == 1 else ranks(size).run(load_and_go_on, directory, after)
    assert_identical(merged([loaded for loaded, _ in results]), tensors)
    state = "momentum_buffer" if "muon" in before else "exp_avg"
    moe = {"layers.1.mlp.gate.bias", f"layers.1.mlp.experts.down_proj {state}", "layers.0.mlp.up_proj.weight"}
    dense = {"layers.1.mlp.fc2.weight", "embed_tokens.weight exp_avg", "norm.weight step"}
    assert (moe if "experts" in before else dense) <= tensors.keys()
    assert "experts" not in before or tensors["layers.1.mlp.gate.bias"].any()
    assert_same([continued for _, continued in results], [losses] * len(results), "losses and gradient norms")


def test_every_element_is_written_once_and_every_file_listed(save):
    """Copies of replicated and of tied parameters are not written. The manifest notices damage to any rank's file."""
    path = save(named(SMALL))[0] / f"step-{SAVED_AT}"
    for key, entry in saved_tensors(path, "").items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key
    assert "embed_tokens.weight" in saved_tensors(path, "model.")
    listed, note = (json.loads((path / f"{name}.json").read_text()) for name in ("manifest", "trainer"))
    assert {*listed, "manifest.json"} == {each.name for each in path.iterdir()}
    assert note == {"step": SAVED_AT, "extra": EXTRA}, "it can be read by eye"


def load_other(path, change):
    """Each pipeline rank's message where the model is not the checkpoint's; both have all of a model of one layer."""
    model = dataclasses.replace(config_of(ALONE).model.architecture, **change)
    stages = split_stages(model.layer_costs("parameters"), min(2, model.n_layers))
    part = GPT(model, part=stages[dist.get_rank() % len(stages)], dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, [part], group=dist.group.WORLD)
    return str(error.value)


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(ranks, save):
    path = save(named(SMALL))[0] / f"step-{SAVED_AT}"
    for change, words in (
        ({"n_layers": 3}, ["has no", "model.layers.2.", "more"]),
        ({"n_layers": 1}, ["nothing here takes its", "layers.1."]), ({"hidden_size": 48}, ["(128, 32)", "(128, 48)"]),
    ):  # fmt: skip
        first, second = ranks(2).run(load_other, path, change)
        assert first == second and all(word in first for word in (str(path), *words))


def save_odd(directory):
    """A part with fewer rows than ranks, buffers, a scalar and a frozen parameter, and a part without parameters."""
    model = nn.Sequential(OrderedDict(linear=nn.Linear(3, 2), norm=nn.BatchNorm1d(2)))
    model.linear.weight.requires_grad_(False)
    fully_shard(model, mesh=build_mesh("cpu", data_parallel_shard=4, tensor_parallel=1)["dp_shard"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts, optimizers = [model, nn.ReLU()], [torch.optim.AdamW(trained), torch.optim.AdamW([{"params": []}])]
    model.norm.running_mean += torch.arange(2)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    checkpointer = Checkpointer(directory)
    checkpointer.save(7, parts, optimizers)
    saved = everything(parts, optimizers)
    checkpointer.wait()
    for tensor in model.state_dict().values():
        local_part(tensor).zero_()
    assert checkpointer.load(7, parts, optimizers) == {}
    assert_identical(everything(parts, optimizers), saved)
    return saved


def test_empty_shards_buffers_and_parts_without_parameters(ranks, tmp_path):
    saved = merged(ranks(4).run(save_odd, tmp_path))
    assert saved["linear.bias"].any() and saved["norm.running_mean"].any() and "linear.weight exp_avg" not in saved


@on_every_rank(1)
def test_wrong_calls_write_nothing_and_an_optimizer_that_never_stepped_stays_so(tmp_path):
    """As in a run whose steps were all skipped."""
    model, optimizers = build(config_of(ALONE))
    directory = tmp_path / "checkpoints"
    parts, checkpointer = model.parts, Checkpointer(directory)
    for arguments, error, words in (
        ((1, parts, []), ValueError, "0 optimizers for 1 model parts"),
        ((1, parts, optimizers, {"x": torch.ones(1)}), TypeError, "Tensor"),
        ((1, [nn.ReLU()], optimizers), ValueError, "does not have"),
    ):
        with pytest.raises(error, match=words):
            checkpointer.save(*arguments)
    assert not directory.exists()
    checkpointer.save(3, parts, optimizers)
    train(model, optimizers, 1, 1)
    checkpointer.load(3, parts, optimizers)
    assert not any(" " in key for key in everything(parts, optimizers)), "states have their parameter's name in front"

"""A model that is parallel in place under FSDP2, the compiler, generate, PEFT, Accelerate and Trainer: as alone."""

import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from testing import assert_identical, assert_same, on_every_rank
from tiny import batch, tiny, train, values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from turns import in_turns

import tpformer
from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.in_place.saving import make_known

STEPS, BATCH = 3, 4
BATCHES = [batch(6, number, BATCH) for number in range(STEPS)]
DATASET = [{name: x[row] for name, x in each.items()} for each in BATCHES for row in range(BATCH)]


def clip(model):
    return tpformer.clip_grad_norm_(model, 0.1)


def expected_of(model):
    return train(model, BATCHES, lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))


def parallel(family="llama", data_parallel=1, sequence_parallel=False, plan="auto"):
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    model = tiny(family, torch.float64)
    return tpformer.parallelize(model, mesh["tp"], plan, sequence_parallel=sequence_parallel), mesh["dp_shard"]


def without_outputs(found, trained):
    """Of training: gradients, norms and parameters, which ranks with other samples share."""
    return {name: x for name, x in found.items() if not name.startswith(("loss", "logits"))}, trained


@pytest.fixture
def plan_and_results(family):
    """What all ranks share, so that one process measures and computes it."""
    model = tiny(family, torch.float64)
    return tpformer.auto_plan(model, 2), without_outputs(*expected_of(model))


@pytest.mark.parametrize(("family", "sequence_parallel"), [("qwen2", False), *in_turns([("gpt2", True)], first=1)])
@on_every_rank(4)
def test_fsdp_on_top(family, sequence_parallel, plan_and_results):
    """One has tied tables, and a key-value head that two ranks share; one has fused projections."""
    plan, expected = plan_and_results
    model, mesh = parallel(family, 2, sequence_parallel, plan)
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    samples = [{name: x.chunk(2)[mesh.get_local_rank()] for name, x in each.items()} for each in BATCHES]
    assert_same(without_outputs(*train(model, samples, clip)), expected)


def adapted(model):
    """The model with adapters, in its own dtype."""
    config = LoraConfig(r=3, target_modules="all-linear", lora_alpha=6, bias="none")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def tune(family, adapters_first, lora, folder):
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    model = tiny(family, torch.float64)
    if adapters_first:
        model = tpformer.parallelize(adapted(model), mesh)
    else:
        model = adapted(tpformer.parallelize(model, mesh))
        unknown = r"(q_proj|c_attn) has an adapter that was added to a tensor-parallel.*call parallelize\(model\) again"
        with pytest.raises(ValueError, match=unknown):
            model(**BATCHES[0])
        assert tpformer.parallelize(model) is model
        assert model.base_model.model.lm_head.in_features == 32
    model.load_state_dict(lora, strict=False)
    result = train(model, BATCHES, clip)
    model.save_pretrained(folder)
    for name, p in model.named_parameters():
        p.data.mul_(0 if "lora_" in name else 1)
    set_peft_model_state_dict(model, load_file(Path(folder, "adapter_model.safetensors")))
    assert_identical(values(model), result[1])
    return result


@pytest.mark.parametrize(("family", "adapters_first"), [("gpt2", False), *in_turns([("qwen2", True)], first=2)])
def test_lora_in_both_orders(ranks, tmp_path, family, adapters_first):
    model = adapted(tiny(family, torch.float64))
    torch.manual_seed(1)
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    lora = {name: torch.randn(p.shape, dtype=p.dtype) / 4 for name, p in adapters.items()}
    model.load_state_dict(lora, strict=False)
    expected = expected_of(model)
    plain = {f"base_model.model.{name}": x for name, x in values(tiny(family, torch.float64)).items()}
    for result in ranks(2).run(tune, family, adapters_first, lora, str(tmp_path / "all")):
        assert_same(result, expected)
        frozen = {name.replace(".base_layer", ""): x for name, x in result[1].items() if "lora_" not in name}
        assert_identical(frozen, plain)
    model.save_pretrained(tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "all"))
    one, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "all"))
    assert_same(found, one)
    loaded = PeftModel.from_pretrained(tiny(family, torch.float64), tmp_path / "all")
    with in_float64():
        assert_same(loaded(**BATCHES[0]).logits, model(**BATCHES[0]).logits)


@in_float64()  # transformers computes its loss in float32
def accelerate_loop(model, accelerator, clip_grad_norm_):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(DATASET, batch_size=BATCH))
    norms = []
    for each in loader:
        accelerator.backward(model(**each).loss)
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, values(model)


@contextmanager
def launched(by_torchrun=True):
    """The environment of torchrun, which Accelerate asks how many processes there are, and no memory of another."""
    rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, told):
        for name in () if by_torchrun else told:
            del os.environ[name]
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def on_cpus_of_accelerate():
    model, _ = parallel()
    with launched():
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match="DistributedDataParallel around a model that is cut over ranks"):
            accelerator.prepare(model)
        accelerator.state.device_mesh = model._tpformer.tp.mesh
        return accelerate_loop(model, accelerator, accelerator.clip_grad_norm_)


def test_the_loop_of_accelerate(ranks):
    AcceleratorState._reset_state(reset_partial_state=True)
    model = tiny("llama", torch.float64)
    norms, expected = accelerate_loop(model, Accelerator(cpu=True), torch.nn.utils.clip_grad_norm_)
    assert len(norms) == STEPS
    assert_same(ranks(2).run(on_cpus_of_accelerate), [(norms, expected)] * 2)


@in_float64()
def run_trainer(model, folder):
    options = {"use_cpu": True, "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": 0.01}
    options |= {"max_grad_norm": 0.1, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    options |= {"save_strategy": "steps", "save_steps": STEPS, "save_only_model": True}
    trainer = Trainer(model.train(), TrainingArguments(folder, **options), train_dataset=DATASET)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    log = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return log, values(model)


def trainer_on_ranks(known, folder):
    """known: as on GPUs, where Trainer sees what the model is; Accelerate then refuses CPUs alone."""
    model, _ = parallel()
    if not known:
        with launched(by_torchrun=False):
            return run_trainer(model, f"{folder}/{torch.distributed.get_rank()}")
    make_known(model, 2)
    with launched(), mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        return run_trainer(model, f"{folder}/0")


@pytest.mark.parametrize("known", [False, *in_turns([True], first=0)])
def test_trainer(ranks, tmp_path, known):
    AcceleratorState._reset_state(reset_partial_state=True)
    log, expected = run_trainer(tiny("llama", torch.float64), str(tmp_path / "one"))
    assert len(log) == STEPS
    assert_same(ranks(2).run(trainer_on_ranks, known, str(tmp_path)), [(log, expected)] * 2)
    for part in ("final", f"checkpoint-{STEPS}"):
        assert sorted(os.listdir(tmp_path / "one" / part)) == sorted(os.listdir(tmp_path / "0" / part))
        assert_same(load_file(tmp_path / "0" / part / "model.safetensors"), expected)

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
from testing import assert_identical, assert_same
from tiny import VOCAB, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import tpformer
from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place.saving import make_known

STEPS, BATCH, SEQ = 3, 4, 6


def samples():
    return torch.randint(VOCAB, (STEPS, BATCH, SEQ), generator=torch.Generator().manual_seed(0))


@in_float64()
def train(model, clip, rows=slice(None)):
    """The losses of this rank's samples, and the norms, gradients and parameters of all steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses, found = [], {}
    for step, ids in enumerate(samples()):
        logits = model(input_ids=ids[rows]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[rows, 1:].flatten())
        loss.backward()
        found[f"norm {step}"] = clip(model)
        found |= {f"{name} {step}": full_tensor(p.grad) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    found |= {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    return torch.stack(losses), {name.removeprefix("_orig_mod."): x.clone() for name, x in found.items()}


def expected_of(model):
    return train(model, lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))


def clip(model):
    return tpformer.clip_grad_norm_(model, 0.1)


def parallel(family="llama", data_parallel=1, **options):
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    return tpformer.parallelize(tiny(family, torch.float64, **options), mesh["tp"]), mesh["dp_shard"]


def under_fsdp():
    model, mesh = parallel("qwen2", 2)
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return train(model, clip, slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2))


ONE_LAYER = {"num_hidden_layers": 1}  # the compiler takes seconds for each


def under_compiler():
    return train(torch.compile(parallel(**ONE_LAYER)[0], backend="eager"), clip)


def assert_trained_alike(results, model):
    losses, expected = expected_of(model)
    assert_same(torch.stack([each for each, _ in results]).mean(0), losses)
    for _, found in results:
        assert_same(found, expected)


def test_fsdp_on_top(ranks):
    """The model has tied tables, and a key-value head that two ranks share."""
    assert_trained_alike(ranks(4).run(under_fsdp), tiny("qwen2", torch.float64))


def test_the_compiler(ranks):
    assert_trained_alike(ranks(2).run(under_compiler), tiny("llama", torch.float64, **ONE_LAYER))


def generate():
    return parallel()[0].generate(samples()[0], max_new_tokens=8, do_sample=False, cache_implementation="static")


def test_a_static_cache_gives_the_same_text(ranks):
    expected = tiny("llama", torch.float64).generate(samples()[0], max_new_tokens=8, do_sample=False)
    assert all(torch.equal(found, expected) for found in ranks(2).run(generate))


def sample():
    model, options = parallel()[0], {"max_new_tokens": 8, "do_sample": True}
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(ValueError, match="different random states.*manual_seed"):
        model.generate(samples()[0], **options)
    torch.manual_seed(0)
    return model.generate(samples()[0], **options)


def test_ranks_sample_alike_or_not_at_all(ranks):
    found = ranks(2).run(sample)
    model = tiny("llama", torch.float64)
    torch.manual_seed(0)
    expected = model.generate(samples()[0], max_new_tokens=8, do_sample=True)
    assert all(torch.equal(each, expected) for each in found)


def adapted(model):
    """The model with adapters, in its own dtype."""
    config = LoraConfig(r=3, target_modules="all-linear", lora_alpha=6, bias="none")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def adapter_values(family):
    torch.manual_seed(1)
    names = dict(adapted(tiny(family, torch.float64)).named_parameters())
    return {name: torch.randn(p.shape, dtype=p.dtype) / 4 for name, p in names.items() if "lora_" in name}


def tune(family, adapters_first, values, folder):
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    model = tiny(family, torch.float64)
    if adapters_first:
        model = tpformer.parallelize(adapted(model), mesh)
    else:
        model = adapted(tpformer.parallelize(model, mesh))
        unknown = r"(q_proj|c_attn) has an adapter that was added to a tensor-parallel.*call parallelize\(model\) again"
        with pytest.raises(ValueError, match=unknown):
            model(input_ids=samples()[0])
        assert tpformer.parallelize(model) is model
        assert model.base_model.model.lm_head.in_features == 32
    model.load_state_dict(values, strict=False)
    result = train(model, clip)
    model.save_pretrained(folder)
    for name, p in model.named_parameters():
        p.data.mul_(0 if "lora_" in name else 1)
    set_peft_model_state_dict(model, load_file(Path(folder, "adapter_model.safetensors")))
    assert_identical(result[1] | {name: full_tensor(p.detach()) for name, p in model.named_parameters()}, result[1])
    return result


@pytest.mark.parametrize(
    ("family", "adapters_first"),
    [
        ("qwen2", True),
        ("gpt2", False),
        pytest.param("qwen2", False, marks=pytest.mark.proof),
        pytest.param("gpt2", True, marks=pytest.mark.proof),
    ],
)
def test_lora_in_both_orders(ranks, tmp_path, family, adapters_first):
    model, values = adapted(tiny(family, torch.float64)), adapter_values(family)
    model.load_state_dict(values, strict=False)
    losses, expected = expected_of(model)
    for found_losses, found in ranks(2).run(tune, family, adapters_first, values, str(tmp_path / "all")):
        assert_same(found_losses, losses)
        assert_same(found, expected)
        plain = {f"base_model.model.{name}": x for name, x in tiny(family, torch.float64).named_parameters()}
        frozen = {
            name.replace(".base_layer", ""): x for name, x in found.items() if name[-1:] > "9" and "lora_" not in name
        }
        assert_identical({name: x for name, x in frozen.items() if name in plain}, plain)
    model.save_pretrained(tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "all"))
    one, found = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "all"))
    assert_same(found, one)
    loaded = PeftModel.from_pretrained(tiny(family, torch.float64), tmp_path / "all")
    with in_float64():
        assert_same(loaded(samples()[0]).logits, model(samples()[0]).logits)


def different_samples():
    model, _ = parallel()
    with pytest.raises(ValueError, match="ranks got different inputs.*sampler"):
        model(input_ids=samples()[0].roll(torch.distributed.get_rank(), 0))


def test_different_samples_are_refused(ranks):
    ranks(2).run(different_samples)


def dataset():
    return [{"input_ids": ids, "labels": ids} for ids in samples().flatten(0, 1)]


@in_float64()  # transformers computes its loss in float32
def accelerate_loop(model, accelerator, clip_grad_norm_):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(dataset(), batch_size=BATCH))
    norms = []
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        norms.append(float(clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


@contextmanager
def launched():
    """The environment of torchrun, which Accelerate asks how many processes there are, and no memory of another."""
    rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def on_cpus_of_accelerate():
    model, _ = parallel()
    with launched():
        accelerator = Accelerator(cpu=True)
        with pytest.raises(RuntimeError, match="DTensor|evenly sharded"):  # by DistributedDataParallel
            accelerator.prepare(model)
        accelerator.state.device_mesh = model._tpformer.tp.mesh
        return accelerate_loop(model, accelerator, accelerator.clip_grad_norm_)


def test_the_loop_of_accelerate(ranks):
    AcceleratorState._reset_state(reset_partial_state=True)
    norms, expected = accelerate_loop(
        tiny("llama", torch.float64), Accelerator(cpu=True), torch.nn.utils.clip_grad_norm_
    )
    for found_norms, found in ranks(2).run(on_cpus_of_accelerate):
        assert len(norms) == STEPS
        assert_same(found_norms, norms)
        assert_same(found, expected)


@in_float64()
def run_trainer(model, folder):
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        num_train_epochs=1,
        learning_rate=0.01,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model.train(), arguments, train_dataset=dataset())
    trainer.train()
    trainer.save_model(f"{folder}/final")
    log = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return log, {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


def trainer_on_ranks(known, folder):
    """known: as on GPUs, where Trainer sees what the model is; Accelerate then refuses CPUs alone."""
    model, _ = parallel()
    rank = torch.distributed.get_rank()
    with launched():
        if known:
            make_known(model, 2)
            with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
                return run_trainer(model, f"{folder}/0")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        return run_trainer(model, f"{folder}/{rank}")


@pytest.mark.parametrize("known", [True, False])
def test_trainer(ranks, tmp_path, known):
    AcceleratorState._reset_state(reset_partial_state=True)
    log, expected = run_trainer(tiny("llama", torch.float64), str(tmp_path / "one"))
    assert len(log) == STEPS
    for found_log, found in ranks(2).run(trainer_on_ranks, known, str(tmp_path)):
        assert_same(found, expected)
        assert_same(found_log, log)
    for part in ("final", f"checkpoint-{STEPS}"):
        assert sorted(os.listdir(tmp_path / "one" / part)) == sorted(os.listdir(tmp_path / "0" / part))
        saved = load_file(tmp_path / "0" / part / "model.safetensors")
        assert_same(saved, expected)

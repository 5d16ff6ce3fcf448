"""Adapters of PEFT that are added to a cut model: LoRA is what it is in one process, others are refused by class."""

import re

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from steps import tp_mesh
from testing import assert_same, on_every_rank
from tiny import batch, tiny
from torch import nn

from bench.families.training import in_float64
from tpformer import auto_plan, parallelize

BATCH = batch(6, 0)
NAMES = ["one", "two"]


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **options})


@in_float64()
def logits(model):
    return model(**BATCH).logits.detach()


def with_adapters(model, names):
    """The model with these adapters, whose values do not depend on how it is cut."""
    model = get_peft_model(model, lora(), names[0], autocast_adapter_dtype=False)
    for name in names[1:]:
        model.add_adapter(name, lora(target_modules=["q_proj", "down_proj"], r=3), autocast_adapter_dtype=False)
    return model


def fill(model):
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(p.shape, generator=generator).double() for name, p in model.named_parameters()}
    model.load_state_dict({name: value for name, value in values.items() if "lora_" in name}, strict=False)
    return model


def merged(model, names):
    found = {}
    for name in names:
        model.set_adapter(name)
        found[name] = logits(model)
    model.merge_adapter(names)
    found["merged"] = logits(model)
    model.unmerge_adapter()
    found["unmerged"] = logits(model)
    return found | {"unloaded": logits(model.merge_and_unload(adapter_names=names))}


def on_ranks(directory):
    torch.manual_seed(0)  # lora_A of rank and rank
    first = parallelize(with_adapters(tiny("llama", torch.float64), NAMES), tp_mesh())
    then = parallelize(with_adapters(parallelize(tiny("llama", torch.float64), tp_mesh()), NAMES))
    assert_same(merged(fill(then), NAMES), merged(fill(first), NAMES))
    whole = parallelize(tiny("llama", torch.float64), tp_mesh())
    loaded = PeftModel.from_pretrained(whole, f"{directory}/one", "one", autocast_adapter_dtype=False)
    loaded.load_adapter(f"{directory}/two", "two", autocast_adapter_dtype=False)
    return merged(parallelize(loaded), NAMES)


def test_lora_loads_and_merges(ranks, tmp_path):
    torch.manual_seed(0)
    model = fill(with_adapters(tiny("llama", torch.float64), NAMES))
    model.save_pretrained(tmp_path)
    expected = merged(model, NAMES)
    assert_same(ranks(2).run(on_ranks, str(tmp_path)), [expected] * 2)


ROWS = {"target_modules": ["o_proj"]}
REFUSED = {
    "VeraConfig": peft.VeraConfig(**ROWS),
    "OFTConfig": peft.OFTConfig(**ROWS, oft_block_size=4),
    "HRAConfig": peft.HRAConfig(**ROWS),
    "AdaLoraConfig": peft.AdaLoraConfig(**ROWS, total_step=9),
    "PrefixTuningConfig": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "LoraConfig(init_lora_weights='pissa')": lora(init_lora_weights="pissa"),
    "LoraConfig(init_lora_weights='olora')": lora(init_lora_weights="olora"),
    "LoraConfig(use_dora=True)": lora(use_dora=True),
    "LoraConfig(trainable_token_indices=[1])": lora(trainable_token_indices=[1]),
}


@on_every_rank(2)
def test_others_are_refused_before_they_are_made():
    plan = auto_plan(tiny("llama"), 2)
    for what, config in REFUSED.items():
        model = parallelize(tiny("llama"), tp_mesh(), plan)
        with pytest.raises(ValueError, match=re.escape(f"{what} for a model that is tensor-parallel already")):
            parallelize(get_peft_model(model, config))
    model = parallelize(tiny("llama"), tp_mesh(), plan)
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj)
    with pytest.raises(ValueError, match="up_proj is a Sequential, put in the place of a tensor-parallel module"):
        model(**BATCH)

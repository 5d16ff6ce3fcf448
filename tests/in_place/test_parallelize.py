"""A model made parallel in place computes what it computes in one process, or is refused with the reason."""

import logging
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from steps import tp_mesh
from testing import assert_same, on_every_rank
from tiny import VOCAB, tiny
from torch import nn
from turns import in_turns

from bench.families.training import in_float64
from tpformer import auto_plan, parallelize
from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import local_part

IDS = torch.arange(16).view(2, 8) * 7 % VOCAB


@in_float64()  # what transformers computes in float32, too
def run(model, x):
    model.zero_grad()
    y = model(x)
    y = y if isinstance(y, torch.Tensor) else y.logits
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    named = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters()}
    return {"": y.detach()} | {name: full_tensor(p.grad).clone() for name, p in named.items()}


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 23, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2).eval()


class Scaled(nn.Module):
    """Its own parameter is used on each rank's features, so that its gradients have to be summed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(16, 23), nn.Linear(23, 16), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.scale)


@pytest.mark.parametrize("compiled", [False, *in_turns([True], first=2)])
@on_every_rank(2)
def test_plain_modules_compiled_or_not(compiled):
    for make in (encoder, lambda: Scaled().double()):
        model, x = make(), torch.rand(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        expected = run(make(), x)
        parallelize(model, tp_mesh(), example=torch.rand(2, 3, 16, dtype=torch.float64))
        with torch.no_grad():  # the encoder's fast path would read the weights of its linears
            assert_same(model(x), expected[""])
        assert_same(run(torch.compile(model, backend="aot_eager") if compiled else model, x), expected)


@on_every_rank(2)
def test_what_would_be_silently_wrong_is_refused():
    mesh = tp_mesh()
    rank = mesh.get_local_rank()
    bert, llama = parallelize(tiny("bert", hidden_dropout_prob=0.1), mesh), parallelize(tiny("llama"), mesh)
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    other, graded = Scaled(), Scaled()
    other.up.weight.data = other.up.weight.data.roll(rank, 0)
    graded.up.weight.grad = torch.ones(23, 16)
    torch.manual_seed(rank)
    for reason, call in {
        "ranks got different inputs, but they compute one batch together: give all the same samples, by a sampler":
            lambda: llama(IDS.roll(rank, 0)),
        "different random states, and would draw different tokens: call torch.manual_seed":
            lambda: llama.generate(IDS, do_sample=True, max_new_tokens=1),
        "self_attn draws random numbers (torch, q_proj.lora_dropout.default.p is 0.1), and each rank has only a part":
            lambda: parallelize(get_peft_model(llama, adapters)).train()(IDS),
        "attention draws random numbers (torch, output.dropout.p is 0.1), "
        "and each rank has only a part of its features":
            lambda: bert.train()(IDS),
        "output_attentions=True, but each rank": lambda: bert.eval()(IDS, output_attentions=True),
        "up.weight differs between tensor-parallel ranks": lambda: parallelize(other, mesh, example=torch.rand(2, 16)),
        "up.weight has a gradient": lambda: parallelize(graded, mesh, example=torch.rand(2, 16)),
        "gpus=8, but 2 processes run this program: start it with torchrun --nproc-per-node 8":
            lambda: parallelize(Scaled(), gpus=8),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(reason)):
            call()


@on_every_rank(2)
def test_the_plan_of_another_model_is_measured_again():
    """Its shapes are the same, but the plan would give the layers another number of heads."""
    plan = auto_plan(tiny("opt", torch.float64, num_attention_heads=8), 2)
    found = run(parallelize(tiny("opt", torch.float64), tp_mesh(), plan), IDS)
    assert_same(found, run(tiny("opt", torch.float64), IDS))


@pytest.mark.parametrize(("options", "shape"), [
    ({"num_attention_heads": 2, "intermediate_size": 8}, (1, 1, 2, 1, 2)), *in_turns([({}, (1, 1, 1, 1, 4))], first=2)
])  # fmt: skip
@on_every_rank(4)
def test_from_counts(options, shape):
    model = parallelize(tiny("llama", torch.float64, **options), gpus=4)
    assert model._tpformer.mesh.shape == shape
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.numel() // local_part(weight).numel() == 4
    assert_same(run(model, IDS), run(tiny("llama", torch.float64, **options), IDS))


@on_every_rank(2)
def test_from_counts_the_model_is_verified_and_left_as_it_was():
    """Each module in its own mode, and torch with its warnings."""
    model, logger = tiny("llama", torch.float64).train(), logging.getLogger("torch.distributed.tensor")
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()], logger.level
    assert parallelize(model, gpus=2)._tpformer.tp.size == 2
    assert ([module.training for module in model.modules()], logger.level) == before

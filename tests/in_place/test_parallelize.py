"""A model made parallel in place computes what it computes in one process, or is refused with the reason."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from testing import ROUNDING, assert_kernel_close, assert_same
from tiny import VOCAB, tiny
from torch import nn

from bench.families.training import in_float64
from tpformer import auto_plan, parallelize
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor

IDS = torch.arange(16).view(2, 8) * 7 % VOCAB


def run(model, *args):
    """The result and all gradients, by name; of a model in float64 without what transformers computes in float32."""
    model.zero_grad()
    with in_float64() if next(model.parameters()).dtype == torch.float64 else nullcontext():
        y = model(*args)
    y = y if isinstance(y, torch.Tensor) else y[0]
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(direction.to(y.dtype))
    return {"": y.detach()} | {
        name.removeprefix("_orig_mod."): full_tensor(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def tp_mesh(t):
    return build_mesh("cpu", tensor_parallel=t)["tp"]


def rounded_on_rank(name, t, dtype):
    return run(parallelize(tiny(name, dtype), tp_mesh(t)), IDS)


@pytest.mark.parametrize(("name", "t", "dtype"), [("gpt2", 2, torch.float32), ("qwen2", 4, torch.bfloat16)])
def test_a_language_model_is_as_accurate_as_in_one_process(ranks, name, t, dtype):
    model = tiny(name, dtype)
    baseline = run(model, IDS)
    oracle = run(model.double(), IDS)
    largest = max(oracle, key=lambda key: oracle[key].abs().max())
    # a key's bias has a gradient of zero, but for the rounding of numbers as large as others: it is judged beside them
    zeros = [key for key, x in oracle.items() if x.abs().max() <= ROUNDING * oracle[largest].abs().max()]
    for found in ranks(t).run(rounded_on_rank, name, t, dtype):
        for key in oracle.keys() - zeros:
            assert_kernel_close(found[key], oracle[key], baseline[key], key)
        together = [torch.cat([each[key].flatten() for key in (largest, *zeros)]) for each in (found, oracle, baseline)]
        assert_kernel_close(*together, f"{largest} {zeros}")


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 22, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2).eval()


class Scaled(nn.Module):
    """Its own parameter is used on each rank's features, so that its gradients have to be summed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.scale = nn.Linear(16, 22), nn.Linear(22, 16), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.scale)


def plain_on_rank(x):
    found = []
    for model in (encoder(), Scaled().double()):
        parallelize(model, tp_mesh(4), example=torch.rand(2, 3, 16, dtype=torch.float64))
        with torch.no_grad():  # the encoder's fast path would read the weights of its linears
            y = model(x)
        found.append([{"": y}, run(model, x), run(torch.compile(model, backend="aot_eager"), x)])
    return found


def test_plain_modules_compiled_or_not(ranks):
    x = torch.rand(2, 5, 16, dtype=torch.float64)
    expected = [run(model, x) for model in (encoder(), Scaled().double())]
    for found in ranks(4).run(plain_on_rank, x):
        assert_same(found, [[{"": each[""]}, each, each] for each in expected])


def refused_on_rank():
    mesh = tp_mesh(2)

    def message(function, *args, **kwargs):
        with pytest.raises(ValueError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    rank = mesh.get_local_rank()
    bert, llama = parallelize(tiny("bert", hidden_dropout_prob=0.1), mesh), parallelize(tiny("llama"), mesh)
    found = [message(llama, IDS.roll(rank, 0))]
    torch.manual_seed(rank)
    found.append(message(llama.generate, IDS, do_sample=True, max_new_tokens=1))
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    drawing = get_peft_model(llama, adapters)
    found += [
        message(parallelize(drawing).train(), IDS),
        message(bert.train(), IDS),
        message(bert.eval(), IDS, output_attentions=True),
    ]
    other, graded = Scaled(), Scaled()
    other.scale.data += rank
    graded.up.weight.grad = torch.ones(22, 16)
    found += [message(parallelize, each, mesh, example=torch.rand(2, 16)) for each in (other, graded)]
    return [*found, message(parallelize, Scaled(), gpus=8)]


def test_what_would_be_silently_wrong_is_refused(ranks):
    reasons = (
        "ranks got different inputs, but they compute one batch together: give all the same samples, by a sampler",
        "different random states, and would draw different tokens: call torch.manual_seed",
        "lora_dropout.default.p is 0.1 in training mode",
        "dropout.p is 0.1 in training mode",
        "output_attentions=True, but each rank",
        "scale differs between tensor-parallel ranks",
        "up.weight has a gradient",
        "gpus=8, but 2 processes run this program: start it with torchrun --nproc-per-node 8",
    )
    for found in ranks(2).run(refused_on_rank):
        for message, reason in zip(found, reasons, strict=True):
            assert reason in message


def other_models_plan() -> tuple[torch.Tensor, torch.Tensor]:
    plan = auto_plan(tiny("opt", torch.float64, num_attention_heads=8), 2)
    model, ids = tiny("opt", torch.float64), torch.arange(12).view(2, 6)
    with in_float64():
        expected = model(ids).logits
        return parallelize(model, tp_mesh(2), plan)(ids).logits, expected


def test_the_plan_of_another_model_is_measured_again(ranks):
    """Its shapes are the same, but the plan would give the layers another number of heads."""
    for found, expected in ranks(2).run(other_models_plan):
        assert_same(found, expected)


FEW_HEADS = {"num_attention_heads": 2, "intermediate_size": 8}


def counted_on_rank():
    many, few = tiny("llama"), tiny("llama", torch.float64, **FEW_HEADS)
    for model in (many, few):
        parallelize(model, gpus=4)
    return many._tpformer.mesh.shape, few._tpformer.mesh.shape, run(few, IDS)


def test_from_counts(ranks):
    expected = run(tiny("llama", torch.float64, **FEW_HEADS), IDS)
    for many, few, found in ranks(4).run(counted_on_rank):
        assert (many, few) == ((1, 1, 1, 4), (1, 1, 2, 2))
        assert_same(found, expected)

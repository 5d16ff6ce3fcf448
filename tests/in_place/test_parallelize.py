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
from tpformer.in_place.plan import check_plan

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
        name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }


def tp_mesh(t):
    return build_mesh("cpu", tensor_parallel=t)["tp"]


def on_rank(name, t):
    model = tiny(name, torch.float64)
    before = {key: x.shape for key, x in model.state_dict().items()}
    assert parallelize(model, tp_mesh(t)) is model
    assert {key: x.shape for key, x in model.state_dict().items()} == before
    return run(model, IDS), model.generate(IDS, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize(("name", "t"), [("qwen3", 2), ("gpt2", 2), ("llama", 4), ("qwen2", 4), ("gpt_neox", 4)])
def test_a_language_model_is_that_of_one_process(ranks, name, t):
    """Among them are fewer key-value heads than ranks, and a vocabulary that 4 ranks share unequally."""
    model = tiny(name, torch.float64)
    assert VOCAB % 4 and not auto_plan(model, t).kept.keys() - {"transformer.wpe", "gpt_neox.embed_in"}
    expected = run(model, IDS), model.generate(IDS, max_new_tokens=8, do_sample=False)
    for found in ranks(t).run(on_rank, name, t):
        assert_same(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


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
            found.append(model(x))
        found.append(run(model, x))
    return found


def test_plain_modules(ranks):
    x = torch.rand(2, 5, 16, dtype=torch.float64)
    for found in ranks(4).run(plain_on_rank, x):
        for model, y, both in zip((encoder(), Scaled().double()), found[::2], found[1::2], strict=True):
            expected = run(model, x)
            assert_same(both, expected)
            assert_same(y, expected[""])


def refused_on_rank():
    mesh = tp_mesh(2)

    def message(function, *args, **kwargs):
        with pytest.raises(ValueError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    model = parallelize(tiny("bert", hidden_dropout_prob=0.1), mesh)
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    drawing = get_peft_model(parallelize(tiny("llama"), mesh), adapters)
    found = [
        message(parallelize(drawing).train(), IDS),
        message(model.train(), IDS),
        message(model.eval(), IDS, output_attentions=True),
    ]
    other = Scaled()
    other.scale.data += mesh.get_local_rank()
    graded = Scaled()
    graded.up.weight.grad = torch.ones(22, 16)
    found += [message(parallelize, each, mesh, example=torch.rand(2, 16)) for each in (other, graded)]
    return [*found, message(parallelize, Scaled(), gpus=8)]


def test_what_would_be_silently_wrong_is_refused(ranks):
    reasons = (
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


def test_a_plan_may_be_edited():
    model = tiny("llama")
    plan = auto_plan(model, 2)
    attention = {pattern: style for pattern, style in plan.items() if "self_attn" in pattern}
    found = check_plan(attention, model, 2)
    assert found == attention and {row.split(".")[-1] for row in found.regions} == {"o_proj"}
    assert found.kept["model.layers.*.mlp.up_proj"] == "the plan does not have it"
    gathered = check_plan({"model.layers.*.mlp.up_proj": "colwise_rep", "lm_head": "rowwise_split_input"}, model, 2)
    assert not gathered.regions and len(gathered) == 2


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"lm_head": "sharded"}, "the style 'sharded' is not supported"),
        ({"model.head": "colwise"}, "no module of LlamaForCausalLM has this name"),
        ({"lm_head": "rowwise"}, "lm_head cannot be 'rowwise' on 2 ranks: "),
        ({"model.layers.*.mlp.up_proj": "colwise"}, "give all of them their styles, or leave all whole"),
        ({"model.norm": "colwise_rep"}, "a LlamaRMSNorm is not an nn.Linear itself"),
        ({"model.norm": "replicated_with_grad_allreduce"}, "nothing that is cut uses it"),
    ],
)
def test_an_entry_that_is_not_right_is_refused(entries, reason):
    with pytest.raises(ValueError, match=reason):
        check_plan(entries, tiny("llama"), 2)


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

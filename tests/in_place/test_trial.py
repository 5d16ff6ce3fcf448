"""What is measured of a model: which linears are cut together and how, and the reasons of those that are not."""

import pytest
import torch
from tiny import tiny
from torch import nn

from tpformer import auto_plan

QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LLAMA = {"o_proj": QKV, "down_proj": GATED}
# model -> the names of (row: columns) that are cut on 2 ranks, and words of the reason of some that stay whole
PLANS: dict[str, tuple[dict, dict]] = {
    "llama": (LLAMA, {}),
    "gemma2": (LLAMA, {"lm_head": "it is tied to model.embed_tokens, and a Gemma2TextScaledWordEmbedding is not"}),
    "gpt2": ({"attn.c_proj": ("c_attn",), "mlp.c_proj": ("c_fc",)}, {"transformer.wpe": "neither a tied output layer"}),
    "gpt_neox": ({"dense": ("query_key_value",), "dense_4h_to_h": ("dense_h_to_4h",)}, {}),
    "bert": (
        {"attention.output.dense": ("self.query", "self.key", "self.value"), "output.dense": ("intermediate.dense",)},
        {"cls.predictions.transform.dense": "reaches it, and also"},
    ),
    "bloom": ({"dense_4h_to_h": ("dense_h_to_4h",)}, {"transformer.h.*.self_attention.dense": "BloomAttention raises"}),
    "falcon": ({"self_attention.dense": ("query_key_value",), "dense_4h_to_h": ("dense_h_to_4h",)}, {}),
    "mixtral": ({"o_proj": QKV}, {"model.layers.*.mlp.experts": "moe_tp_experts"}),
    "phi3": ({"down_proj": ("gate_up_proj",)}, {}),
    "olmo2": ({"down_proj": GATED}, {}),
    "t5": ({"wo": ("wi",)}, {"decoder.block.*.layer.*.EncDecAttention.q": "T5Attention raises"}),
    "vit": ({"o_proj": QKV, "fc2": ("fc1",)}, {"classifier": "reaches it, and also"}),
    "bart": ({"self_attn.out_proj": QKV, "encoder_attn.out_proj": QKV, "fc2": ("fc1",)}, {}),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_cut(name):
    rows, kept = PLANS[name]
    plan = auto_plan(tiny(name), 2)
    found = {row: region.columns for row, (region, _) in plan.regions.items()}
    for row, columns in found.items():
        assert columns in [rows[end] for end in rows if row.endswith(f".{end}")], row
    for end in rows:
        assert any(row.endswith(f".{end}") for row in found), end
    for pattern, words in kept.items():
        assert words in plan.kept[pattern] and f"{pattern} " in str(plan)
    for pattern in plan:
        assert pattern not in plan.kept


@pytest.mark.parametrize(("name", "t"), [("qwen2", 4), ("gpt2", 2), ("phi3", 4)])
def test_a_model_on_meta_gets_the_same_plan(name, t):
    with torch.device("meta"):
        model = tiny(name)
    found, expected = auto_plan(model, t), auto_plan(tiny(name), t)
    assert (found, found.regions, found.kept) == (expected, expected.regions, expected.kept)


def way(plan, row):
    return next(way for name, (_, way) in plan.regions.items() if name.endswith(row))


def test_ways():
    shared = way(auto_plan(tiny("llama"), 4), "o_proj")  # 2 key-value heads of 8 on 4 ranks
    assert shared.cuts["k_proj"].blocks == ((16, 2),) and shared.attributes == {"": {"num_key_value_groups": 1}}
    assert [shared.cuts["k_proj"].rows(rank, 4) for rank in (1, 2)] == [(slice(0, 8),), (slice(8, 16),)]
    packed = way(auto_plan(tiny("gpt2"), 4), "attn.c_proj")
    assert packed.cuts["c_attn"].rows(3, 4) == (slice(24, 32), slice(56, 64), slice(88, 96))
    assert packed.attributes[""]["split_size"] == 8
    fused = way(auto_plan(Fused(), 2, example=torch.rand(2, 3, 8)), "out")  # queries of 8, keys and values of 2
    assert fused.cuts["qkv"].blocks == ((8, 2), (2, 1), (2, 1))
    assert way(auto_plan(tiny("qwen3"), 4), "o_proj").summed == ("k_norm", "q_norm")


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(8, 12), nn.Linear(8, 8), 4

    def forward(self, x):
        q, k, v = self.qkv(x).split([2 * self.num_heads, 2, 2], -1)
        heads = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (q, k, v))
        return self.out(nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2).flatten(2))


class Between(nn.Module):
    """Two linears, and what is between them."""

    def __init__(self, middle, width=8):
        super().__init__()
        self.a, self.b, self.c, self.middle = nn.Linear(8, width), nn.Linear(width, 8), nn.Linear(8, 8), middle
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.middle(self, x)


def normed(self, x):
    return self.b(self.a(x).softmax(-1))


def positioned(self, x):
    y = self.a(x)
    return self.b(y * torch.arange(y.shape[-1]))


def shifted(self, x):
    return self.b(self.a(x).roll(1, -1))


def added(self, x):
    return self.b(self.a(x) + x)


def used_twice(self, x):
    y = self.a(x)
    return self.b(y) + self.c(y)


def returned(self, x):
    y = self.a(x)
    return self.b(y), y


def zeroed(self, x):
    return self.b(self.a(x).relu() * self.scale)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (normed, "does not compute that rank's part"),
        (positioned, "does not compute that rank's part"),
        (shifted, "does not compute that rank's part"),
        (added, "raises RuntimeError"),
        (used_twice, "the output of a reaches it, and also c"),
        (returned, "the output of a reaches it, and also the result"),
    ],
)
def test_what_cannot_be_cut(middle, reason):
    plan = auto_plan(Between(middle), 2, example=torch.rand(3, 8))
    assert not plan and reason in plan.kept["b"]


def mixed(self, x):
    return self.b(self.a(self.scale * x) * self.scale)


def test_gradients_that_add_up_are_found():
    zero = way(auto_plan(Between(zeroed, width=10), 4, example=torch.rand(3, 8)), "b")
    assert [zero.cuts["a"].rows(rank, 4)[0] for rank in (0, 3)] == [slice(0, 3), slice(9, 10)]
    assert zero.summed == ("",)  # the module that holds scale, which is 0
    both = auto_plan(Between(mixed), 2, example=torch.rand(3, 8))
    assert not both and "scale of Between reaches b also around a" in both.kept["b"]


def test_an_example_is_needed():
    with pytest.raises(ValueError, match="nothing tells what inputs Between takes: give parallelize an example="):
        auto_plan(Between(zeroed), 2)
    with pytest.raises(ValueError, match="Between cannot run the example.*RuntimeError"):
        auto_plan(Between(zeroed), 2, example=torch.rand(3, 7))

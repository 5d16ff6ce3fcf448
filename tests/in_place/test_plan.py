"""What is measured of a model: which linears are cut together and how, and the reasons of those that stay whole."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from testing import on_every_rank
from tiny import tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.in_place import alone, auto_plan, parallelize, verify
from tpformer.in_place.plan import Plan, check_plan
from tpformer.in_place.trial import Refused, find_way
from tpformer.in_place.ways import Cut, Way

QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LLAMA = {"o_proj": QKV, "down_proj": GATED}
# model -> the names of (row: columns) that are cut together on 2 ranks, and words of why some others are not
PLANS: dict[str, tuple[dict, dict]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (LLAMA, {})),
    "gemma2": (LLAMA, {}),
    "gpt2": ({"attn.c_proj": ("c_attn",), "mlp.c_proj": ("c_fc",)}, {}),
    "gptneox": ({"dense": ("query_key_value",), "dense_4h_to_h": ("dense_h_to_4h",)}, {}),
    "bert": (
        {"attention.output.dense": ("self.query", "self.key", "self.value"), "output.dense": ("intermediate.dense",)},
        {"cls.predictions.transform.dense": "reaches it, and also"},
    ),
    "bloom": ({"dense_4h_to_h": ("dense_h_to_4h",)}, {"transformer.h.*.self_attention.dense": "BloomAttention raises"}),
    "falcon": ({"self_attention.dense": ("query_key_value",), "dense_4h_to_h": ("dense_h_to_4h",)}, {}),
    "mixtral": ({"o_proj": QKV}, {"model.layers.*.mlp.gate": "is not an nn.Linear itself"}),
    "phi3": ({"down_proj": ("gate_up_proj",)}, {}),
    "olmo2": ({"down_proj": GATED}, {}),
    "t5": ({"wo": ("wi",)}, {"decoder.block.*.layer.1.EncDecAttention.q": "T5Attention raises"}),
    "vit": ({"o_proj": QKV, "fc2": ("fc1",)}, {"classifier": "reaches it, and also"}),
    "bart": ({"self_attn.out_proj": QKV, "encoder_attn.out_proj": QKV, "fc2": ("fc1",)}, {}),
}
WIDTH = 16
GLOBAL: dict[str, Tensor] = {}


def divided(model: nn.Module, plan: Plan) -> float:
    """The share of the parameters that the ranks divide; what several modules hold counts for each."""
    sizes = {name: sum(p.numel() for p in m.parameters(recurse=False)) for name, m in model.named_modules()}
    cut = [n for name, n in sizes.items() if plan.style(name) not in (*alone.WHOLE, *alone.SUMMED)]
    return sum(cut) / sum(sizes.values())


@pytest.mark.parametrize("name", [
    *(FEW := ("llama", "gpt2", "bert", "bloom", "mixtral", "t5", "vit")),
    *in_turns(name for name in PLANS if name not in FEW),
])  # fmt: skip
def test_what_is_cut(name):
    rows, kept = PLANS[name]
    model = tiny(name)
    plan = auto_plan(model, 2)
    found = {row: tuple(each.removeprefix(f"{way.root}.") for each in way.cuts) for row, way in plan.regions.items()}
    for row, columns in found.items():
        assert columns in [rows[end] for end in rows if row.endswith(f".{end}")], row
    for end in rows:
        assert any(row.endswith(f".{end}") for row in found), end
    for pattern, words in kept.items():
        assert words in {**plan.kept, **plan.gathered}[pattern] and f"{words}" in str(plan)
    assert not plan.keys() & plan.kept.keys() and divided(model, plan) > 0.9


@pytest.mark.parametrize(("name", "t"), [("qwen2", 4), *in_turns([("gpt2", 2), ("phi3", 4)], first=0)])
def test_a_model_on_meta_gets_the_same_plan(name, t):
    with torch.device("meta"):
        model = tiny(name)
    found, expected = auto_plan(model, t), auto_plan(tiny(name), t)
    assert (found, found.regions, found.kept) == (expected, expected.regions, expected.kept)


def way(plan, row):
    """(the way of a region, its root with a dot behind it)"""
    found = next(way for name, way in plan.regions.items() if name.endswith(row))
    return found, f"{found.root}." if found.root else ""


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.num_heads = nn.Linear(8, 12), nn.Linear(8, 8), 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([2 * self.num_heads, 2, 2], -1)
        heads = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in (q, k, v))
        return self.out(nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2).flatten(2))


def test_ways():
    shared, root = way(auto_plan(tiny("llama"), 4), "o_proj")  # 2 key-value heads of 8 on 4 ranks
    assert shared.cuts[f"{root}k_proj"].blocks == ((16, 2),)
    assert shared.attributes == {shared.root: {"num_key_value_groups": 1}}
    assert [shared.cuts[f"{root}k_proj"].rows(rank, 4) for rank in (1, 2)] == [(slice(0, 8),), (slice(8, 16),)]
    packed, root = way(auto_plan(tiny("gpt2"), 4), "attn.c_proj")
    assert packed.cuts[f"{root}c_attn"].rows(3, 4) == (slice(24, 32), slice(56, 64), slice(88, 96))
    assert packed.attributes[packed.root]["split_size"] == 8
    fused, _ = way(auto_plan(Fused(), 2, example=torch.rand(2, 3, 8)), "out")  # queries of 8, keys and values of 2
    assert fused.cuts["qkv"].blocks == ((8, 2), (2, 1), (2, 1))
    normed, root = way(auto_plan(tiny("qwen3"), 4), "o_proj")
    assert normed.summed == (f"{root}k_norm.weight", f"{root}q_norm.weight")
    model = Between(lambda m, h, x: h.relu() * m.scale, hidden=10)
    nn.init.zeros_(model.scale)
    added, _ = way(auto_plan(model, 4, example=torch.rand(3, WIDTH)), "down")
    assert [added.cuts["up"].rows(rank, 4)[0] for rank in (0, 3)] == [slice(0, 3), slice(9, 10)]
    assert added.summed == ("scale",)  # which is 0


def norm(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=-1)


def relu(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return h.relu()


class Between(nn.Module):
    """Two linears. middle: what becomes of (module, hidden, input) between them; after: of (module, hidden, y)."""

    def __init__(self, middle: Callable = relu, after: Callable = lambda m, h, y: y, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Linear(hidden, WIDTH)
        self.scale, self.num_heads = nn.Parameter(torch.ones(1)), 4
        self.middle, self.after = middle, after

    def forward(self, x: Tensor, **options: bool) -> Any:
        h = self.middle(self, self.up(x), x, **options)
        return self.after(self, h, self.down(h))


class Around(Between):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale * x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Between(lambda m, h, x, coupled=False: norm(h) if coupled else h.relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x), coupled=True)


def keeps_mean(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    module.mean = h.detach().mean()
    return h.relu()


def keeps_in_a_buffer() -> nn.Module:
    model = Between(keeps_mean)
    model.register_buffer("mean", torch.zeros(()))
    return model


def keeps_in_a_list(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    vars(module).setdefault("seen", {"means": []})["means"].append(h.detach().mean())
    return h.relu()


def keeps_a_number(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    module.positive = int((h > 0).sum())
    return h.relu()


def by_heads(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return h.unflatten(-1, (module.num_heads, 8)).softmax(-1).flatten(-2)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    model[2].weight = model[0].weight
    return model


def normed(hooked: bool) -> nn.Module:
    model = Between()
    if hooked:
        model.up.register_forward_hook(lambda module, args, output: norm(output))
    else:
        model.up.forward = lambda x, forward=model.up.forward: norm(forward(x))
    return model


def watched() -> nn.Module:
    """A hook keeps what it sees in a list that no module holds."""
    model, seen = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)), list[Tensor]()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().mean()))
    return model


class KeepsGlobally(Between):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        GLOBAL["mean"] = h.detach().mean()
        return self.down(h.relu())


def recomputed() -> nn.Module:
    """In the backward it reads a parameter of which the forward has seen a rank's part."""
    model = Between(lambda m, h, x: checkpoint(lambda y: torch.tanh(y * m.scale), h, use_reentrant=False))
    model.scale = nn.Parameter(torch.ones(32))
    return model


# what a trial of one block finds wrong, and then what only the whole model shows
OTHERWISE = "does not compute that rank's part"
WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a sum over features": (lambda: Between(lambda m, h, x: h.softmax(-1)), OTHERWISE),
    "positions": (lambda: Between(lambda m, h, x: h * torch.arange(h.shape[-1])), OTHERWISE),
    "a shift": (lambda: Between(lambda m, h, x: h.roll(1, -1)), OTHERWISE),
    "the input's shape": (lambda: Between(lambda m, h, x: h + x, hidden=WIDTH), "raises RuntimeError"),
    "others": (lambda: Between(after=lambda m, h, y: y + m.other(h)), "output of up reaches it, and also other"),
    "the result": (lambda: Between(after=lambda m, h, y: (y, h)), "the output of up reaches it, and also the result"),
    "a parameter before": (lambda: Around(lambda m, h, x: h * m.scale), "scale of Around reaches down also around up"),
    "a detached mean": (lambda: Between(keeps_mean, lambda m, h, y: y * m.mean), "is also used elsewhere"),
    "a kept mean": (lambda: Between(keeps_mean), "is also used elsewhere"),
    "a buffer": (keeps_in_a_buffer, "kept by a module"),
    "means in a list": (lambda: Between(keeps_in_a_list), "is also used elsewhere"),
    "a kept number": (lambda: Between(keeps_a_number), "is also used elsewhere"),
    "a hook's list": (watched, "is also used elsewhere"),
    "a global dictionary": (KeepsGlobally, "is also used elsewhere"),
    "a layer": (lambda: nn.Sequential(Between(), Between(lambda m, h, x: norm(h))), "1.down does not get that rank's"),
    "another call": (Twice, "inner.down does not get that rank's part in its call 2"),
    "training": (lambda: Between(lambda m, h, x: norm(h) if m.training else h.relu()), "in training mode"),
    "an integer": (lambda: Between(by_heads, lambda m, h, y: y / m.num_heads), "integer .* also used elsewhere"),
    "a scale": (lambda: Between(lambda m, h, x: h * m.scale, lambda m, h, y: y * m.scale), "parameter .* elsewhere"),
    "the input": (lambda: Between(lambda m, h, x: h * x.mean()), "reaches down also around up"),
    "a checkpoint": (recomputed, "Between raises RuntimeError"),
    "a hook": (lambda: normed(True), "up has a hook"),
    "a tie": (tied, "is tied to another module"),
    "a forward": (lambda: normed(False), "no other linear's output reaches it"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_not_right_in_the_whole_model_stays_whole(case):
    torch.manual_seed(0)
    make, reason = WHOLE[case]
    plan = auto_plan(make(), 2, example=torch.randn(2, 6, WIDTH))
    said = [why for name, why in {**plan.kept, **plan.gathered}.items() if name.endswith(("down", "2"))]
    assert not plan.regions and any(re.search(reason, why) for why in said), str(plan)
    assert {*plan.values()} <= {"colwise_gather_output"}


def test_times_and_counts_that_a_module_keeps_leave_its_linears_divided() -> None:
    """They differ from run to run, or are alike in all."""

    def middle(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        module.at, module.calls = time.perf_counter(), getattr(module, "calls", 0) + 1
        return h.relu()

    assert auto_plan(Between(middle), 2, example=torch.randn(2, 6, WIDTH)).regions.keys() == {"down"}


def test_ranks_that_share_heads_each_hold_rows_of_their_weight() -> None:
    """Of 6 rows in chunks of 2 the last of four ranks would hold none, though it may compute the second head."""

    class Heads(Between):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).unflatten(-1, (2, 3)).repeat_interleave(4, -2).flatten(-2))

    model = Heads()
    model.up, model.down = nn.Linear(WIDTH, 6), nn.Linear(24, WIDTH)
    plan = auto_plan(model, 4, example=torch.randn(2, 6, WIDTH))
    assert plan["down"] == "colwise_gather_output" and "4 ranks cannot share 6 features" in plan.kept["up"], plan


@on_every_rank(2)
def test_outputs_of_linears_may_be_written_in_place() -> None:
    """The gradient of PReLU's slope is summed."""
    torch.manual_seed(0)
    tp, x, relu = build_mesh("cpu", tensor_parallel=2)["tp"], torch.randn(2, 6, WIDTH).double(), nn.ReLU(inplace=True)
    up, down, again, last = (nn.Linear(*sizes) for sizes in ((WIDTH, 32), (32, WIDTH)) * 2)
    model = nn.Sequential(up, relu, down, relu, again, nn.PReLU(), last).double()
    report = verify(model, lambda whole: parallelize(whole, tp, example=x), x)
    report.check()
    plan = auto_plan(model, 2, example=x)
    assert plan["2"] == "rowwise" and plan["5"] == "replicated_with_grad_allreduce"
    assert "are those" in report.sentence


class Narrow(Between):
    """A block of another class than those beside it."""


def test_a_star_stands_for_blocks_of_one_class():
    """The first block has a number of its own, and stays whole because two ranks cannot share its one feature."""
    model = nn.Sequential(Narrow(hidden=1), *(Between(hidden=64) for _ in range(3)))
    plan = auto_plan(model, 2, example=torch.randn(2, WIDTH))
    assert plan["*.up"] == "colwise" and "0.up" in plan.kept
    for found in (plan, check_plan(plan, model, plan)):
        assert found == plan and [found.style(f"{i}.up") for i in range(3)] == ["replicate", "colwise", "colwise"]


def test_a_plan_may_be_edited():
    model = tiny("llama")
    plan = auto_plan(model, 2)
    attention = {pattern: style for pattern, style in plan.items() if "self_attn" in pattern}
    found = check_plan(attention, model, plan)
    assert found == attention and {row.split(".")[-1] for row in found.regions} == {"o_proj"}
    assert found.kept["model.layers.*.mlp.up_proj"] == "the plan does not have it"
    gathered = check_plan({"model.layers.*.mlp.up_proj": "colwise_rep", "lm_head": "rowwise_split_input"}, model, plan)
    assert not gathered.regions and len(gathered) == 2
    plan["model.norm"] = "colwise_rep"
    with pytest.raises(ValueError, match="a LlamaRMSNorm is not an nn.Linear itself"):
        check_plan(plan, model, plan)


def test_what_cannot_be_planned_is_refused():
    model = tiny("llama")
    measured = auto_plan(model, 2)
    for words, entries in {
        "the style 'sharded' is not supported": {"lm_head": "sharded"},
        "no module of LlamaForCausalLM has this name": {"model.head": "colwise"},
        "lm_head cannot be 'rowwise' on 2 ranks: ": {"lm_head": "rowwise"},
        "give all of them their styles, or leave all whole": {"model.layers.*.mlp.up_proj": "colwise"},
        "a LlamaRMSNorm is not an nn.Linear itself": {"model.norm": "colwise_rep"},
        "nothing that is cut uses it": {"model.norm": "replicated_with_grad_allreduce"},
    }.items():
        with pytest.raises(ValueError, match=words):
            check_plan(entries, model, measured)
    with pytest.raises(ValueError, match="nothing tells what inputs Between takes: give parallelize an example="):
        auto_plan(Between(), 2)
    with pytest.raises(ValueError, match="Between cannot run the example.*RuntimeError"):
        auto_plan(Between(), 2, example=torch.rand(3, 7))
    for number in (0, 1.5):
        with pytest.raises(ValueError, match=f"a plan for {number} ranks: give the number"):
            auto_plan(model, number)
        with pytest.raises(ValueError, match=f"gpus={number}: give the number of processes"):
            parallelize(model, gpus=number)


class Holding(nn.Module):
    """Parameters between two linears, which this module uses and another one holds: it has no forward of its own."""

    def __init__(self, held: nn.Module, read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.up, self.down, self.held, self.read = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), held, read

    def forward(self, x: Tensor) -> Tensor:
        (scale, shift), h = self.read(self.held), self.up(x)
        return self.down(torch.tanh(h * scale) + h * shift)


HOLDERS: list[tuple[Callable[[Tensor], nn.Module], Callable[[Any], tuple[Tensor, Tensor]]]] = [
    (lambda x: nn.ParameterList([x, x + 1]), lambda held: (held[0], held[1])),
    (lambda x: nn.ParameterDict({"a": x, "b": x + 1}), lambda held: (held["a"], held["b"])),
    (
        lambda x: nn.ModuleList(nn.PReLU(x.numel(), init=0.3) for _ in range(2)),
        lambda held: [each.weight for each in held],
    ),
]


@on_every_rank(2)
def test_parameters_that_another_module_holds() -> None:
    """Ranks see their part of vectors; gradients of what every rank uses are summed."""
    tp, x = build_mesh("cpu", tensor_parallel=2)["tp"], torch.randn(2, 6, WIDTH).double()
    for (hold, read), shape in zip(HOLDERS, ((32,), (), (1,)), strict=True):
        torch.manual_seed(0)
        model = Holding(hold(torch.rand(shape)), read).double()
        assert auto_plan(model, 2, example=x)["down"] == "rowwise"
        verify(model, lambda whole: parallelize(whole, tp, example=x), x).check()


class Shares(nn.Module):
    """The example of tpformer/in_place/trial.py; together: all features are divided by their common sum."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.n_heads, self.together, self.scale = 2, together, nn.Parameter(torch.tensor([1.0, 10.0]))
        self.up, self.row = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        heads = self.up(x).abs().unflatten(-1, (self.n_heads, -1))
        return self.row((heads / heads.sum((-2, -1) if self.together else -1, keepdim=True) * self.scale).flatten(-2))


def test_the_example_of_the_trial():
    call = (torch.ones(2, 3),), {}
    way = find_way(Shares(False), ("up",), "row", call, 2)
    assert way == Way({"up": Cut(((4, 2),))}, {"": {"n_heads": 1}}, summed=("scale",))
    with pytest.raises(Refused, match="does not compute that rank's part of what row gets"):
        find_way(Shares(True), ("up",), "row", call, 2)

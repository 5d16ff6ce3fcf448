"""MoE equals a loop over experts in float64 with every gradient, on one rank and on several, however it routes."""

from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from steps import Results, assert_ranks_have, draw, each_case, gradients, own, tp_mesh
from testing import assert_same, on_every_rank
from turns import in_turns

from tpformer import ops
from tpformer.distributed import record_collectives
from tpformer.layers import MLP, MoE, Positions, TensorParallel, balance_losses, init_weights
from tpformer.layers.explain import called_modules

BATCH, SEQ, HIDDEN, WIDTH, EXPERTS = 2, 6, 16, 12, 4
TOKENS = BATCH * SEQ
KINDS = {
    "softmax": {},
    "not-normalised": {"policy": ops.Policy(3, normalised=False, scale=0.5)},
    "sigmoid-bias-shared": {"policy": ops.Policy(2, "sigmoid", scale=2.5), "router_bias": True, "shared_ffn_size": 8},
    "groups": {"policy": ops.Policy(2, "sigmoid", groups=2, top_groups=1)},
    "geglu": {"activation": "geglu", "shared_ffn_size": 12},
    "balance": {"balance": 0.3},
    "balance-sigmoid": {"balance": 0.3, "policy": ops.Policy(2, "sigmoid")},
    "one-expert-a-token": {"policy": ops.Policy(1, normalised=False)},
    "every-expert": {"policy": ops.Policy(4)},
}
ROUTINGS = ("as it comes", "all on one expert", "ranks without tokens")
SHARED, BOTH = ["sigmoid-bias-shared"], (True, False)
CHILDREN = ("gate", "experts", "shared_experts", "shared_experts.up_proj")
# by ranks; a child with a hook is called as a module
CASES = {
    1: [*product(KINDS, BOTH, ROUTINGS), ("softmax", False, "as it comes", "auto", None, True)],
    2: [
        *product(KINDS, BOTH), *product(SHARED, BOTH, ROUTINGS[:1], ["auto"], CHILDREN),
        *product(SHARED, BOTH, ROUTINGS[:1], ["auto"], (None, "gate"), [True]),
    ],
    4: [
        *product(KINDS, BOTH), *product(["softmax", *SHARED], BOTH, ROUTINGS[:1], ["pipelined"]),
        *product(SHARED, BOTH, ROUTINGS[1:], ("sequential", "pipelined")),
    ],
}  # fmt: skip


def make_moe(kind: str, mesh=None, sequence_parallel: bool = True, routed: str = "as it comes", **options) -> MoE:
    torch.manual_seed(0)
    transport, hooked = options.pop("transport", "auto"), options.pop("hooked", None)
    tp = mesh if isinstance(mesh, TensorParallel) else TensorParallel(mesh, sequence_parallel, transport)
    options = {**KINDS[kind], "dtype": torch.float64, "init_std": 0.5} | options
    moe = MoE(HIDDEN, EXPERTS, ffn_hidden_size=WIDTH, tp=tp, **options)
    if moe.gate.bias is not None:
        moe.gate.bias.copy_(torch.tensor([0.5, -0.3, 0.2, 0.0]))
    if routed != "as it comes":  # a bias that no score reaches
        best = {"all on one expert": [-9.0, -9.0, 9.0, 8.0], "ranks without tokens": [9.0, 8.0, 7.0, 0.0]}[routed]
        moe.gate.bias = torch.tensor(best, dtype=torch.float64)
    if hooked is not None:
        moe.get_submodule(hooked).register_forward_hook(lambda module, args, output: None)
    return moe


def inputs() -> list[torch.Tensor]:
    return draw(*[(BATCH, SEQ, HIDDEN)] * 2)


def chosen(scores: torch.Tensor, policy: ops.Policy) -> torch.Tensor:
    """The experts of each token, by a loop over tokens."""
    found = []
    for row in scores.detach().tolist():
        size = len(row) // policy.groups
        best = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(policy.groups)]
        allowed = sorted(range(policy.groups), key=lambda g: -best[g])[: policy.top_groups]
        candidates = [e for e in range(len(row)) if e // size in allowed]
        found.append(sorted(candidates, key=lambda e: -row[e])[: policy.k])
    return torch.tensor(found)


def by_loop(moe: MoE, x: torch.Tensor, dy: torch.Tensor, half: torch.dtype | None = None) -> Results:
    """Result and gradients of a loop over experts with the values of ours; the balance loss is DeepSeek-V3's.
    half: what autocast makes the experts' products in; the router's stay as they are."""
    p = {name: value.detach().clone().requires_grad_() for name, value in moe.named_parameters()}
    x = x.detach().clone().requires_grad_()
    rows, policy = x.flatten(0, 1), moe.gate.policy
    logits = rows @ p["gate.weight"].t()
    scores = logits.softmax(1) if policy.score == "softmax" else logits.sigmoid()
    experts = chosen(scores if moe.gate.bias is None else scores + moe.gate.bias, policy)
    weights = scores.gather(1, experts)
    weights = policy.scale * (weights / weights.sum(1, keepdim=True) if policy.normalised else weights)
    act = F.silu if moe.experts.activation == "silu" else lambda z: F.gelu(z, approximate="tanh")
    y = torch.zeros_like(rows)
    for e in range(EXPERTS):
        with torch.autocast("cpu", half, enabled=half is not None):
            gate, up = (rows @ p["experts.gate_up_proj"][e].t()).chunk(2, 1)
            of_expert = act(gate) * up @ p["experts.down_proj"][e].t()
        y = y + (weights * (experts == e)).sum(1, keepdim=True) * of_expert
    if moe.shared_experts is not None:
        gate, up, down = (p[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
        y = y + (act(rows @ gate.t()) * (rows @ up.t())) @ down.t()
    shares = (scores / scores.sum(1, keepdim=True)).view(BATCH, SEQ, EXPERTS)
    counts = F.one_hot(experts, EXPERTS).sum(1).view(BATCH, SEQ, EXPERTS).double()
    balance = moe.gate.balance * (EXPERTS / policy.k * counts.mean(1) * shares.mean(1)).sum() * SEQ
    ((y * dy.flatten(0, 1)).sum() + balance).backward()
    loss = {"balance": balance.detach()} if moe.gate.balance else {}
    return {"y": y.detach(), "dx": x.grad.flatten(0, 1), **loss} | {name: tensor.grad for name, tensor in p.items()}


def run(moe: MoE, x: torch.Tensor, dy: torch.Tensor, residual: bool = False) -> Results:
    """Result and gradients of rows of ours, the balance loss included."""
    x = x.detach().clone().requires_grad_()
    with balance_losses() as losses:
        y = moe.branch(x, residual=True) if residual else moe(x, Positions(BATCH, SEQ))
    ((y * dy).sum() + sum(losses)).backward()
    loss = {"balance": losses[0].detach()} if losses else {}
    return {"y": y.detach(), "dx": x.grad, **loss} | gradients(moe)


@pytest.mark.parametrize("hooked", [None, "gate"])
def test_a_balance_loss_alone_has_its_gradients(hooked):
    moe, (x, dy) = make_moe("balance", hooked=hooked), inputs()
    rows = x.flatten(0, 1).clone().requires_grad_()
    with balance_losses() as losses:
        moe(rows, Positions(BATCH, SEQ))
    sum(losses).backward()
    wanted = by_loop(make_moe("balance"), x, torch.zeros_like(dy))
    assert_same({"dx": rows.grad, "gate": moe.gate.weight.grad}, {"dx": wanted["dx"], "gate": wanted["gate.weight"]})
    assert not any(bool(p.grad.any()) for p in moe.experts.parameters() if p.grad is not None)


class Case(NamedTuple):
    kind: str
    sequence_parallel: bool
    routed: str = "as it comes"
    transport: str = "auto"
    hooked: str | None = None
    residual: bool = False


def on_rank(mesh, *fields) -> tuple[Results, list, list[int]]:
    case = Case(*fields)
    moe = make_moe(case.kind, mesh, *case[1:3], transport=case.transport, hooked=case.hooked)
    x, dy = (own(z.flatten(0, 1), 0 if case.sequence_parallel else None) for z in inputs())
    with record_collectives() as calls:
        results = run(moe, x, dy, case.residual)
    return results, list(calls), moe.gate.load.tolist()


@cache
def wanted(kind: str, routed: str) -> tuple[Results, int, list[int]]:
    """What the loop gives, the experts of a token, and how many tokens each expert of one process has counted."""
    run(moe := make_moe(kind, routed=routed), *(z.flatten(0, 1) for z in inputs()))
    return by_loop(make_moe(kind, routed=routed), *inputs()), moe.gate.policy.k, moe.gate.load.tolist()


@pytest.mark.parametrize("t", [1, 2, *in_turns([4])])
def test_equals_a_loop_over_experts(ranks, t):
    """With sequence shards each rank has the balance loss of its own tokens."""
    for case, by_rank in each_case(ranks, t, on_rank, [Case(*each) for each in CASES[t]]):
        found, calls, loads = (list(each) for each in zip(*by_rank, strict=True))
        if case.sequence_parallel and "balance" in found[0]:
            total = sum(result["balance"] for result in found)
            found = [{**result, "balance": total} for result in found]
        results, k, load = wanted(case.kind, case.routed)
        if case.residual:
            sums = zip(("y", "dx"), inputs(), strict=True)
            results = results | {name: results[name] + z.flatten(0, 1) for name, z in sums}
        assert_ranks_have(found, results, 0 if case.sequence_parallel else None, f"{case} on {t}")
        assert all(each == load for each in loads) and sum(load) == TOKENS * k, case
        assert t < 4 or case.routed == "as it comes" or min(load) == 0, case
        if t > 1 and case == Case(*case[:2]):
            nbytes, routing, dweights = TOKENS * HIDDEN * 8, TOKENS * 2 * k * 8, TOKENS * k * 8
            some = [("all_reduce", nbytes)] * 2 + [("all_reduce", dweights)]
            if case.sequence_parallel:
                some = [("all_gather", nbytes)] * 3 + [("reduce_scatter", nbytes)] * 2
                some += [("all_gather", routing), ("reduce_scatter", dweights)]
            assert all(sorted(each[: len(some)]) == sorted(some) for each in calls), case


# how a shared expert differs from the others, why it is then called as a module, and what of it is changed afterwards
UNLIKE = [
    ({"activation": "geglu", "bias": False}, "its activation is not that of the experts", None),
    ({"activation": "gelu_tanh", "bias": False}, "its activation is not that of the experts", None),
    ({"activation": "swiglu"}, "it has biases", None),
    ({"activation": "swiglu", "bias": False}, "its down_proj has an activation of its own", "relu2"),
]


@on_every_rank(1, 2)
def test_a_shared_expert_that_is_not_like_the_others_computes_what_it_is() -> None:
    """As where a hook that changes nothing lets it be called as a module; explain() says why it is."""
    tp = TensorParallel(tp_mesh(), sequence_parallel=True)
    for options, reason, activation in UNLIKE:
        found = []
        for hooked in (False, True):
            moe = make_moe("sigmoid-bias-shared", tp)
            moe.shared_experts = shared = MLP(HIDDEN, ffn_hidden_size=8, **options, tp=tp, dtype=torch.float64)
            init_weights(moe, 1)
            *_, down = shared.children()
            down.activation = activation
            for linear in shared.children():
                if linear.bias is not None:
                    torch.nn.init.constant_(linear.bias, 0.3)
            assert called_modules(moe) == [f"shared_experts is called as a module, not fused: {reason}"]
            if hooked:
                shared.register_forward_hook(lambda *_: None)
            found.append(run(moe, *(own(z.flatten(0, 1), 0) for z in inputs())))
        assert_same(found[0], found[1])

"""Experts whose ranks have tokens of their own give what one process gives, with every gradient, however many tokens a
rank has and wherever they go. What is sent and kept is as promised, to the byte; no decision is made twice."""

import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import Here, Tensors, leaves, make, on_device
from testing import assert_identical, assert_kernel_close, assert_same, fails_on_a_rank, on_every_rank
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tpformer import ops
from tpformer.distributed import all_reduce, groups, record_collectives
from tpformer.ops.route import Balance, Routing, record_routing
from tpformer.ops.row_exchange import Plan, RowExchange, plan_exchange, share_of_rank
from tpformer.ops.transports.experts import weight_gradient
from tpformer.planner.dry_run import fake_world

HIDDEN, WIDTH, EXPERTS, CHOSEN, GIVEN, SAMPLES = 16, 12, 12, 3, 4, 2
OPTIONS: dict[str, Any] = {"n_experts": EXPERTS, "activation": "silu"}


class Case(NamedTuple):
    """tokens: of each of 4 ranks. best: experts that every token takes. mode: "plain", "recompute" or "split". given:
    whether the routing is decided before. rounded: what inputs are rounded to."""

    tokens: tuple[int, ...] = (0, 5, 3, 8)
    best: tuple[int, ...] = ()
    once_a_rank: bool = True
    mode: str = "plain"
    given: bool = False
    dtype: torch.dtype = torch.float64
    rounded: torch.dtype = torch.float64
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> slice:
        """This rank's tokens among all."""
        first = sum(self.tokens[: dist.get_rank()])
        return slice(first, first + self.tokens[dist.get_rank()])

    def inputs(self) -> Tensors:
        """Of all tokens and all experts."""
        total = sum(self.tokens)
        shapes = dict.fromkeys(("x", "residual", "added", "dy"), (total, HIDDEN)) | {"norm": (HIDDEN,)}
        shapes |= {"weights": (total, GIVEN)} if self.given else {"router": (EXPERTS, HIDDEN)}
        shapes |= {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
        return {name: x.to(self.dtype) for name, x in make(0, self.rounded, **shapes).items()}

    def decided(self, of: Tensors, tokens: slice, groups: tuple[dist.ProcessGroup, ...] = ()) -> dict[str, Any]:
        """How some of the tokens, whose samples lie on several ranks, come to their experts."""
        if self.given:
            drawn = torch.rand(sum(self.tokens), EXPERTS, generator=torch.Generator().manual_seed(2))
            experts = drawn.argsort(1)[:, :GIVEN].sort(1).values.to(Here.device, torch.int32)
            experts[-1] = EXPERTS // 2  # more often than a rank has experts
            return {"routing": ops.Routing(experts[tokens], of["weights"])}
        bias = torch.zeros(EXPERTS, dtype=self.dtype)
        bias[list(self.best)] = 9.0
        sample = (torch.arange(sum(self.tokens)) % SAMPLES)[tokens].clone()
        load, balance = torch.zeros(EXPERTS, dtype=torch.int64), ops.Balance(0.3, SAMPLES, sample, groups)
        return {"router_weight": of["router"], "router": ops.Router(ops.Policy(CHOSEN), bias, load, balance=balance)}

    def dropout(self, tokens: slice) -> ops.Dropout:
        sample = torch.zeros(1, dtype=torch.int64, device=Here.device)
        return ops.Dropout(ops.dropout_starts(sample, sum(self.tokens), HIDDEN, tokens), 7, 0.25)


def norm(weight: Tensor) -> ops.Norm:
    return ops.Norm("rmsnorm", weight, None, 1e-6)


def results(of: Tensors, y: Tensor, loss: Tensor | None, dy: Tensor, decided: dict[str, Any]) -> Tensors:
    """What comes out, and the gradients of what went in."""
    ((y * dy).sum() + (0 if loss is None else loss)).backward()
    found = {"y": y.detach()} | {f"d{name}": x.grad for name, x in of.items() if x.grad is not None}
    return found if loss is None else found | {"balance": loss.detach(), "load": decided["router"].load}


def whole(case: Case) -> Tensors:
    """What one process makes of all tokens."""
    inputs = case.inputs()
    dy, of = inputs.pop("dy"), leaves(inputs)
    decided, matrices = case.decided(of, slice(None)), ops.ExpertWeights(of["gate_up"], of["down"])
    y, loss = ops.experts(of["x"], matrices, norm=norm(of["norm"]), **decided, **OPTIONS)
    y = of["residual"] + ops.dropout(y + of["added"], case.dropout(slice(0, sum(case.tokens))))
    return results(of, y, loss, dy, decided)


OF_TOKENS = ("x", "residual", "added", "dy", "weights")
OF_EXPERTS = ("gate_up", "down")


def part(case: Case, name: str, x: Tensor) -> Tensor:
    """This rank's part of a tensor, of that name or of its gradient, that one process has."""
    group = case.group or dist.group.WORLD
    share, name = EXPERTS // group.size(), name if name in (*OF_TOKENS, *OF_EXPERTS) else name.removeprefix("d")
    if name in OF_EXPERTS:
        return x[share * group.rank() : share * (group.rank() + 1)]
    return x[case.own] if name in ("y", *OF_TOKENS) else x


class Ran(NamedTuple):
    """This rank's results; its collectives in the forward, the backward and the queue, and how many of them had begun
    before what is added was made; decisions; bytes saved."""

    results: Tensors
    calls: tuple[list, list, list]
    begun: int
    decisions: int
    saved: int


def ran(case: Case) -> Ran:
    group, own = case.group or dist.group.WORLD, case.own
    inputs = {name: part(case, name, x) for name, x in case.inputs().items()}
    dy, of = inputs.pop("dy"), leaves(inputs)
    queue, later, deferred = ops.WeightGradientQueue(), {}, None
    if case.mode == "split":
        deferred = ops.Deferred(queue, [partial(later.__setitem__, f"d{name}") for name in OF_EXPERTS])
    decided, seen, begun = case.decided(of, own, (group,)), {}, []
    known = {x.untyped_storage().data_ptr() for x in of.values()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def added() -> Tensor:
        begun.append(len(forward))
        return of["added"]

    def layer(x: Tensor) -> tuple[Tensor, Tensor | None]:
        return ops.exchanged_experts(
            x, ops.ExpertWeights(of["gate_up"], of["down"]), norm=norm(of["norm"]), residual=of["residual"],
            added=added, dropout=case.dropout(own), group=group, once_a_rank=case.once_a_rank,
            deferred=deferred, **decided, **OPTIONS,
        )  # fmt: skip

    with record_routing() as decisions:
        with record_collectives() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            recomputed = case.mode == "recompute"
            y, loss = ops.recompute(layer, of["x"], skip_end=True) if recomputed else layer(of["x"])
        with record_collectives() as backward:
            found = results(of, y, loss, dy, decided)
        with record_collectives() as queued:
            queue.run()
    calls = list(forward), list(backward), list(queued)
    return Ran(found | later, calls, begun[0], len(decisions), sum(seen.values()))


def compare(found: Ran, case: Case, expected: Tensors) -> None:
    """This rank's part of what one process has. Parameters that all ranks have get partial gradients."""
    sums = {name: all_reduce(x, case.group or dist.group.WORLD) for name, x in found.results.items() if name in SUMS}
    wanted = {name: part(case, name, x) for name, x in expected.items()}
    if case.dtype == torch.float64:
        return assert_same(found.results | sums, wanted, f"{case}")
    plain = {name: part(case, name, x) for name, x in whole(case).items()}
    for name, x in (found.results | sums).items():
        assert_kernel_close(x, wanted[name], plain[name], f"{name} {case}")
    return None


SUMS = ("dnorm", "drouter", "balance", "load")


def promised(case: Case) -> tuple[tuple[list, list, list], int]:
    """The collectives of this rank and the bytes that it saves, from where one process sends all tokens."""
    rank, size, itemsize = dist.get_rank(), dist.get_world_size(), case.dtype.itemsize
    with record_routing() as decided:
        whole(case)
    routed = [[expert * size // EXPERTS for expert in of] for of in decided[0][1].routing.experts.tolist()]
    trips = [sorted(set(of)) if case.once_a_rank else of for of in routed]
    own = range(len(routed))[case.own]
    leave, arrive = sum(len(trips[token]) for token in own), sum(to == rank for of in trips for to in of)
    made = sum(to == rank for of in routed for to in of)
    wide = max(itemsize, 4)
    out, back = [("all_to_all", count * HIDDEN * itemsize) for count in (leave, arrive)]
    decision = [
        ("all_reduce", (SAMPLES + 1) * EXPERTS * 8),
        ("all_to_all", 16 * size),
        ("all_to_all", len(own) * CHOSEN * 2 * wide),
    ]
    weights = ("all_to_all", made * wide)
    first, later = [out] * (case.mode == "recompute"), [out] * (case.mode == "split")
    backward = [*first, out, *[out] * (case.mode != "split"), back, weights]
    order = len(own) * CHOSEN + (leave if case.once_a_rank else 0) + made + EXPERTS // size
    routing = 4 * (order + len(own) * CHOSEN) + wide * (made + len(own) * EXPERTS + (SAMPLES + 1) * EXPERTS)
    rows = len(own) * wide + made * 2 * WIDTH * itemsize  # the norm's statistics, gate and up; the input is not counted
    return ([*decision, out, back], backward, later), routing + rows + 8 * len(own)


LAST, TWO = tuple(range(9, 12)), (4, 7)
CASES = [
    *(Case(mode=mode) for mode in ("plain", "recompute", "split")),
    Case(once_a_rank=False),
    *(Case((4, 4, 4, 4), LAST, once_a_rank) for once_a_rank in (True, False)),  # all to the last rank
    *(Case((4, 4, 4, 4), TWO, mode=mode) for mode in ("plain", "split")),  # some experts have no row
    *(Case((0, 0, 1, 0), (), once_a_rank) for once_a_rank in (True, False)),
]


def check(case: Case) -> None:
    found = ran(case)
    compare(found, case, whole(case))
    calls, saved = promised(case)
    assert found.calls == calls, case
    assert found.begun == len(calls[0]) - 1, case
    assert found.decisions == 1, case
    assert case.mode == "recompute" or found.saved == saved, case


@on_every_rank(4)
def test_it_is_experts_of_one_process() -> None:
    for case in CASES:
        check(case)


@on_every_rank(4)
def test_a_routing_that_was_decided_before() -> None:
    """Its weights have gradients of own tokens. In fewer bits the result is as near as that of one process."""
    for once_a_rank in (True, False):
        for dtype in (torch.float64, torch.bfloat16):
            case = Case((1, 5, 3, 8), once_a_rank=once_a_rank, given=True, dtype=dtype, rounded=dtype)
            compare(ran(case), case, whole(case._replace(dtype=torch.float64)))


def in_order_of_sources(*args: Any) -> Plan:
    plan = plan_exchange(*args)
    order = plan.slots.argsort()
    return plan._replace(slots=plan.slots[order], weights=plan.weights[order])


def with_weights_of_other_rows(*args: Any) -> Plan:
    plan = plan_exchange(*args)
    return plan._replace(weights=plan.weights.flip(0))


def unwritten_where_nothing_is(*factors: Any, **options: Any) -> Tensor:
    gradient, sent = weight_gradient(*factors, **options), factors[-1]
    gradient[sent.counts[0] == 0] = torch.nan
    return gradient


MUTANTS: dict[str, tuple[Any, Case]] = {
    "once": (lambda make: make(), Case(mode="recompute")),
    "plan_exchange": (in_order_of_sources, Case()),
    "plan_exchange ": (with_weights_of_other_rows, Case()),
    "weight_gradient": (unwritten_where_nothing_is, Case((4, 4, 4, 4), TWO)),
    "Routing": (lambda experts, weights: Routing(experts, weights.detach()), Case(given=True)),
}


@on_every_rank(4)
def test_mutants_are_noticed() -> None:
    """A decision made again in recomputation, rows in the order of their ranks, weights beside other rows, memory that
    nobody wrote where an expert has no row, and a balance loss of own tokens alone."""
    module = sys.modules["tpformer.ops.exchanged_experts"]
    for name, (mutant, case) in MUTANTS.items():
        with mock.patch.object(module, name.strip(), mutant):
            assert fails_on_a_rank(partial(check, case)), mutant
    with mock.patch.object(Balance, "groups", ()):
        assert fails_on_a_rank(partial(check, Case())), "groups"


def left_out(self: RowExchange, rows: Tensor) -> Tensor:
    raise RuntimeError("a rank that does not go on")


PLACES = {
    # where rank 0 raises: what it leaves, the operation that is named, and whether ranks share memory for its calls
    "rows back": ("home", "exchanged_experts", True),
    "the backward": ("weights_home", "the backward of exchanged_experts", True),
    "several hosts": ("home", "exchanged_experts", False),
}


@pytest.mark.parametrize("place", PLACES)
@on_every_rank(2)
def test_a_rank_that_leaves_an_exchange_out_ends_the_group(place: str) -> None:
    """Rank 0 has no token, but experts for which the other waits: it hears why in vain, or waits until the timeout."""
    method, named, told = PLACES[place]
    case = Case((0, 5), group=dist.new_group(timeout=timedelta(seconds=60 if told else 2)))
    words = f"^{named} was left by an exception on rank {{}}; the group cannot go on: restart from the last checkpoint$"
    with nullcontext() if told else mock.patch.object(groups, "why_not_one_host", lambda group: "two hosts"):
        ran(case)
        own = words.format(0 if told else dist.get_rank())
        first = "does not go on" if dist.get_rank() == 0 else own if told else "[Tt]imed out|closure"
        before = getattr(RowExchange, method)
        with mock.patch.object(RowExchange, method, before if dist.get_rank() else left_out):
            with pytest.raises(RuntimeError, match=first):
                ran(case)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=own):
                ran(case)


@pytest.mark.gpu
@on_every_rank(4, pool="one_gpu")
def test_on_a_gpu() -> None:
    """Rows travel by gloo, and the kernels compute with what has come, of a rank without tokens, too."""

    def each() -> None:
        for once_a_rank in (True, False):
            case = Case(once_a_rank=once_a_rank, given=True, dtype=torch.bfloat16, rounded=torch.bfloat16)
            compare(ran(case), case, whole(case._replace(dtype=torch.float64)))

    on_device("cuda:0", each)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_one_rank_has_the_bits_of_experts(given: bool, autocast: bool) -> None:
    """Nothing is sent. The residual may be x, and its norm may be there already."""
    case = Case((0, 7), given=given, dtype=torch.float32)
    inputs, found = case.inputs(), []
    dy = inputs.pop("dy")
    for operation in (ops.experts, partial(ops.exchanged_experts, once_a_rank=False), ops.exchanged_experts):
        of = leaves(inputs)
        prologue = norm(of["norm"])
        statistics = None, (of["x"].square().mean(1, True) + 1e-6).rsqrt().detach()
        normed = ops.Normed(ops.norm(of["x"], prologue).detach(), *statistics)
        decided = case.decided(of, slice(None))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), record_collectives() as calls:
            y, loss = operation(
                of["x"], ops.ExpertWeights(of["gate_up"], of["down"]), norm=prologue, normed=normed, residual=of["x"],
                dropout=case.dropout(slice(0, 7)), **decided, **OPTIONS,
            )  # fmt: skip
        found.append(results(of, y, loss, dy, decided))
        assert not calls
    assert_identical(found[1:], [found[0]] * 2)


FAKE_RANKS, FAKE_HIDDEN = 8, 2048
FAKE_SLOTS = 4096 * 8  # tokens, and experts of each
FAKE_ROWS = FAKE_RANKS * round(4096 * share_of_rank(8, 128, FAKE_RANKS))  # that travel on average


def bytes_sent(**options: Any) -> list[int]:
    """By one of 8 ranks, in a forward and its backward on fake tensors, which go where they go on average."""
    with fake_world(3, FAKE_RANKS), FakeTensorMode():
        x, router, gate_up, down = (
            torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((4096, FAKE_HIDDEN), (128, FAKE_HIDDEN), (16, 1536, FAKE_HIDDEN), (16, FAKE_HIDDEN, 768))
        )
        with record_collectives() as calls:
            y, _ = ops.exchanged_experts(
                x, ops.ExpertWeights(gate_up, down), router_weight=router, router=ops.Router(ops.Policy(8)),
                n_experts=128, activation="silu", group=dist.group.WORLD, **options,
            )  # fmt: skip
            y.sum().backward()
    return [nbytes for _, nbytes in calls]


def test_a_token_goes_once_to_a_rank_that_has_several_of_its_experts() -> None:
    """Of 8 experts of 128 on 8 ranks, two thirds of the rows travel."""
    assert round(FAKE_ROWS / FAKE_SLOTS, 2) == 0.67
    for once_a_rank, rows in ((True, FAKE_ROWS), (False, FAKE_SLOTS)):
        sent = [16 * FAKE_RANKS, 8 * FAKE_SLOTS, *[2 * rows * FAKE_HIDDEN] * 5, 4 * FAKE_SLOTS]
        assert bytes_sent(once_a_rank=once_a_rank) == sent
    sets = [*combinations(range(8), 3)]
    trips = [len({expert // 2 for expert in each}) for each in sets]
    assert_same(4 * share_of_rank(3, 8, 4), sum(trips) / len(sets))


@on_every_rank(2)
def test_what_does_not_fit_is_refused() -> None:
    case = Case((2, 2), given=True)
    of = {name: part(case, name, x) for name, x in case.inputs().items()}
    half, decided = ops.ExpertWeights(of["gate_up"], of["down"]), case.decided(of, case.own)
    one = ops.Routing(*(x[:1] for x in decided["routing"]))
    call = partial(ops.exchanged_experts, of["x"], group=dist.group.WORLD, **decided, **OPTIONS)
    for words, matrices, options in (
        ("no shared expert among its matrices", half._replace(shared_down=of["down"][0]), {}),
        ("matrices of 3 experts on each of 2 ranks", ops.ExpertWeights(half.gate_up[:3], half.down[:3]), {}),
        (r"added is \(1, 16\)", half, {"added": of["added"][:1]}),
        (r"added is \(2, 16\) torch.float32", half, {"added": lambda: of["added"].float()}),
        ("a routing of 1 tokens for x with 2 rows", half, {"routing": one}),
    ):
        with pytest.raises(ValueError, match=words):
            call(matrices=matrices, **options)
    with pytest.raises(RuntimeError, match="exchanged_experts"):
        call(matrices=half, once_a_rank=bool(dist.get_rank()))

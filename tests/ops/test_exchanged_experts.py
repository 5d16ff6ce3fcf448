"""Experts whose ranks have tokens of their own give what one process gives, with every gradient, however many tokens a
rank has and wherever they go. What is sent and kept is as promised, to the byte; no decision is made twice."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from shards import Tensors, leaves, make
from testing import assert_identical, assert_kernel_close, assert_same, on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.distributed import all_reduce, record_collectives
from tpformer.ops import exchanged_experts as module
from tpformer.ops.route import record_routing

HIDDEN, WIDTH, EXPERTS, CHOSEN, SAMPLES = 16, 12, 12, 3, 2
OPTIONS: dict[str, Any] = {"n_experts": EXPERTS, "activation": "silu"}


class Case(NamedTuple):
    """tokens: of each of 4 ranks. best: experts that every token takes. mode: "plain", "recompute" or "split"."""

    tokens: tuple[int, ...] = (0, 5, 3, 8)
    best: tuple[int, ...] = ()
    once_a_rank: bool = True
    mode: str = "plain"
    dtype: torch.dtype = torch.float64
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> slice:
        """This rank's tokens among all."""
        first = sum(self.tokens[: dist.get_rank()])
        return slice(first, first + self.tokens[dist.get_rank()])

    def inputs(self) -> Tensors:
        """Of all tokens and all experts."""
        rows, matrices = (sum(self.tokens), HIDDEN), {"gate_up": (EXPERTS, 2 * WIDTH, HIDDEN)}
        shapes = {
            "x": rows,
            "residual": rows,
            "added": rows,
            "dy": rows,
            "norm": (HIDDEN,),
            "router": (EXPERTS, HIDDEN),
        }
        return make(0, self.dtype, **shapes, **matrices, down=(EXPERTS, HIDDEN, WIDTH))

    def router(self, tokens: slice, groups: tuple[dist.ProcessGroup, ...] = ()) -> ops.Router:
        """Of some of the tokens, whose samples lie on several ranks."""
        bias = torch.zeros(EXPERTS, dtype=torch.promote_types(self.dtype, torch.float32))
        bias[list(self.best)] = 9.0
        sample = (torch.arange(sum(self.tokens)) % SAMPLES)[tokens].clone()
        load = torch.zeros(EXPERTS, dtype=torch.int64)
        return ops.Router(ops.Policy(CHOSEN), bias, load, balance=ops.Balance(0.3, SAMPLES, sample, groups))

    def dropout(self, tokens: slice) -> ops.Dropout:
        return ops.Dropout(ops.dropout_starts(torch.arange(1), sum(self.tokens), HIDDEN, tokens), 7, 0.25)


def norm(weight: Tensor) -> ops.Norm:
    return ops.Norm("rmsnorm", weight, None, 1e-6)


def gradients(of: Tensors, y: Tensor, loss: Tensor | None, dy: Tensor) -> Tensors:
    ((y * dy).sum() + (0 if loss is None else loss)).backward()
    return {"y": y.detach()} | {f"d{name}": x.grad for name, x in of.items()}


def whole(case: Case) -> Tensors:
    """What one process makes of all tokens."""
    inputs = case.inputs()
    dy, of = inputs.pop("dy"), leaves(inputs)
    router, everything = case.router(slice(None)), slice(0, sum(case.tokens))
    y, loss = ops.experts(
        of["x"], ops.ExpertWeights(of["gate_up"], of["down"]), router_weight=of["router"], router=router,
        norm=norm(of["norm"]), **OPTIONS,
    )  # fmt: skip
    y = of["residual"] + ops.dropout(y + of["added"], case.dropout(everything))
    return gradients(of, y, loss, dy) | {"balance": loss.detach(), "load": router.load}


class Ran(NamedTuple):
    """This rank's results; its collectives in the forward, the backward and the queue; decisions; bytes saved."""

    results: Tensors
    calls: tuple[list, list, list]
    decisions: int
    saved: int


def ran(case: Case) -> Ran:
    group, own = case.group or dist.group.WORLD, case.own
    share = EXPERTS // group.size()
    experts = slice(share * group.rank(), share * (group.rank() + 1))
    inputs = {
        name: x[own] if name in ("x", "residual", "added", "dy") else x[experts] if name in ("gate_up", "down") else x
        for name, x in case.inputs().items()
    }
    dy, of = inputs.pop("dy"), leaves(inputs)
    queue, later, deferred = ops.WeightGradientQueue(), {}, None
    if case.mode == "split":
        deferred = ops.Deferred(queue, [partial(later.__setitem__, "dgate_up"), partial(later.__setitem__, "ddown")])
    router, seen = case.router(own, (group,)), {}
    kept = {x.untyped_storage().data_ptr() for x in of.values()}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in kept:
            seen[x.untyped_storage().data_ptr()] = x
        return x

    def layer(x: Tensor) -> tuple[Tensor, Tensor | None]:
        return ops.exchanged_experts(
            x, ops.ExpertWeights(of["gate_up"], of["down"]), router_weight=of["router"], router=router,
            norm=norm(of["norm"]), residual=of["residual"], added=lambda: of["added"], dropout=case.dropout(own),
            group=group, once_a_rank=case.once_a_rank, deferred=deferred, **OPTIONS,
        )  # fmt: skip

    recomputed = case.mode == "recompute"
    with record_routing() as decisions, record_collectives() as forward:
        with nullcontext() if recomputed else torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y, loss = ops.recompute(layer, of["x"], skip_end=True) if recomputed else layer(of["x"])
        with record_collectives() as backward:
            results = gradients(of, y, loss, dy)
        with record_collectives() as queued:
            queue.run()
    results |= later | {"balance": loss.detach(), "load": router.load}
    calls = forward[: len(forward) - len(backward) - len(queued)], list(backward), list(queued)
    return Ran(results, calls, len(decisions), sum(x.untyped_storage().nbytes() for x in seen.values()))


def compare(found: Ran, expected: Tensors, case: Case) -> None:
    """This rank's part of what one process has. Parameters that all ranks have get partial gradients."""
    group, results = case.group or dist.group.WORLD, dict(found.results)
    results |= {name: all_reduce(results[name], group) for name in ("dnorm", "drouter", "balance", "load")}
    share = EXPERTS // group.size()
    experts = slice(share * group.rank(), share * (group.rank() + 1))
    of_ranks = dict.fromkeys(("y", "dx", "dresidual", "dadded"), case.own) | dict.fromkeys(
        ("dgate_up", "ddown"), experts
    )
    assert_same(
        results, {name: x[of_ranks[name]] if name in of_ranks else x for name, x in expected.items()}, f"{case}"
    )


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


@on_every_rank(4)
def test_it_is_experts_of_one_process() -> None:
    for case in CASES:
        found = ran(case)
        compare(found, whole(case), case)
        calls, saved = promised(case)
        assert found.calls == calls, case
        assert found.decisions == 1, case
        assert case.mode == "recompute" or found.saved == saved, case

"""A layer of experts on the fused transport, in Triton's interpreter, has the sequential transport's results and
gradients, also where ranks have no row, and tells which side a kernel carried."""

from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import test_moe_layer as moe_layer
from steps import Results, each_case, gradients, own
from testing import assert_kernel_close
from turns import in_turns

from tpformer import ops
from tpformer.layers import Positions
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER
from tpformer.ops.weight_gradients import WeightGradientQueue

EXPERTS = 12  # which 2, 3 and 4 ranks can share


class Case(NamedTuple):
    """all_on_first: all tokens go to two experts of the first rank. copies: rows are sent by copies. queued: a queue
    makes the weight gradients."""

    kind: str
    sequence_parallel: bool = True
    all_on_first: bool = False
    copies: bool = False
    queued: bool = False


CASES = {
    2: [
        Case("softmax"), Case("geglu", sequence_parallel=False), Case("geglu", all_on_first=True),
        Case("geglu", queued=True), Case("geglu", copies=True, queued=True),
    ],
    3: [Case("geglu"), Case("geglu", copies=True)],
    4: [Case("geglu")],
}  # fmt: skip


def results(mesh, transport: str, dtype: torch.dtype, case: Case) -> tuple[Results, list]:
    """This rank's results and gradients of two steps, and what carried the first one's sides. In each dtype of the
    same weights and inputs, which float32 holds."""
    tp = {"mesh": mesh, "sequence_parallel": case.sequence_parallel, "transport": transport}
    with mock.patch.object(moe_layer, "EXPERTS", EXPERTS):
        moe = moe_layer.make_moe(case.kind, dtype=torch.float32, **tp).to(dtype)
    if case.all_on_first:
        moe.gate.bias = torch.zeros(EXPERTS, dtype=torch.float32)
        moe.gate.bias[:2] = 9.0
    found, first = {}, []
    copies = mock.patch("tpformer.ops.transports.fused.send_by_copies", lambda *_: True)
    with copies if case.copies else nullcontext():
        for index in range(2):
            x, dy = ((index + 1) * z.flatten(0, 1).float().to(dtype) for z in moe_layer.inputs())
            x, dy = (own(z, 0 if case.sequence_parallel else None) for z in (x, dy))
            moe.zero_grad()
            with ops.record_transports() as carried:
                step = deferred(moe, x, dy) if case.queued else moe_layer.run(moe, x, dy)
            found |= {f"{index} {name}": value for name, value in step.items()}
            first = first or list(carried)
    return found, first


def deferred(moe, x: torch.Tensor, dy: torch.Tensor) -> Results:
    """As moe_layer.run, but a later gather overwrites the slots before the queue makes weight gradients."""
    x, queue, positions = x.clone().requires_grad_(), WeightGradientQueue(), Positions(moe_layer.BATCH, moe_layer.SEQ)
    with queue.collect():
        y = moe(x, positions)
        (y * dy).sum().backward()
        with torch.no_grad(), mock.patch.object(moe.gate, "load", None):
            for _ in range(2):
                moe(torch.full_like(x, 100.0), positions)
        queue.run()
    return {"y": y.detach(), "dx": x.grad} | gradients(moe)


def all_three(mesh, *fields) -> list[tuple[Results, list]]:
    ways = (("sequential", torch.float64), ("sequential", torch.float32), ("fused", torch.float32))
    return [results(mesh, *way, Case(*fields)) for way in ways]


@pytest.mark.parametrize("t", [2, *in_turns([3, 4], first=1)])
def test_equals_the_sequential_transport(interpreted, t):
    """Without sequence shards nothing is gathered. A queue's weight gradients are of rows that were gathered again."""
    for case, by_rank in each_case(interpreted, t, all_three, CASES[t]):
        sides = [(GATHER, "fused"), (SCATTER, "sequential")]
        gathers = 2 * case.sequence_parallel + 2 * case.queued  # of the first step, each with GEMMs
        for (oracle, _), (baseline, _), (found, carried) in by_rank:
            assert found.keys() == oracle.keys()
            for name, value in found.items():
                assert_kernel_close(value, oracle[name], baseline[name], f"{case} {name}")
            assert carried[:2] == (sides if case.sequence_parallel else [(ALL_REDUCE, "sequential")] * 2), case
            assert carried.count((GATHER, "fused")) == gathers, case

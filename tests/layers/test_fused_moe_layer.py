"""A layer of experts on the fused transport, in Triton's interpreter, has the sequential transport's results and
gradients, also where ranks have no row, and tells which side a kernel carried."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import test_moe_layer as moe_layer
from steps import Results

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER
from tpformer.ops.weight_gradients import WeightGradientQueue

RANKS = [2, 3, pytest.param(4, marks=pytest.mark.proof)]
EXPERTS = 12  # which 2, 3 and 4 ranks can share


def results(
    transport: str, kind: str, sequence_parallel: bool, routed: str, copies: bool, queued: bool
) -> tuple[Results, list]:
    """This rank's results and gradients of two steps, and what carried the first one's sides."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    with mock.patch.object(moe_layer, "EXPERTS", EXPERTS):
        moe = moe_layer.make_moe(kind, mesh, sequence_parallel, transport=transport, dtype=torch.float32)
    if routed != "as it comes":
        moe.gate.bias = torch.zeros(EXPERTS, dtype=torch.float32)
        moe.gate.bias[:2] = 9.0  # all tokens go to two experts of the first rank
    found: Results = {}
    first: list = []
    with ExitStack() as stack:
        if copies:
            from tpformer.ops.transports import fused

            stack.enter_context(mock.patch.object(fused, "send_by_copies", lambda *_: True))
        for index in range(2):
            x, dy = ((index + 1) * z.flatten(0, 1).float() for z in moe_layer.inputs())
            if sequence_parallel:
                x, dy = (z.chunk(mesh.size())[mesh.get_local_rank()].clone() for z in (x, dy))
            moe.zero_grad()
            queue = WeightGradientQueue()
            with ops.record_transports() as carried, ExitStack() as inner:
                if queued:
                    inner.enter_context(queue.collect())
                step = moe_layer.run(moe, x, dy) if not queued else deferred(moe, x, dy, queue)
            found |= {f"{index} {name}": value for name, value in step.items()}
            first = first or list(carried)
    return found, first


def deferred(moe, x: torch.Tensor, dy: torch.Tensor, queue: WeightGradientQueue) -> Results:
    """As moe_layer.run, but a later gather overwrites the slots before the queue makes weight gradients."""
    x = x.clone().requires_grad_()
    y = moe(x, moe_layer.Positions(moe_layer.BATCH, moe_layer.SEQ))
    (y * dy).sum().backward()
    with torch.no_grad(), mock.patch.object(moe.gate, "load", None):
        for _ in range(2):
            moe(torch.full_like(x, 100.0), moe_layer.Positions(moe_layer.BATCH, moe_layer.SEQ))
    queue.run()
    return {"y": y.detach(), "dx": x.grad} | moe_layer.gradients(moe)


def both(*case) -> list:
    return [results(transport, *case) for transport in ("sequential", "fused")]


def check(worlds: list, sequence_parallel: bool, gathers: int = 2) -> None:
    """gathers: of the first step, each with GEMMs."""
    for (wanted, _), (found, carried) in worlds:
        assert found.keys() == wanted.keys()
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
        assert carried[:2] == (
            [(GATHER, "fused"), (SCATTER, "sequential")] if sequence_parallel else [(ALL_REDUCE, "sequential")] * 2
        )
        assert carried.count((GATHER, "fused")) == gathers


@pytest.mark.parametrize("t", RANKS)
@pytest.mark.parametrize("kind", ["softmax", "geglu"])
def test_equals_the_sequential_transport(interpreted, t, kind):
    check(interpreted(t).run(both, kind, True, "as it comes", False, False), True)


def test_without_sequence_shards_nothing_is_gathered(interpreted):
    check(interpreted(2).run(both, "geglu", False, "as it comes", False, False), False, 0)


def test_ranks_without_tokens(interpreted):
    check(interpreted(3).run(both, "geglu", True, "all on the first rank", False, False), True)


def test_by_copies(interpreted):
    check(interpreted(3).run(both, "geglu", True, "as it comes", True, False), True)


@pytest.mark.parametrize("copies", [False, True])
def test_a_queue_keeps_gathered_rows(interpreted, copies):
    check(interpreted(2).run(both, "geglu", True, "as it comes", copies, True), True, 4)

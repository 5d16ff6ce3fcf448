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
from testing import assert_kernel_close

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER
from tpformer.ops.weight_gradients import WeightGradientQueue

CASES = [("softmax", 2), ("geglu", 3), pytest.param("geglu", 4, marks=pytest.mark.proof)]
EXPERTS = 12  # which 2, 3 and 4 ranks can share


def results(
    transport: str, dtype: torch.dtype, kind: str, sequence_parallel: bool, routed: str, copies: bool, queued: bool
) -> tuple[Results, list]:
    """This rank's results and gradients of two steps, and what carried the first one's sides. In each dtype of the
    same weights and inputs, which float32 holds."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    with mock.patch.object(moe_layer, "EXPERTS", EXPERTS):
        moe = moe_layer.make_moe(kind, mesh, sequence_parallel, transport=transport, dtype=torch.float32).to(dtype)
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
            x, dy = ((index + 1) * z.flatten(0, 1).float().to(dtype) for z in moe_layer.inputs())
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


def all_three(*case) -> list:
    sequential = [results("sequential", dtype, *case) for dtype in (torch.float64, torch.float32)]
    return [*sequential, results("fused", torch.float32, *case)]


def check(worlds: list, sequence_parallel: bool, gathers: int = 2) -> None:
    """gathers: of the first step, each with GEMMs."""
    for (oracle, _), (baseline, _), (found, carried) in worlds:
        assert found.keys() == oracle.keys()
        for name, value in found.items():
            assert_kernel_close(value, oracle[name], baseline[name], name)
        assert carried[:2] == (
            [(GATHER, "fused"), (SCATTER, "sequential")] if sequence_parallel else [(ALL_REDUCE, "sequential")] * 2
        )
        assert carried.count((GATHER, "fused")) == gathers


@pytest.mark.parametrize("kind, t", CASES)
def test_equals_the_sequential_transport(interpreted, kind, t):
    check(interpreted(t).run(all_three, kind, True, "as it comes", False, False), True)


def test_without_sequence_shards_nothing_is_gathered(interpreted):
    check(interpreted(2).run(all_three, "geglu", False, "as it comes", False, False), False, 0)


def test_ranks_without_tokens(interpreted):
    check(interpreted(2).run(all_three, "geglu", True, "all on the first rank", False, False), True)


def test_by_copies(interpreted):
    check(interpreted(3).run(all_three, "geglu", True, "as it comes", True, False), True)


@pytest.mark.parametrize("copies", [False, True])
def test_a_queue_keeps_gathered_rows(interpreted, copies):
    check(interpreted(2).run(all_three, "geglu", True, "as it comes", copies, True), True, 4)

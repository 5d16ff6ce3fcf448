"""The fused transport between real GPUs, one rank on each; `make nvlink` runs it. It repeats the checks on one shared
GPU (test_fused_gpu.py). Only several GPUs can show gathers by copy engines, and one result for fused, pipelined and
sequential over NCCL."""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import test_fused_gpu as one
from pool import WorkerPool
from shards import on_device

pytestmark = pytest.mark.nvlink
DEVICE = "cuda"  # the GPU of the rank's number
STEPS = 200


@pytest.fixture(scope="module")
def gpus() -> Iterator[Callable]:
    def world(size: int):
        if size > torch.cuda.device_count():
            pytest.skip(f"{size} CUDA devices needed, {torch.cuda.device_count()} found")
        return pool(size)

    with WorkerPool() as pool:
        yield world


@pytest.fixture(params=[2, 3, 4, 8])
def t(request, gpus) -> int:
    """The size of a group whose state is fresh."""
    gpus(request.param).run(one.forget)
    return request.param


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_column_in_bfloat16(gpus, t, sequence_parallel):
    one.check_columns(one.on_fused(gpus, DEVICE), t, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_row_in_bfloat16(gpus, t, sequence_parallel):
    one.check_rows(one.on_fused(gpus, DEVICE), t, sequence_parallel)


@pytest.mark.parametrize("copies", [False, True], ids=["push", "copy"])
def test_late_ranks(gpus, t, copies):
    gpus(t).run(on_device, DEVICE, late_ranks, copies, timeout=one.TIMEOUT)


def late_ranks(copies: bool) -> None:
    from tpformer.ops.transports import fused

    with mock.patch.object(fused, "send_by_copies", lambda *_: copies):
        one.late_ranks("fused", torch.bfloat16, STEPS)


@pytest.mark.parametrize("transport", ["sequential", "pipelined", "fused"])
def test_transports_agree_over_nccl(gpus, t, transport):
    """They have the bits of plain torch in float64, because all numbers are small and whole."""
    gpus(t).run(on_device, DEVICE, one.late_ranks, transport, torch.bfloat16, 20, "nccl", timeout=one.TIMEOUT)


def test_graph_replays(gpus, t):
    gpus(t).run(on_device, DEVICE, one.replays, one.REPLAYS, timeout=one.TIMEOUT)


def test_a_peer_that_never_arrives_is_named(gpus, t):
    one.check_hang(gpus(t).run(on_device, DEVICE, one.absent_peer, 1.0, timeout=one.TIMEOUT), within=20)


def test_auto_and_explain(gpus, t):
    for sequence_parallel, tokens in ((True, 512 * t), (False, 16)):
        chosen, reasons, table = gpus(t).run(
            on_device, DEVICE, one.automatic, sequence_parallel, tokens, timeout=one.TIMEOUT
        )[0]
        assert {transport for _, transport in chosen} == {"fused"}, (reasons, table)

"""Every kernel that communicates, compiled for sm_80 and executed on groups of 1, 2, 3 and 4 ranks for three epochs
whose launches overlap, equals its reference; nothing races.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

from types import SimpleNamespace

import execution
import pytest
import torch
from execution import PLAIN, SCHEDULES, Schedule, executing, group, run_group

pytest.importorskip("triton")

import test_all_gather_grouped_matmul_kernel as experts
import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_reduce_scatter_kernel as scatters

from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.kernel import await_gathered, gathered_copy
from tpformer.kernels.protocol import bump

SHARED = {"shared_memory_per_multiprocessor": 2048}  # room for one program of the tests' tile
GEMMS = {
    "reduce-scatter": scatters.gemm(1),
    "reduce-scatter, finished": scatters.gemm(2, scatters.gemms.FINISH),
    "all-gather": gathers.linear(1),
    "all-gather, several": gathers.linear(3, "gelu"),
    "all-gather, derivative": gathers.derivative("silu", True),  # of odd columns, in pieces of 8
    "all-gather, experts": experts.grouped(),
    "all-gather, experts, dgrad": experts.grouped(True, "own"),
    "all-gather, experts, ranks without rows": experts.grouped(kind="one"),
    "all-reduce, one shot": all_reduces.gemm(1, False, True),
    "all-reduce, two shots": all_reduces.gemm(1, False, False),
}


@pytest.mark.parametrize("world, dtype", [(1, torch.float32), (2, torch.bfloat16), (3, torch.float16)], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_groups(name, world, dtype) -> None:
    """The shape has partial tiles in each direction."""
    for schedule in SCHEDULES if world == 2 else (PLAIN,):
        with executing(schedule) as run:
            run_group(GEMMS[name], run, world, dtype, (17, 23, 19))


@pytest.mark.parametrize("name", ["reduce-scatter", "all-gather", "all-gather, experts", "all-reduce, two shots"])
def test_groups_of_four(name) -> None:
    with executing(Schedule(3)) as run:
        run_group(GEMMS[name], run, 4, torch.bfloat16, (17, 23, 19))


@pytest.mark.parametrize("joins", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["all-gather", "all-gather, experts"])
def test_pushers_that_take_tiles(name, joins, monkeypatch) -> None:
    """Two of four programs push a shard of several pieces, and take tiles of the chunks from number `joins` on."""
    monkeypatch.setattr(execution, "DEVICE", SimpleNamespace(multi_processor_count=4, **SHARED))
    monkeypatch.setattr(plan, "IN_FLIGHT", 128)
    monkeypatch.setattr(plan, "plan_push", lambda *_: plan.Push(2, joins))
    with executing(SCHEDULES[joins % 3]) as run:
        run_group(GEMMS[name], run, 3, torch.bfloat16, (17, 23, 19))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_without_a_gemm(world, monkeypatch) -> None:
    monkeypatch.setattr(plan, "IN_FLIGHT", 64)  # so there are four pieces, and as many pushers
    channels, shards = group(world), [torch.randn(5, 24).bfloat16() for _ in range(world)]
    copies = []
    with executing() as run:
        run.memory.add(*channels[0].slots)
        for rank, channel in enumerate(channels):
            with run.on(rank):
                bump(channel)
                await_gathered(channel, shards[rank], push=True)
                copies.append(gathered_copy(channel, shards[rank]))
        run.run()
    assert not any(channel.counters.any() for channel in channels)
    assert all(torch.equal(copy, torch.cat(shards)) for copy in copies)

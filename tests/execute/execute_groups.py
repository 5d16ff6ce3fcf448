"""Every kernel that communicates, compiled for sm_80 and executed on groups of 1, 2, 3 and 4 ranks for three epochs
whose launches overlap, equals its reference; nothing races.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import pytest
import torch
from execution import PLAIN, SCHEDULES, Schedule, executing, group, run_group

pytest.importorskip("triton")

import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_reduce_scatter_kernel as scatters

from tpformer.kernels.all_gather_matmul.kernel import await_gathered, gathered_copy
from tpformer.kernels.protocol import bump

GEMMS = {
    "reduce-scatter": scatters.gemm(1),
    "reduce-scatter, finished": scatters.gemm(2, scatters.gemms.FINISH),
    "all-gather": gathers.linear(1),
    "all-gather, several": gathers.linear(3, "gelu"),
    "all-reduce, one shot": all_reduces.gemm(1, False, True),
    "all-reduce, two shots": all_reduces.gemm(1, False, False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", GEMMS)
def test_groups(name, world, dtype) -> None:
    """The shape has partial tiles in each direction."""
    for schedule in SCHEDULES if world == 2 else (PLAIN,):
        with executing(schedule) as execution:
            run_group(GEMMS[name], execution, world, dtype, (17, 23, 19))


@pytest.mark.parametrize("name", ["reduce-scatter", "all-gather", "all-reduce, two shots"])
def test_groups_of_four(name) -> None:
    with executing(Schedule(3)) as execution:
        run_group(GEMMS[name], execution, 4, torch.bfloat16, (17, 23, 19))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_without_a_gemm(world) -> None:
    channels, shards = group(world), [torch.randn(5, 24).bfloat16() for _ in range(world)]
    copies = []
    with executing() as execution:
        execution.share(*channels[0].slots)
        for rank, channel in enumerate(channels):
            with execution.on(rank):
                bump(channel)
                await_gathered(channel, shards[rank], push=True)
                copies.append(gathered_copy(channel, shards[rank]))
        execution.run()
    assert all(torch.equal(copy, torch.cat(shards)) for copy in copies)

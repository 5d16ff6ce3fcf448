"""Every kernel that communicates, compiled for sm_80 and executed on groups of 1, 2 and 3 ranks for three epochs whose
launches overlap, equals its reference; nothing races. If ranks are absent, waits expire, every kernel comes to its end,
and leaves one whole report that names a rank which did not come.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import pytest
import torch
from execution import (
    GATHER_ALONE,
    SCHEDULES,
    TILE,
    TRIES,
    Schedule,
    Try,
    communicate,
    executing,
    group,
    run_group,
    trying,
)

pytest.importorskip("triton")

import gemms
import test_all_gather_grouped_matmul_kernel as experts
import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_reduce_scatter_kernel as scatters

from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.protocol import bump, poll_in_vain

SHAPE = (17, 23, 19)  # rows per rank, N, K: partial tiles in each direction
# an operation, and on how many ranks it is tried in every order
GEMMS = {
    "reduce-scatter": (scatters.gemm(1), 2),
    "reduce-scatter, finished": (scatters.gemm(2, scatters.gemms.FINISH), 3),
    "all-gather": (gathers.linear(1), 3),
    "all-gather, several": (gathers.linear(3, "gelu"), 2),
    "all-gather, derivative": (gathers.derivative("silu", True), 2),  # of odd columns, in pieces of 8
    "all-gather, experts": (experts.grouped(), 2),
    "all-gather, experts, dgrad": (experts.grouped(True, "own"), 2),
    "all-gather, experts, ranks without rows": (experts.grouped(kind="one"), 3),
    "all-reduce, one shot": (all_reduces.gemm(1, False, True), 2),
    "all-reduce, two shots": (all_reduces.gemm(1, False, False), 3),
}
# one for each way to wait
WAITING = [name for name in GEMMS if name not in ("reduce-scatter", "all-gather, several", "all-gather, derivative")]
LIMIT = 16  # polls, a multiple of 16 as in a workspace, so that no kernel is compiled for this number
BEFORE = gemms.BEFORE_WRAP


@pytest.mark.parametrize("name", GEMMS)
def test_groups_in_every_order(name: str) -> None:
    """Also if ranks are absent: then waits expire."""
    gemm, world = GEMMS[name]
    for way in TRIES:
        if not way.expires or name in WAITING:
            with trying(way) as run:
                communicate(run, way, gemm, world, SHAPE)


@pytest.mark.parametrize("world, dtype", [(1, torch.float32), (3, torch.float16)], ids=str)
@pytest.mark.parametrize("name", GEMMS)
def test_groups_in_other_dtypes(name: str, world: int, dtype: torch.dtype) -> None:
    with executing() as run:
        run_group(GEMMS[name][0], run, world, dtype, SHAPE)


@pytest.mark.parametrize("joins", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["all-gather", "all-gather, experts"])
def test_pushers_that_take_tiles(name: str, joins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four programs push a shard of several pieces, and take tiles of the chunks from number `joins` on."""
    with trying(Try(SCHEDULES[joins % 3], 4)) as run:
        monkeypatch.setattr(plan, "IN_FLIGHT", 128)
        monkeypatch.setattr(plan, "plan_push", lambda *_: plan.Push(2, joins))
        run_group(GEMMS[name][0], run, 3, torch.bfloat16, SHAPE)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_without_a_gemm(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "IN_FLIGHT", 64)  # so there are four pieces, and as many pushers
    with executing() as run:
        run_group(GATHER_ALONE, run, world, torch.bfloat16, (5, 1, 24), epochs=1)


def matters(report: str) -> bool:
    """Whether a report is of more than the slots, which are read in vain once a wait has expired."""
    return "global memory" not in report or "protocol.py" in report


@pytest.mark.parametrize("impatient", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waits_that_expire_name_who_did_not_come(name: str, impatient: bool) -> None:
    """All ranks but one begin two operations; then that one begins the first. The first report stays.

    Programs that poll stand aside, so that waits expire only where nobody else can go on; impatient ones expire at any
    moment, also while other programs of the rank have yet to begin."""
    gemm, world = GEMMS[name]
    inputs = gemms.cast(gemms.make_inputs(gemm, 0, world, SHAPE, False), torch.bfloat16)
    for seed in (1, 2, 3):  # each rank is absent once, and a schedule has priorities
        channels, absent = group(world, limit=LIMIT), seed % world
        present = [rank for rank in range(world) if rank != absent]
        schedule = Schedule(seed, lockstep=False, priorities=impatient and seed == 3, impatient=impatient)
        reports = []
        with trying(Try(schedule, 8, slice(1))) as run:
            run.memory.add(*channels[0].slots)
            for ranks in (present, present, [absent]):
                for rank in ranks:
                    with run.on(rank):
                        bump(channels[rank])
                        gemm.launch(inputs[rank], channels[rank], TILE)
                run.run()
                reports.append(torch.cat([channels[rank].error for rank in present]))
            if impatient:
                run.log.reports[:] = filter(matters, run.log.reports)
        assert torch.equal(reports[0], reports[1]) and torch.equal(reports[0], reports[2])
        for rank, channel in enumerate(channels):
            expired, peer, *epochs = channel.error[0].tolist()
            assert expired == channel.stopped[0, 0]
            assert not expired or (peer in range(world) and epochs == [BEFORE, BEFORE + 1]), (seed, rank)
            assert impatient or rank == absent or (expired, peer) == (1, absent), (seed, rank)


def test_a_wait_takes_as_long_as_its_polls() -> None:
    """The kernel whose time gives the limit of a second polls as often as it is told."""
    instructions = []
    for limit in (16, 32, 48):
        with executing() as execution:
            poll_in_vain(torch.zeros(1, dtype=torch.int32), limit)
        instructions.append(execution.log.executed)
    assert instructions[2] - instructions[1] == instructions[1] - instructions[0] > 0

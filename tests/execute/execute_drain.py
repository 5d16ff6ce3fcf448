"""Waits that expire let every kernel come to its end, whatever the schedule, and leave one whole report that names a
rank which did not come.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

from types import SimpleNamespace

import execution
import pytest
import torch
from execute_groups import GEMMS
from execution import TILE, executing, gemms, group, read_report_kernel

pytest.importorskip("triton")

from checks.execute.schedule import Schedule
from checks.execute.session import Execution
from tpformer.kernels.protocol import ERROR_WORDS, Channel, bump, poll_in_vain

LIMIT = 16  # polls, a multiple of 16 as in a workspace, so that no kernel is compiled for this number
BEFORE = gemms.BEFORE_WRAP
SHAPE = (17, 23, 19)  # rows per rank, N, K: several tiles, so that each rank has several programs
# one for each way to wait
NAMES = [
    "reduce-scatter, finished", "all-gather", "all-gather, experts", "all-gather, experts, ranks without rows",
    "all-reduce, one shot", "all-reduce, two shots",
]  # fmt: skip
SEEDS = range(1, 4)  # each of two or three ranks is absent once, and a schedule has priorities


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs of a rank are resident."""
    monkeypatch.setattr(
        execution, "DEVICE", SimpleNamespace(multi_processor_count=4, shared_memory_per_multiprocessor=4096)
    )


def operate(execution: Execution, name: str, channels: list[Channel], present: list[int]) -> None:
    """Run one operation, to which only some of the ranks come."""
    inputs = gemms.cast(gemms.make_inputs(GEMMS[name], 0, len(channels), SHAPE, False), torch.bfloat16)
    for rank in present:
        with execution.on(rank):
            bump(channels[rank])
            GEMMS[name].launch(inputs[rank], channels[rank], TILE)
    execution.run()


def drain(name: str, world: int, absent: int, schedule: Schedule) -> list[Channel]:
    """All ranks but one begin two operations; then that one begins the first. Faults and races are errors."""
    channels = group(world, limit=LIMIT)
    present = [rank for rank in range(world) if rank != absent]
    with executing(schedule) as execution:
        execution.memory.add(*channels[0].slots)
        operate(execution, name, channels, present)
        reports = [channel.error.clone() for channel in channels]
        operate(execution, name, channels, present)
        for rank in present:  # the first report stays
            assert torch.equal(channels[rank].error, reports[rank])
        operate(execution, name, channels, [absent])
        if schedule.impatient:
            execution.log.reports[:] = filter(matters, execution.log.reports)
    return channels


def matters(report: str) -> bool:
    """Whether a report is of more than the slots, which are read in vain once a wait has expired."""
    return "global memory" not in report or "protocol.py" in report


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_whoever_did_not_come_is_named(name, world) -> None:
    """Programs that poll stand aside, so that waits expire only where nobody else can go on."""
    for seed in SEEDS:
        absent = seed % world
        channels = drain(name, world, absent, Schedule(seed, lockstep=False))
        for rank, channel in enumerate(channels):
            if rank != absent:
                assert channel.stopped[0, 0] == 1
                assert channel.error[0].tolist() == [1, absent, BEFORE, BEFORE + 1], (seed, rank)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_every_seed_drains(name, world) -> None:
    """Waits expire at any moment, also while other programs of the rank have yet to begin."""
    for seed in SEEDS:
        channels = drain(
            name, world, seed % world, Schedule(seed, lockstep=False, priorities=seed % 3 == 0, impatient=True)
        )
        for rank, channel in enumerate(channels):
            expired, peer, seen, wanted = channel.error[0].tolist()
            assert expired == channel.stopped[0, 0]
            if expired:
                assert peer in range(world) and seen == BEFORE and wanted == BEFORE + 1, (seed, rank)


def test_a_report_is_seen_whole() -> None:
    """Whoever looks at its first word at any moment finds the others written."""
    for seed in range(1, 7):
        channels, report = group(2, limit=LIMIT), torch.zeros(ERROR_WORDS.value, dtype=torch.int32)
        with executing(Schedule(seed, lockstep=False)) as execution:
            execution.memory.add(*channels[0].slots)
            with execution.on(1):
                read_report_kernel[(1,)](channels[0].error, report, num_warps=1)
            operate(execution, "reduce-scatter", channels, [0])
        assert report.tolist() == [1, 1, BEFORE, BEFORE + 1]


def test_a_wait_takes_as_long_as_its_polls() -> None:
    """The kernel whose time gives the limit of a second polls as often as it is told."""
    instructions = []
    for limit in (16, 32, 48):
        with executing() as execution:
            poll_in_vain(torch.zeros(1, dtype=torch.int32), limit)
        instructions.append(execution.log.executed)
    assert instructions[2] - instructions[1] == instructions[1] - instructions[0] > 0

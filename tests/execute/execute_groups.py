"""Every kernel that communicates, compiled for sm_80 and executed on groups of 1, 2 and 3 ranks for three epochs whose
launches overlap, equals its reference; nothing races. If ranks are absent, waits expire, every kernel comes to its end,
and leaves one whole report that names a rank which did not come. So it is with the tiles that ship, as launchers pick
them.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import pytest
import test_all_gather_grouped_matmul_kernel as experts
import test_all_gather_matmul_kernel as gathers
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_reduce_scatter_kernel as scatters
import torch
from execution import FEW, GATHER_ALONE, SCHEDULES, SHIPPED, TRIES, Try, communicate, executing, run_group, trying

from bench import protocol as closed_forms
from checks.execute.schedule import Schedule
from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.configurations import TILES
from tpformer.kernels.matmul_all_reduce.kernel import select_all_reduce_tile
from tpformer.kernels.protocol import poll_in_vain

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
    "gather without a GEMM": (GATHER_ALONE, 3),
}
# one for each way to wait
OTHERS = ("reduce-scatter", "all-gather, several", "all-gather, derivative", "gather without a GEMM")
WAITING = [name for name in GEMMS if name not in OTHERS]


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
def test_groups_in_other_dtypes(name: str, world: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "IN_FLIGHT", 64)  # so shards have several pieces, and as many pushers
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


def matters(report: str) -> bool:
    """Whether a report is of more than the slots, which are read in vain once a wait has expired."""
    return "global memory" not in report or "protocol.py" in report


@pytest.mark.parametrize("impatient", [False, True])
@pytest.mark.parametrize("name", WAITING)
def test_waits_that_expire_name_who_did_not_come(name: str, impatient: bool) -> None:
    """Each rank is absent once. Programs that poll stand aside, so that waits expire only where nobody else can go on;
    impatient ones expire at any moment, also while other programs of the rank have yet to begin."""
    gemm, world = GEMMS[name]
    for seed, present in enumerate((slice(-1), slice(1, None), slice(None, None, 2))):
        schedule = Schedule(1 + seed, lockstep=False, priorities=impatient and seed == 2, impatient=impatient)
        way = Try(schedule, 8, present, polls=16)  # as in a workspace a multiple of 16, for which kernels are compiled
        with trying(way) as run:
            communicate(run, way, gemm, world, SHAPE)
            if impatient:
                run.log.reports[:] = filter(matters, run.log.reports)


def test_a_wait_takes_as_long_as_its_polls() -> None:
    """The kernel whose time gives the limit of a second polls as often as it is told."""
    instructions = []
    for limit in (16, 32, 48):
        with executing() as execution:
            poll_in_vain(torch.zeros(1, dtype=torch.int32), limit)
        instructions.append(execution.log.executed)
    assert instructions[2] - instructions[1] == instructions[1] - instructions[0] > 0


LARGE = {
    "all-gather": gathers.linear(1, "gelu"),
    "all-gather, derivative": gathers.derivative("silu", True),
    "all-gather, experts": experts.grouped(),
    "reduce-scatter": scatters.gemm(1, scatters.gemms.FINISH, loads=scatters.LOADS),
    "all-reduce, two shots": all_reduces.gemm(1, True, False),
}
ROOM = {"epochs": 1, "tile": None, "capacity": 1 << 19, "writer_flags": 32}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("gemm", LARGE)
def test_tiles_that_ship(gemm: str, name: str) -> None:
    dtype, shape = SHIPPED[name]
    if gemm == "all-gather, experts" and name == "ampere":
        shape = (shape[0], 250, shape[2])  # with fewer columns the smaller tile is picked
    with executing(tile=name) as execution:
        run_group(LARGE[gemm], execution, 2, dtype, shape, **ROOM)


@pytest.mark.parametrize("name", FEW)
def test_tiles_for_few_rows(name: str) -> None:
    """The one-shot all-reduce takes the widest tile that gives every SM a program."""
    dtype, shape = FEW[name]
    with executing(tile=name) as execution:
        assert select_all_reduce_tile(torch.device("cuda"), dtype, *shape[:2], 2, one_shot=True) == TILES[name]
        run_group(all_reduces.gemm(1, True, True), execution, 2, dtype, shape, **ROOM)


def test_closed_forms_of_the_protocol_are_exact() -> None:
    """Those of `python -m bench protocol`, whose gate this is: kernels count what they say."""
    closed_forms.gate()


@pytest.mark.parametrize("field, wrong", [("waits", 1), ("releases", 1), ("sent", 2), ("tiles", 1)])
def test_a_wrong_closed_form_is_found(field: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = closed_forms.tiled_traffic

    def off(*arguments):
        return (found := right(*arguments))._replace(**{field: getattr(found, field) + wrong})

    monkeypatch.setattr(closed_forms, "tiled_traffic", off)
    with pytest.raises(AssertionError, match="the closed form says"):
        closed_forms.gate()

"""Closed forms of the kernels' loops, by hand; `make execute` compares them with what compiled kernels do."""

from itertools import product

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from tpformer.kernels.all_gather_matmul.kernel import walk
from tpformer.kernels.all_gather_matmul.plan import NO_PUSH, Push
from tpformer.kernels.configurations import TILES
from tpformer.kernels.cost import MACHINES
from tpformer.kernels.matmul_all_reduce.kernel import plan_sums
from tpformer.kernels.matmul_reduce_scatter.kernel import plan_finishing, unit_rows
from tpformer.ops.transports import exchange
from tpformer.ops.transports.interface import ALL_REDUCE, GATHER, SCATTER

LARGE = TILES["large"]  # 128 x 256, 8 rows a step


def counts(op: str, m: int, n: int, k: int, programs: int = 132, push: Push = NO_PUSH, t: int = 8) -> exchange.Exchange:
    return exchange.tiled_exchange(op, (m, n, k), t, 2, LARGE, programs, push)


def test_two_shot_all_reduce() -> None:
    """8 chunks of 512 rows: 4 x 32 tiles, each of which one program adds, and 7 x 128 to copy."""
    found = counts(ALL_REDUCE, 4096, 8192, 3584)
    assert (found.tiles, found.last) == (8, 100 / 1024)
    # 32 programs have no eighth tile, and add. The first 924 tiles are all of 115 places, whose units are early
    assert found.waits == 4 + 7  # units, of all sources together; 7 * 115 copies of 119 programs
    assert found.releases == 7 + 4  # a flag for each tile, a fence for each unit
    assert found.sent == 2 * 7 * 512 * 8192 * 2
    tile = 128 * 256 * 2
    assert found.sums == exchange.Sums(
        idle=1, adders=17, early=4, late_adders=13, late=1, late_share=13 / 128, copiers=119, copied=7, programs=132,
        behind=1, pieces=8, adding=9 * tile, copying=2 * tile, copy_in_flight=tile // 2,
    )  # fmt: skip
    assert found.in_flight == tile
    # a tile with K = 1024 is too short for them, so all programs add
    everyone = counts(ALL_REDUCE, 4096, 8192, 1024)
    assert everyone.sums is not None and (everyone.sums.idle, everyone.sums.early) == (0, 1)
    assert (everyone.waits, everyone.releases) == (1 + 8, 8 + 1)


@pytest.mark.parametrize("k", [64, 4096])
def test_each_unit_is_added_once_and_copied_once(k: int) -> None:
    """By the programs that the kernel gives them to, and by none of them more than the closed form says."""
    for m, n, t, programs in product((1000, 4096), (256, 4096, 16384), (2, 3, 8), (3, 100, 132)):
        rows, chunks = -(-m // t), t
        tiles = exchange.tile_count(rows, n, LARGE)
        programs = min(programs, chunks * tiles)
        found = plan_sums((rows, n, k), chunks, t, LARGE, 2, 128, programs, MACHINES[0])
        early, copies = (t - 1) * (tiles - found.late), (t - 1) * tiles
        added, copied, waits = [], [], []
        for program in range(programs):
            adder = program - (programs - found.adders)
            units = range((adder + tiles) % found.adders, tiles, found.adders) if adder >= 0 else ()
            added += units
            copy, own = program if program < found.copiers else early + program, 0
            while copy < copies:
                copied.append(copy)
                copy, own = copy + (found.copiers if copy < early else programs), own + 1
            waits.append(len(units) + own)
        assert sorted(added) == list(range(tiles)) and sorted(copied) == list(range(copies))
        assert max(waits) == exchange.tiled_exchange(ALL_REDUCE, (m, n, k), t, 2, LARGE, programs, NO_PUSH, 128).waits


def test_a_band_of_a_tile_is_added_at_once_where_tiles_are_few() -> None:
    found = counts(ALL_REDUCE, 1024, 8192, 1024)  # 32 tiles of 128 rows are 128 bands of 32
    assert (found.tiles, found.waits, found.releases) == (2, 1 + 11, 2 + 1)
    whole = exchange.tiled_exchange(ALL_REDUCE, (1024, 8192, 1024), 8, 2, LARGE, 132, NO_PUSH, 128)
    assert (whole.waits, whole.releases) == (1 + 2, 2 + 1)  # 32 tiles, 7 * 32 copies
    # 10 chunks' worth of 103 rows make 4 bands of 32, and a rank sends what exists: 921 rows that others add, 9 x 103
    uneven = exchange.tiled_exchange(ALL_REDUCE, (1024, 8192, 1024), 10, 2, LARGE, 132, NO_PUSH, 32)
    assert (uneven.waits, uneven.sent) == (2 + 10, (921 + 9 * 103) * 8192 * 2)


def test_one_shot_all_reduce() -> None:
    found = counts(ALL_REDUCE, 16, 8192, 3584)
    assert (found.tiles, found.waits, found.releases) == (1, 1, 1)  # 32 tiles, and a fence
    assert found.sent == 7 * 16 * 8192 * 2
    assert counts(ALL_REDUCE, 8, 8200, 3584).sent == 7 * 8 * (8192 + 256) * 2  # all columns of a tile


def test_reduce_scatter() -> None:
    found = counts(SCATTER, 8192, 4096, 1792)
    # 1024 tiles; 7 row blocks in 37 runs each, and the last one in 132; 64 flags
    assert (found.tiles, found.waits, found.releases) == (8, 2 + 1, 1)
    assert found.sent == 7 * 1024 * 4096 * 2
    # 8 rows of a column block have 256 columns, from 8 ranks, and are stored once: 7 of 256 units of a row block in
    # one of 37 runs, 2 in one of 132
    assert (found.units, found.in_flight) == (128 * 16, 8 * 8 * 256 * 2)
    unit = 9 * 8 * 256 * 2
    assert (found.meanwhile, found.behind) == (2 * 7 * unit, 2 * unit)
    # of 2 ranks tiles of 4 row blocks are computed in turn: 28 are early, and 32 rows are added at a time
    assert counts(SCATTER, 8192, 4096, 1792, t=2).in_flight == found.in_flight


def test_a_reduce_scatter_is_finished_by_all_programs() -> None:
    """By each as much as by any other, up to a unit, and nothing twice; a program waits for few row blocks."""
    for rows, n, t, programs in product((1, 128, 1024, 2000, 8192), (256, 4096, 16384), (2, 3, 8), (1, 100, 132)):
        plan = plan_finishing(rows, n, LARGE, unit_rows(LARGE, 2, t), t, programs)
        blocks = -(-rows // 128)
        assert 0 <= plan.early_blocks < blocks and min(plan.early_runs, plan.late_runs) > 0
        found = counts(SCATTER, t * rows, n, 512, programs, t=t)
        whole = found.units * (t + 1) / t * found.in_flight
        assert found.meanwhile + found.behind >= whole / programs
        if found.units >= 16 * programs:
            assert found.meanwhile + found.behind <= 1.35 * whole / programs, (rows, n, t, programs)


def test_gather() -> None:
    found = counts(GATHER, 8192, 1792, 4096)
    assert (found.tiles, found.waits, found.releases) == (4, 7, 0)  # 8 chunks of 8 x 7 tiles; one flag of each peer
    assert found.sent == 7 * 1024 * 4096 * 2
    assert counts(GATHER, 8192, 1792, 4095).sent == found.sent  # rows are padded to 16 bytes
    assert counts(GATHER, 8192, 1792, 4096, push=Push(12, 8)) == found._replace(
        in_flight=1 << 15
    )  # 448 tiles, 120 programs


@pytest.mark.parametrize(
    "push, tiles", [((0, 0), 4), ((12, 8), 4), ((22, 8), 5), ((22, 0), 4), ((22, 6), 4), ((132, 0), 4)]
)
def test_tiles_of_a_gather_s_programs(push: tuple[int, int], tiles: int) -> None:
    """448 tiles. If 22 pushers join at chunk 6, 110 programs have 336 tiles before, 6 of them a fourth one. The 112
    tiles that are left go to the other 104, then to 8 pushers."""
    assert counts(GATHER, 8192, 1792, 4096, push=Push(*push)).tiles == tiles


def test_the_closed_form_of_a_gather_counts_the_tiles_that_are_walked() -> None:
    for programs, pushers, t in ((1, 1, 2), (3, 1, 3), (5, 2, 4), (7, 3, 2), (4, 0, 3)):
        for joins, tiles in product(range(t + 1 if programs > pushers else 1) if pushers else (0,), range(1, 20)):
            walks = [[walk.fn(program, programs, pushers, joins, step, tiles) for step in range(t)]
                     for program in range(programs)]  # fmt: skip
            most = max(sum(len(range(first, tiles, distance)) for first, distance in each) for each in walks)
            form = exchange.gather_exchange(tiles * LARGE.m, LARGE.n, 1, t, LARGE, programs, pushers, joins)
            assert form.tiles == most, (programs, pushers, t, joins, tiles)

"""matmul_all_reduce, one-shot and two-shot, equals its reference, and all ranks have the same bits."""

import math
from unittest import mock

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from channels import virtual_channel

from tpformer.kernels.configurations import BUSY, TILES
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul_all_reduce import kernel
from tpformer.kernels.matmul_all_reduce.kernel import (
    band_rows,
    matmul_all_reduce,
    plan,
    select_all_reduce_tile,
    share_sums,
)
from tpformer.kernels.matmul_all_reduce.reference import matmul_all_reduce_reference
from tpformer.kernels.protocol import bump

TALL = Tile(64, 16, 16, 1, 1, False)  # in the interpreter 64 rows are added in two pieces from 2 ranks, in 8 from 8


def many_bands() -> mock._patch:
    """Within, tiles are divided into as many bands as there are programs to add them."""
    return mock.patch.object(kernel, "PIECE_SECONDS", 1.0)


def gemm(inputs: int, finished: bool, one_shot: bool | None, transposed: bool = False) -> gemms.Gemm:
    """A shape's `rows` are all rows here, not those of a rank."""
    names, parts = gemms.names_of_factors(inputs), gemms.FINISH if finished else ()

    def make(rank, world, rows, n, k):
        return gemms.shapes(
            **gemms.shapes_of_factors(names, rows, n, k, transposed), **gemms.shapes_of_finish(parts, rows, n)
        )

    def launch(x, channel, tile):
        return [
            matmul_all_reduce(
                [x[a] for a, _ in names], [x[w] for _, w in names], channel, gemms.finish_of(x),
                b_transposed=transposed, one_shot=one_shot, tile=tile,
            )
        ]  # fmt: skip

    def reference(xs):
        sums = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        return [[matmul_all_reduce_reference(*sums, gemms.finish_of(xs[0]), b_transposed=transposed)]] * len(xs)

    return gemms.Gemm(make, launch, reference, same=frozenset(parts), exact=not finished)


def processes() -> None:
    for one_shot in (True, False):
        gemms.run_on_processes(gemm(1, True, one_shot), sizes=gemms.SHAPES[:3])
        gemms.run_on_processes(gemm(2, False, one_shot, transposed=True), sizes=gemms.SHAPES[1:3])
    gemms.run_on_processes(gemm(1, False, False), gemms.TMA_TILE, torch.float16, gemms.SHAPES[2:3])
    with many_bands():
        assert band_rows(60, 5, 2, TALL, 4, 2) == 32
        gemms.run_on_processes(gemm(1, True, False), TALL, sizes=((120, 5, 7), (150, 17, 7)))


@pytest.mark.parametrize("world", gemms.WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def bits(one_shot: bool) -> None:
    """Sums of three numbers of any size have the same bits on all ranks only if all add in one order."""
    channel = virtual_channel(3, 1 << 14, 64)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3 * 19, 24, generator=generator) * 10.0 ** torch.randint(-6, 6, (3 * 19, 1), generator=generator)
    w = torch.randn(3 * 9, 24, generator=generator)
    bump(channel)
    first, *others = matmul_all_reduce([a], [w], channel, one_shot=one_shot, tile=gemms.TILE).chunk(3)
    assert first.abs().max() > 1e4
    for other in others:
        assert torch.equal(first, other)


def minus_zeros() -> None:
    """A sum that rounds to -0.0 does on all ranks."""
    channel = virtual_channel(2, 1 << 12, 16)
    a, w = torch.full((2 * 8, 8), 1e-4, dtype=torch.half), torch.full((2 * 9, 8), -1e-5, dtype=torch.half)
    bump(channel)
    out = matmul_all_reduce([a], [w], channel, partial=torch.float32, one_shot=False, tile=gemms.TILE)
    assert (out == 0).all() and out.signbit().all()


def only_rows_that_exist(one_shot: bool) -> None:
    """Nothing is written where a packed tile has rows that the matrix does not have."""
    world, m, n = 3, 5, 20
    channel = virtual_channel(world, 1 << 14, 16)
    a, w = torch.ones(world * m, 4), torch.ones(world * n, 4)
    bump(channel)
    matmul_all_reduce([a], [w], channel, one_shot=one_shot, tile=gemms.TILE)
    areas = 1 if one_shot else 2
    slots = channel.slots[1].view(torch.float32).view(world, -1)[:, : areas * world * 2 * 16 * 16]
    written = ~slots.view(world, areas, world, 2, 16, 16).isnan().all(-1)  # rank, area, source, tile, row
    for rank in range(world):
        rows = m if one_shot else min(2, m - 2 * rank)
        assert written[rank, 0, :, :, :rows].all() and not written[rank, 0, :, :, rows:].any()
        for source in range(world if areas == 2 else 0):
            rows = min(2, m - 2 * source) * (source != rank)  # a rank does not send sums to itself
            assert written[rank, 1, source, :, :rows].all() and not written[rank, 1, source, :, rows:].any()


def virtual_ranks() -> None:
    for one_shot in (True, False):
        sizes = gemms.SHAPES[1:2] if one_shot else gemms.SHAPES[2:3]
        gemms.run_on_virtual_ranks(gemm(2, True, one_shot), 3, gemms.TILE, torch.float32, sizes, repeat=3)
        bits(one_shot)
        only_rows_that_exist(one_shot)
    minus_zeros()
    gemms.run_on_virtual_ranks(gemm(1, False, False), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks_with_equal_bits(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


@pytest.mark.parametrize(
    ("rows", "n", "world", "expected"),
    [
        (512, 8192, 8, 128),  # 128 tiles: one for each program
        (128, 8192, 8, 32),  # 32 tiles, of which each is added by four programs
        (256, 8192, 8, 64),
        (2048, 8192, 2, 128),
        (128, 4096, 8, 16),  # 16 tiles. With bands of 8 rows a program would wait for two of them
        (8, 8192, 8, 128),  # 8 rows are one piece
    ],
)
def test_the_program_with_the_most_bands_has_the_least_to_do(rows: int, n: int, world: int, expected: int) -> None:
    assert band_rows(rows, n, world, TILES["large"], 2, 132) == expected


@pytest.mark.parametrize(
    ("tiles", "programs", "multiplying", "expected"),
    [
        (128, 132, 40e-6, (32, 119, 13)),  # 8 turns, the last one of 100; 924 tiles have 115 places
        (128, 132, 10e-6, (132, 119, 13)),  # a tile is too short for 4 units
        (132, 132, 1.0, (132, 115, 17)),  # whole turns
        (16, 128, 1.0, (128, 112, 16)),  # one turn: every unit is late
        (16, 16, 1.0, (16, 14, 2)),
        (1, 1, 1.0, (1, 1, 1)),
    ],
)
def test_programs_without_a_last_tile_add(
    tiles: int, programs: int, multiplying: float, expected: tuple[int, int, int]
) -> None:
    assert share_sums(tiles, 8, 1, programs, 11e-6, multiplying) == expected


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (8, 16384, "small"),  # 128 tiles for 132 SMs
        (16, 8192, "narrow"),
        (8, 12288, "narrow"),
        (32, 4096, "narrowest"),
        (8, 1024, "narrowest"),
        (65, 8192, "small"),  # two-shot: 8 chunks of 9 rows
        (4096, 8192, "large"),
    ],
)
def test_one_shot_gives_every_sm_a_program(h100, m: int, n: int, expected: str) -> None:
    assert select_all_reduce_tile(h100, torch.bfloat16, m, n, 8) == TILES[expected]
    assert select_all_reduce_tile(h100, torch.float32, m, n, 8) == TILES["exact"]
    if m * n <= 1 << 17 and n >= 4096:
        assert math.ceil(n / TILES[expected].n) >= BUSY * 132


def test_size_rule() -> None:
    assert plan(16, 8192, 8, torch.bfloat16, None, gemms.TILE)[:2] == (True, 16)
    assert plan(64, 16384, 8, torch.bfloat16, None, gemms.TILE)[:2] == (True, 64)  # a tile's rows
    assert plan(65, 8192, 8, torch.bfloat16, None, gemms.TILE)[:2] == (False, 9)
    assert plan(65, 1024, 8, torch.bfloat16, None, gemms.TILE)[:2] == (True, 65)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("one_shot", [True, False])
def test_virtual_ranks_on_gpu(world: int, one_shot: bool) -> None:
    for name in ("large", "medium", "small"):
        gemms.run_on_gpu(gemm(1, True, one_shot), world, name)
        gemms.run_on_gpu(gemm(3, False, one_shot, transposed=True), world, name)

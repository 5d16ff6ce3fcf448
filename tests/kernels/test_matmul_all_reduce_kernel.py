"""matmul_all_reduce, one-shot and two-shot, equals its reference, and all ranks have the same bits."""

from unittest import mock

import gemms
import torch
from channels import virtual_channel
from torch import Tensor
from turns import in_turns

from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul_all_reduce import kernel
from tpformer.kernels.matmul_all_reduce.kernel import band_rows, matmul_all_reduce
from tpformer.kernels.matmul_all_reduce.reference import matmul_all_reduce_reference
from tpformer.kernels.protocol import bump

TALL = Tile(64, 16, 16, 1, 1, False)  # in the interpreter 64 rows are added in two pieces from 2 ranks, in 8 from 8


def gemm(inputs: int, finished: bool, one_shot: bool | None, transposed: bool = False, **options) -> gemms.Gemm:
    """A shape's `rows` are all rows here, not those of a rank."""
    parts = gemms.FINISH if finished else ()

    def launch(*arguments, **given) -> Tensor:
        return matmul_all_reduce(*arguments, one_shot=one_shot, **given, **options)

    def reference(a, w, finishes, **given) -> list[Tensor]:
        return [matmul_all_reduce_reference(a, w, finishes[0], **given)] * len(a)

    return gemms.sum_of_products(launch, reference, inputs, parts, transposed, rows_of_all=False, same=frozenset(parts))


@gemms.in_interpreter(2, *in_turns([4, 1], first=4))
def test_on_processes() -> None:
    for one_shot in (True, False):
        gemms.run_on_processes(gemm(1, True, one_shot), sizes=gemms.SHAPES[:3])
        gemms.run_on_processes(gemm(2, False, one_shot, transposed=True), sizes=gemms.SHAPES[1:3])
    gemms.run_on_processes(gemm(1, False, False), gemms.TMA_TILE, torch.float16, gemms.SHAPES[2:3])
    with mock.patch.object(kernel, "PIECE_SECONDS", 1.0):  # tiles have as many bands as programs can add
        assert band_rows(60, 5, 2, TALL, 4, 2) == 32
        gemms.run_on_processes(gemm(1, True, False), TALL, sizes=((120, 5, 7), (150, 17, 7)))


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


@gemms.in_interpreter(1)
def test_on_virtual_ranks_with_equal_bits() -> None:
    for one_shot in (True, False):
        sizes = gemms.SHAPES[1:2] if one_shot else gemms.SHAPES[2:3]
        gemms.run_on_virtual_ranks(gemm(2, True, one_shot), 3, gemms.TILE, torch.float32, sizes, repeat=3)
        # sums of three numbers of any size have the same bits on all ranks only if all add in one order
        channel, generator = virtual_channel(3, 1 << 14, 64), torch.Generator().manual_seed(0)
        a, w = (torch.randn(3 * rows, 24, generator=generator) for rows in (19, 9))
        a *= 10.0 ** torch.randint(-6, 6, (3 * 19, 1), generator=generator)
        bump(channel)
        first, *others = matmul_all_reduce([a], [w], channel, one_shot=one_shot, tile=gemms.TILE).chunk(3)
        assert first.abs().max() > 1e4 and all(torch.equal(first, other) for other in others)
        only_rows_that_exist(one_shot)
    # a sum that rounds to -0.0 does on all ranks
    channel = virtual_channel(2, 1 << 12, 16)
    a, w = torch.full((2 * 8, 8), 1e-4, dtype=torch.half), torch.full((2 * 9, 8), -1e-5, dtype=torch.half)
    bump(channel)
    out = matmul_all_reduce([a], [w], channel, partial=torch.float32, one_shot=False, tile=gemms.TILE)
    assert (out == 0).all() and out.signbit().all()
    gemms.run_on_virtual_ranks(gemm(1, False, False), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


test_virtual_ranks_on_gpu = gemms.on_gpu(
    *(gemm(1, True, one_shot) for one_shot in (True, False)),
    *(gemm(3, False, one_shot, transposed=True) for one_shot in (True, False)),
)

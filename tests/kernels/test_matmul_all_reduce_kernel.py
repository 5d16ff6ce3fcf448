"""matmul_all_reduce, one-shot and two-shot, equals its reference, and all ranks have the same bits."""

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from channels import virtual_channel

from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce, plan
from tpformer.kernels.matmul_all_reduce.reference import matmul_all_reduce_cost, matmul_all_reduce_reference
from tpformer.kernels.protocol import bump


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
    gemms.run_on_processes(gemm(1, False, False), gemms.TMA_TILE, torch.float16, gemms.SHAPES[2:3] * 2)


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


def virtual_ranks() -> None:
    for one_shot in (True, False):
        gemms.run_on_virtual_ranks(gemm(2, True, one_shot), 3, gemms.TILE, torch.float32, gemms.SHAPES[1:3], repeat=3)
        bits(one_shot)
    gemms.run_on_virtual_ranks(gemm(1, False, False), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks_with_equal_bits(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def test_size_rule_and_cost() -> None:
    assert plan(16, 8192, 8, torch.bfloat16, None, gemms.TILE)[:2] == (True, 16)
    assert plan(17, 8192, 8, torch.bfloat16, None, gemms.TILE)[:2] == (False, 3)
    assert matmul_all_reduce_cost(8, 3, 5, 4, 2, one_shot=True) == (240 + 24, 2 * (40 + 15 + 24 + 192))
    assert matmul_all_reduce_cost(8, 3, 5, 4, 2, one_shot=False) == (240 + 24, 2 * (40 + 15 + 24 + 96))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("one_shot", [True, False])
def test_virtual_ranks_on_gpu(world: int, one_shot: bool) -> None:
    for name in ("large", "medium", "small"):
        gemms.run_on_gpu(gemm(1, True, one_shot), world, name)
        gemms.run_on_gpu(gemm(3, False, one_shot, transposed=True), world, name)

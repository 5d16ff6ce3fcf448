"""matmul_reduce_scatter equals its reference on processes and on virtual ranks, with any inputs and finish."""

from collections.abc import Sequence
from itertools import combinations
from unittest import mock

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from testing import poisoned_memory

from tpformer.kernels.matmul_reduce_scatter import kernel
from tpformer.kernels.matmul_reduce_scatter.kernel import LOADS, matmul_reduce_scatter
from tpformer.kernels.matmul_reduce_scatter.reference import (
    matmul_reduce_scatter_reference,
)


def gemm(
    inputs: int, parts: Sequence[str] = (), transposed: bool = False, partial_dtype: torch.dtype | None = None,
    loads: int = 1,
) -> gemms.Gemm:  # fmt: skip
    """parts: those of FINISH that the finish has. loads: in place of LOADS, with which a small tile is one unit."""
    names = gemms.names_of_factors(inputs)

    def make(rank, world, rows, n, k):
        return gemms.shapes(
            **gemms.shapes_of_factors(names, world * rows, n, k, transposed), **gemms.shapes_of_finish(parts, rows, n)
        )

    def launch(x, channel, tile):
        with poisoned_memory(), mock.patch.object(kernel, "LOADS", loads):
            result = matmul_reduce_scatter(
                [x[a] for a, _ in names], [x[w] for _, w in names], channel, gemms.finish_of(x),
                b_transposed=transposed, partial=partial_dtype, tile=tile,
            )  # fmt: skip
        return [result]

    def reference(xs):
        sums = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        finishes = [gemms.finish_of(x) for x in xs]
        return [[y] for y in matmul_reduce_scatter_reference(*sums, finishes, b_transposed=transposed)]

    return gemms.Gemm(make, launch, reference, exact=not parts)


def processes() -> None:
    gemms.run_on_processes(gemm(1, gemms.FINISH))
    gemms.run_on_processes(gemm(3, transposed=True))
    gemms.run_on_processes(gemm(2, gemms.FINISH, loads=LOADS), gemms.TMA_TILE, sizes=gemms.SHAPES[2:3] * 2)
    gemms.run_on_processes(gemm(1, partial_dtype=torch.float32), dtype=torch.float16, sizes=gemms.SHAPES[1:3])


@pytest.mark.parametrize("world", gemms.WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(gemm(2, gemms.FINISH), 3, gemms.TILE, torch.float32, gemms.SHAPES[2:3], repeat=3)
    gemms.run_on_virtual_ranks(gemm(1), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def every_finish() -> None:
    """Run every combination of bias, dropout and residual after the reduction."""
    for parts in (parts for count in range(len(gemms.FINISH) + 1) for parts in combinations(gemms.FINISH, count)):
        gemms.run_on_virtual_ranks(gemm(1, parts), 2, gemms.TILE, torch.float32, gemms.SHAPES[1:2])


def test_every_finish_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(every_finish)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["large", "medium", "small"])
def test_virtual_ranks_on_gpu(world: int, name: str) -> None:
    for each in (
        gemm(1, gemms.FINISH, loads=LOADS),
        gemm(3, transposed=True, loads=LOADS),
        gemm(1, partial_dtype=torch.float32, loads=LOADS),
    ):
        gemms.run_on_gpu(each, world, name)

"""matmul_reduce_scatter equals its reference on processes and on virtual ranks, with any inputs and finish."""

from itertools import combinations
from unittest import mock

import gemms
import torch
from torch import Tensor
from turns import in_turns

from tpformer.kernels.matmul_reduce_scatter import kernel
from tpformer.kernels.matmul_reduce_scatter.kernel import LOADS, matmul_reduce_scatter
from tpformer.kernels.matmul_reduce_scatter.reference import matmul_reduce_scatter_reference


def gemm(inputs: int, parts=(), transposed=False, partial_dtype=None, loads: int = 1, **options) -> gemms.Gemm:
    """parts: those of FINISH that the finish has. loads: in place of LOADS, with which a small tile is one unit."""

    def launch(*arguments, **given) -> Tensor:
        with mock.patch.object(kernel, "LOADS", loads):
            return matmul_reduce_scatter(*arguments, partial=partial_dtype, **given, **options)

    return gemms.sum_of_products(launch, matmul_reduce_scatter_reference, inputs, parts, transposed, rows_of_all=True)


@gemms.in_interpreter(2, *in_turns([4, 1], first=5))
def test_on_processes() -> None:
    gemms.run_on_processes(gemm(1, gemms.FINISH))
    gemms.run_on_processes(gemm(3, transposed=True), sizes=gemms.SHAPES[1:3])
    gemms.run_on_processes(gemm(2, gemms.FINISH, loads=LOADS), gemms.TMA_TILE, sizes=gemms.SHAPES[2:3] * 2)
    gemms.run_on_processes(gemm(1, partial_dtype=torch.float32), dtype=torch.float16, sizes=gemms.SHAPES[1:3])


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(gemm(2, gemms.FINISH), 3, gemms.TILE, torch.float32, gemms.SHAPES[2:3], repeat=3)
    gemms.run_on_virtual_ranks(gemm(1), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)
    for parts in (parts for count in range(len(gemms.FINISH) + 1) for parts in combinations(gemms.FINISH, count)):
        gemms.run_on_virtual_ranks(gemm(1, parts), 2, gemms.TILE, torch.float32, gemms.SHAPES[1:2])


test_virtual_ranks_on_gpu = gemms.on_gpu(
    gemm(1, gemms.FINISH, loads=LOADS),
    gemm(3, transposed=True, loads=LOADS),
    gemm(1, partial_dtype=torch.float32, loads=LOADS),
)

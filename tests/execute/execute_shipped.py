"""Every GEMM with the tiles that ship for sm_80, as its launcher picks them, equals its reference; nothing races.

The other kernels have their shipped tiles in execute_local.py. `make execute` names this file; `make test` does not
collect it, because compiling takes minutes.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from execution import Execution, executing, run_group

pytest.importorskip("triton")

import test_all_gather_grouped_matmul_kernel as experts
import test_all_gather_matmul_kernel as gathers
import test_grouped_matmul_kernel as grouped
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_kernel as matmuls
import test_matmul_reduce_scatter_kernel as scatters

from tpformer.kernels.configurations import TILES, narrow_tile_names, select_local_tile, tile_names
from tpformer.kernels.matmul.kernel import matmul_derivative
from tpformer.kernels.matmul.reference import matmul_derivative_reference
from tpformer.kernels.matmul_all_reduce.kernel import select_all_reduce_tile

WORLD = 2
# name of a tile -> (dtype, (rows, N, K)): two tiles or more in each direction, and more steps of K than stages
SHAPES = {
    "ampere": (torch.bfloat16, (136, 144, 176)),
    "ampere_small": (torch.bfloat16, (64, 80, 264)),
    "exact": (torch.float32, (72, 40, 56)),
}
# name of a tile -> (dtype, rows of each group, N, K)
GROUPED: dict = {
    "ampere": (torch.bfloat16, (136, 40), 250, 176),
    "ampere_small": (torch.bfloat16, (24, 0, 104), 40, 264),
    "exact": (torch.float32, (32, 0, 40), 40, 56),
}
GEMMS = {
    "all-gather": gathers.linear(1, "gelu"),
    "all-gather, derivative": gathers.derivative("silu", True),
    "all-gather, experts": experts.grouped(),
    "reduce-scatter": scatters.gemm(1, scatters.gemms.FINISH, loads=scatters.LOADS),
    "all-reduce, two shots": all_reduces.gemm(1, True, False),
}
# name of a tile for few rows -> (dtype, (rows, N, K)): columns for the two SMs that there are
FEW = {
    "ampere_small": (torch.bfloat16, (40, 80, 264)),
    "ampere_narrow": (torch.bfloat16, (40, 40, 520)),
    "exact": (torch.float32, (40, 40, 56)),
}


@contextlib.contextmanager
def executing_with(tile: str) -> Iterator[Execution]:
    """`executing`, in which every GEMM must have as many warps as this tile; those of one dtype differ in that."""

    def check(name: str, ptx: str) -> str:
        assert "matmul" not in name or f".reqntid {32 * TILES[tile].warps}\n" in ptx, f"{name} has another tile"
        return ptx

    with executing(mutate=check) as execution:
        yield execution


def test_these_are_all_that_ship() -> None:
    assert set(SHAPES) == set(GROUPED) == {*tile_names(80, 2), *tile_names(80, 4)}
    assert len({(SHAPES[name][0], TILES[name].warps) for name in SHAPES}) == len(SHAPES)
    assert set(FEW) == {*narrow_tile_names(80, 2), *narrow_tile_names(80, 4)}


@pytest.mark.parametrize("name", SHAPES)
def test_matmul(name) -> None:
    dtype, (m, n, k) = SHAPES[name]
    a, w, x, gate = matmuls.draw(1, dtype, "cpu", (m, k), (k, n), (m, n), (m, n))
    with executing_with(name):
        matmuls.layouts(m, n, k, dtype, "cpu", None)
        outputs = matmul_derivative(a, w, x, "gelu", gate)
    matmuls.close(outputs, matmul_derivative_reference, a, w, x, "gelu", gate)


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_matmul(name) -> None:
    dtype, *case = GROUPED[name]
    with executing_with(name):
        grouped.products(grouped.kernel(), *case, dtype, "cpu", None)
        grouped.gradients(grouped.kernel(), *case, dtype, "cpu", None)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("gemm", GEMMS)
def test_groups(gemm, name) -> None:
    dtype, shape = SHAPES[name]
    if gemm == "all-gather, experts" and name == "ampere":
        shape = (shape[0], 250, shape[2])  # with fewer columns the smaller tile is picked
    with executing_with(name) as execution:
        run_group(GEMMS[gemm], execution, WORLD, dtype, shape, 1, None, capacity=1 << 19, writer_flags=32)


@pytest.mark.parametrize("name", FEW)
def test_few_rows(name) -> None:
    """A GEMM and the one-shot all-reduce take the widest tile that gives every SM a program."""
    dtype, shape = FEW[name]
    one_shot = all_reduces.gemm(1, True, True)
    with executing_with(name) as execution:
        assert select_all_reduce_tile(torch.device("cuda"), dtype, *shape[:2], WORLD, one_shot=True) == TILES[name]
        run_group(one_shot, execution, WORLD, dtype, shape, 1, None, capacity=1 << 19, writer_flags=32)
    with executing_with(name):
        assert select_local_tile(torch.device("cuda"), dtype, *shape[:2]) == TILES[name]
        matmuls.layouts(*shape, dtype, "cpu", None)

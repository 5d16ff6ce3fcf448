"""matmul, compiled for sm_80 and executed, equals its reference in every layout; nothing races.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import pytest
from execution import DTYPES, PLAIN, SCHEDULES, TILE, executing

pytest.importorskip("triton")

import test_matmul_kernel as matmuls

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 1), (17, 37, 19), (16, 32, 48)])
def test_layouts_of_matmul(shape, dtype) -> None:
    for schedule in SCHEDULES if shape[0] == 17 else (PLAIN,):
        with executing(schedule):
            matmuls.layouts(*shape, dtype, "cpu", TILE)

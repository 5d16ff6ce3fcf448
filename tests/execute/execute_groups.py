"""matmul_reduce_scatter, compiled for sm_80 and executed on a group of 2 ranks for three epochs whose launches overlap,
equals its reference; nothing races.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

import pytest
import torch
from execution import SCHEDULES, executing, run_group

pytest.importorskip("triton")

import test_matmul_reduce_scatter_kernel as scatters


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inputs, parts", [(1, ()), (2, scatters.gemms.FINISH)])
def test_reduce_scatter(inputs, parts, schedule) -> None:
    """The shape has partial tiles in each direction."""
    with executing(schedule) as execution:
        run_group(scatters.gemm(inputs, parts), execution, 2, torch.bfloat16, (17, 23, 19))

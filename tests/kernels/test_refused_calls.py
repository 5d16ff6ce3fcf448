"""What the fused GEMMs cannot run they refuse before a launch, and say what is missing."""

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from channels import virtual_channel

from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul
from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul
from tpformer.kernels.finish import Finish, Norm
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter

NEEDS = "needs {} bytes per slot and 1 flags per writer, but the channel has 64 and {}"


def refused() -> None:
    two, one, wide = virtual_channel(2, 64, 1), virtual_channel(1, 64, 8), virtual_channel(1, 1 << 14, 8)
    a, w, matrices = torch.zeros(8, 16), torch.zeros(40, 16), torch.zeros(6, 4, 16)
    integers = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    norm = Finish(norm=Norm("rmsnorm", torch.ones(40), None, 1e-5))
    for words, launch, *arguments in (
        (NEEDS.format(512, 1), all_gather_matmul, a, [w], two),
        (NEEDS.format(512, 1), all_gather_grouped_matmul, a, matrices, two, *integers),
        (r"takes no empty \(0, 16\) or \(6, 4, 16\)", all_gather_grouped_matmul, a[:0], matrices, two, *integers),
        (NEEDS.format(3072, 8), matmul_reduce_scatter, [a], [w], one),
        ("finishes tiles, not whole rows: normalise its result instead", matmul_reduce_scatter, [a], [w], wide, norm),
    ):
        with pytest.raises(ValueError, match=words):
            launch(*arguments, tile=gemms.TILE)


def test_what_cannot_run_is_refused(interpreted: WorkerPool) -> None:
    interpreted(1).run(refused)

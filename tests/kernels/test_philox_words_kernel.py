"""The device functions of Philox give the reference's words in whole tiles, aligned to blocks or not."""

import itertools

import pytest
import torch
from pool import WorkerPool
from row_checks import BEYOND_32_BITS, HIGH_KEY

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tpformer.kernels.finish import Dropout, Finish  # noqa: E402
from tpformer.kernels.philox.kernel import random_tile  # noqa: E402
from tpformer.kernels.philox.reference import random_words  # noqa: E402


@triton.jit(do_not_specialize=["key", "column"])
def words_kernel(start, key: tl.int64, out, column, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    words = random_tile(key, tl.load(start + rows), column, ALIGNED, ROWS, COLUMNS)
    tl.store(out + rows[:, None] * COLUMNS + columns[None, :], words)


def check_words(device: str, columns: int) -> None:
    cases = itertools.product((0, 1, HIGH_KEY, 2**64 - 1), (0, 4, 2**32 - 4, BEYOND_32_BITS, 2**62), (0, 8))
    for (key, first, column), aligned in itertools.product(cases, (True, False)):
        start = first + torch.tensor([0, 20, 2**34, 4]) + (0 if aligned else torch.tensor([0, 1, 2, 3]))
        out = torch.full((4, columns), -1, device=device)
        word = Finish(dropout=Dropout(start, key, 0.5)).key
        words_kernel[(1,)](start.to(device), word, out, column, ALIGNED=aligned, ROWS=4, COLUMNS=columns)
        assert torch.equal(out.cpu(), random_words(key, start + column, columns)), (key, first, column, aligned)


def interpreted_words() -> None:
    check_words("cpu", 16)


def test_words_equal_the_reference(interpreted: WorkerPool) -> None:
    interpreted(1).run(interpreted_words)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [4, 16, 1024])
def test_words_on_gpu(columns) -> None:
    check_words("cuda", columns)

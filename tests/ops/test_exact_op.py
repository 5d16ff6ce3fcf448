"""On one rank column_linear and row_linear are F.linear bit for bit, with all gradients, in every dtype."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from testing import assert_identical

from tpformer import ops

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# some BLAS take 1 row for a matrix-vector product; 33 x 65 leaves tails, 64 x 64 none
SHAPES = [(1, 7, 5), (33, 65, 17), (64, 64, 64)]


def run(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("operation", [ops.column_linear, ops.row_linear])
def test_bitwise_equal_to_linear(operation):
    for dtype, (m, k, n), inputs in itertools.product(DTYPES, SHAPES, (2, 3)):
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (n, k), (n,))[:inputs]]
        assert_identical(run(operation, *given), run(F.linear, *given), f"{dtype}, {m} x {n} x {k}, {inputs} inputs")


def group_of_one():
    x, weight = torch.randn(4, 3), torch.randn(5, 3)
    for operation in (ops.column_linear, ops.row_linear):
        grouped = partial(operation, group=dist.group.WORLD)
        assert_identical(run(grouped, x, weight), run(F.linear, x, weight))


def test_a_group_of_one_rank_is_no_group(ranks):
    ranks(1).run(group_of_one)

"""On one rank column_linear and row_linear are F.linear bit for bit, with all gradients, in every dtype."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tpformer import ops

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# some BLAS take 1 row for a matrix-vector product; 33 x 65 leaves tails, 64 x 64 none
SHAPES = [(1, 7, 5), (33, 65, 17), (64, 64, 64)]


def run(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_bitwise(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


@pytest.mark.parametrize("operation", [ops.column_linear, ops.row_linear])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_bitwise_equal_to_linear(operation, dtype, shape, bias):
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(m, k), (n, k)] + ([(n,)] if bias else [])
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    assert_bitwise(run(operation, *inputs), run(F.linear, *inputs))


def group_of_one():
    x, weight = torch.randn(4, 3), torch.randn(5, 3)
    for operation in (ops.column_linear, ops.row_linear):
        assert_bitwise(
            run(lambda *a, op=operation: op(*a, group=dist.group.WORLD), x, weight), run(F.linear, x, weight)
        )


def test_a_group_of_one_rank_is_no_group(ranks):
    ranks(1).run(group_of_one)

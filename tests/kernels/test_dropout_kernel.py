"""Dropout keeps the promised fraction at the promised scale, from the mask of the global index alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpformer.kernels.dropout.reference import dropout_apply, dropout_cost
from tpformer.kernels.philox.reference import random_words

KEY = 12345


def starts(rows: int, width: int) -> torch.Tensor:
    return torch.arange(rows) * width


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_rate_and_scale(p):
    rows, width = 64, 1001
    y = dropout_apply(torch.ones(rows, width, dtype=torch.float64), starts(rows, width), KEY, p)
    kept = y != 0
    n = rows * width
    assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / n)
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - p)))


def test_mask_is_the_comparison_of_the_word():
    words = random_words(KEY, starts(3, 10), 10)
    y = dropout_apply(torch.ones(3, 10), starts(3, 10), KEY, 0.25)
    assert torch.equal(y != 0, words >= 2**30)
    assert bool((y == 0).any()) and bool((y != 0).any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_its_own_backward(dtype):
    x, dy = torch.randn(5, 9).to(dtype).requires_grad_(), torch.randn(5, 9).to(dtype)
    y = dropout_apply(x, starts(5, 9), KEY, 0.3)
    assert y.dtype == dtype
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dropout_apply(dy, starts(5, 9), KEY, 0.3))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.integers(0, 2**40), st.data())
def test_a_shard_is_a_slice_of_the_whole(rows, width, first, data):
    x = torch.randn(rows, width)
    top = data.draw(st.integers(0, rows - 1))
    left = data.draw(st.integers(0, width - 1))
    start = first + starts(rows, width)
    whole = dropout_apply(x, start, KEY, 0.5)
    assert torch.equal(dropout_apply(x[top:, left:], start[top:] + left, KEY, 0.5), whole[top:, left:])


def test_masks_of_different_keys_and_tokens_differ():
    x = torch.ones(2, 4096)
    one, other = (dropout_apply(x, starts(2, 4096), key, 0.5) != 0 for key in (KEY, KEY + 1))
    for a, b in ((one, other), (one[0], one[1])):
        # independent fair coins agree half the time
        assert abs(float((a == b).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(a.numel())


@pytest.mark.parametrize(
    "arguments, expected", [((2, 3, 4), (6, 64)), ((1, 8, 2), (8, 40)), ((10, 10, 8), (100, 1680))]
)
def test_cost(arguments, expected):
    """x in and y out, and 8 bytes of start a row."""
    assert dropout_cost(*arguments) == expected

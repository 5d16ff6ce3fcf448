"""Cross entropy from slices of the vocabulary, however uneven, equals F.cross_entropy of the whole in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import assert_kernel_close
from torch import Tensor

from tpformer.kernels.cross_entropy.reference import (
    combine_statistics,
    cross_entropy_cost,
    slice_gradient,
    slice_statistics,
)


def in_slices(logits: Tensor, targets: Tensor, scale: Tensor, per_slice: int, vocab: int) -> tuple[Tensor, Tensor]:
    """(losses, dlogits) from slices of per_slice entries, of which those from `vocab` on are padding."""
    losses, gradients, statistics, exponentials = None, [], [], []
    starts = range(0, logits.shape[1], per_slice)
    for first in starts:
        mine, exps = slice_statistics(logits[:, first : min(first + per_slice, vocab)], targets, first)
        statistics.append(mine)
        exponentials.append(exps)
    maximum, total, losses = combine_statistics(torch.stack(statistics))
    for first, mine, exps in zip(starts, statistics, exponentials, strict=True):
        factor = (mine[0] - maximum).exp() / total
        gradient = slice_gradient(exps, factor, targets, scale[:, 0].to(exps.dtype), first)
        padding = min(per_slice, logits.shape[1] - first) - gradient.shape[1]
        gradients.append(F.pad(gradient, (0, padding)).to(logits.dtype))
    return losses, torch.cat(gradients, 1)


def by_torch(logits: Tensor, targets: Tensor, scale: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    losses = F.cross_entropy(leaf[:, :vocab], targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses, leaf, scale[:, 0].to(losses.dtype))
    return losses.detach(), gradient


# padding may fill part of the last slice, all of it, or several slices
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 12), st.integers(1, 12), st.integers(0, 1000))
def test_slices_equal_the_whole(tokens, vocab, padding, per_slice, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab + padding, generator=generator, dtype=torch.float64) * 3
    logits[:, vocab:] = 50.0  # would dominate if it were counted
    targets = torch.randint(vocab, (tokens,), generator=generator)
    scale = torch.randn(tokens, 1, generator=generator, dtype=torch.float64)
    losses, gradient = in_slices(logits, targets, scale, per_slice, vocab)
    expected_losses, expected_gradient = by_torch(logits, targets, scale, vocab)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-13)
    assert torch.equal(gradient[:, vocab:], torch.zeros(tokens, padding, dtype=torch.float64))


@pytest.mark.parametrize("per_slice", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_and_huge_logits(per_slice, dtype):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] *= 1e4
    logits[1, 3], logits[2, 3] = 3e38, -3e38
    targets, scale = torch.tensor([8, 3, 0, 4, 0]), torch.ones(5, 1)
    losses, gradient = in_slices(logits, targets, scale, per_slice, 9)
    oracle = by_torch(logits.double(), targets, scale.double(), 9)
    baseline = by_torch(logits.to(torch.float32), targets, scale, 9)
    assert losses.dtype == torch.float32 and gradient.dtype == dtype
    assert_kernel_close(losses, oracle[0], baseline[0], "losses")
    assert_kernel_close(gradient, oracle[1], baseline[1].to(dtype), "dlogits")


@pytest.mark.parametrize("offset", [1e4, 1e30])
def test_large_offset_costs_the_loss_nothing(offset):
    """Losses see differences of logits only; nine equal ones are log 9, whatever they are equal to."""
    logits = torch.full((2, 9), offset)
    losses, _ = in_slices(logits, torch.tensor([0, 8]), torch.ones(2, 1), 4, 9)
    torch.testing.assert_close(losses, torch.full((2,), 9.0).log(), rtol=1e-6, atol=0)


def test_equal_huge_logits_share_the_probability():
    """The gradient sees differences only, too: nine equal logits have probability 1/9 each."""
    _, gradient = in_slices(torch.full((1, 9), 1e30), torch.tensor([0]), torch.ones(1, 1), 4, 9)
    torch.testing.assert_close(gradient[0, 1:], torch.full((8,), 1 / 9), rtol=1e-6, atol=0)


def test_empty_slice_takes_no_part():
    logits, targets = torch.empty(3, 0), torch.tensor([0, 1, 2])
    statistics, exponentials = slice_statistics(logits, targets, 8)
    assert torch.equal(statistics, torch.tensor([[-torch.inf] * 3, [0.0] * 3, [0.0] * 3]))
    assert slice_gradient(exponentials, torch.zeros(3), targets, torch.ones(3), 8).shape == (3, 0)


def test_ignored_tokens_have_no_gradient():
    logits = torch.randn(2, 4, dtype=torch.float64)
    targets, scale = torch.tensor([-100, 2]), torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    _, gradient = in_slices(logits, targets, scale, 2, 4)
    assert torch.equal(gradient[0], torch.zeros(4, dtype=torch.float64)) and bool(gradient[1].any())


# by hand: the logits once (twice backward), three float32 a token
@pytest.mark.parametrize(
    "arguments, expected",
    [((2, 5, 4), (50, 64)), ((2, 5, 4, True), (40, 104)), ((10, 3, 2), (150, 180))],
)
def test_cost(arguments, expected):
    assert cross_entropy_cost(*arguments) == expected

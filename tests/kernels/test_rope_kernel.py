"""Rotary embedding is complex multiplication by exp(i position theta): orthogonal, invertible, relative."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import assert_kernel_close
from torch import Tensor

from tpformer.kernels.rope.reference import rope_cost, rope_rotate, rope_table

BASE = 10000.0
SHAPES = (st.integers(1, 6), st.integers(1, 3), st.integers(1, 8).map(lambda half: 2 * half), st.integers(0, 1000))


def by_complex_numbers(x: Tensor, positions: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    frequency = torch.tensor([base ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64)
    angle = positions.double()[:, None, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def make(tokens: int, heads: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, heads, head_dim, generator=generator, dtype=torch.float64)
    return x, torch.randint(5000, (tokens,), generator=generator)


@settings(max_examples=40, deadline=None)
@given(*SHAPES, st.sampled_from([10000.0, 500000.0]))
def test_equals_complex_multiplication(tokens, heads, head_dim, seed, base):
    x, positions = make(tokens, heads, head_dim, seed)
    actual = rope_rotate(x, *rope_table(positions, head_dim, base, torch.float64))
    torch.testing.assert_close(actual, by_complex_numbers(x, positions, base), rtol=0, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(*SHAPES)
def test_rotation_is_orthogonal_and_inverse_undoes_it(tokens, heads, head_dim, seed):
    x, positions = make(tokens, heads, head_dim, seed)
    cos, sin = rope_table(positions, head_dim, BASE, torch.float64)
    y = rope_rotate(x, cos, sin)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    torch.testing.assert_close(rope_rotate(y, cos, sin, inverse=True), x, rtol=0, atol=1e-14)
    # the backward is the transpose of the forward: <R x, z> = <x, R^T z>
    z = make(tokens, heads, head_dim, seed + 1)[0]
    torch.testing.assert_close((y * z).sum(), (x * rope_rotate(z, cos, sin, inverse=True)).sum())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(0, 1000))
def test_scores_depend_on_the_distance_only(query_at, key_at, shift, seed):
    q, k = make(2, 1, 16, seed)[0]

    def score(offset: int) -> Tensor:
        table = rope_table(torch.tensor([query_at + offset, key_at + offset]), 16, BASE, torch.float64)
        turned = rope_rotate(torch.stack([q, k]), *table)
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(shift), score(0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_far_positions(dtype):
    """Angles are made in float64: position 100000 in float32 would be off by thousandths of a radian."""
    x = torch.randn(3, 2, 8, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 1, 100_000])
    cos, sin = rope_table(positions, 8, BASE, dtype)
    assert cos.dtype == sin.dtype == torch.float32
    oracle = by_complex_numbers(x.double(), positions, BASE)
    # rounded once at the store: the float64 result in this dtype is the best there is
    assert_kernel_close(rope_rotate(x, cos, sin), oracle, oracle.to(dtype), f"rope {dtype}")


def test_strided_input_gives_contiguous_output():
    wide = torch.randn(4, 3, 32, dtype=torch.float64)
    table = rope_table(torch.arange(4), 8, BASE, torch.float64)
    x = wide[:, :, 8:16]
    y = rope_rotate(x, *table)
    assert y.is_contiguous()
    assert torch.equal(y, rope_rotate(x.contiguous(), *table))


# by hand: 3 flops an element; in and out, and cos + sin of head_dim / 2 float32 each
@pytest.mark.parametrize(
    "arguments, expected",
    [((2, 3, 4, 2), (72, 128)), ((5, 1, 8, 4), (120, 480)), ((1, 2, 2, 8), (12, 72))],
)
def test_cost(arguments, expected):
    assert rope_cost(*arguments) == expected

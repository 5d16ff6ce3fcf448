"""Rotary embedding is complex multiplication by exp(i position theta): the reference and the kernel."""

import itertools
from types import ModuleType

import pytest
import torch
from row_checks import FLOATS, between_nans, check_layouts, draw, everywhere
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.rope import kernel  # noqa: F401 - tests/execute takes it from here
from tpformer.kernels.rope.reference import rope_table

OF_REFERENCE = {"reference": (*FLOATS["reference"], torch.float16)}
FAR = {"reference": (torch.float32, torch.bfloat16), "interpreter": (torch.float32,)}
BASE = 10000.0
LENGTH = 50


def by_complex_numbers(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """The rotation of x, which is float64."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64, device=x.device)
    angle = positions.double()[:, None, None] * frequency
    turned = torch.complex(*pair(x, interleaved)) * torch.polar(torch.ones_like(angle), angle)
    return unpair(turned.real, turned.imag, interleaved)


def pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second numbers of the pairs that are rotated."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def unpair(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)


def make(tokens: int, heads: int, head_dim: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """q, k with one head less, and positions."""
    q, k = draw(seed, torch.float64, device, *[(tokens, n, head_dim) for n in (heads, max(1, heads - 1))])
    return q, k, torch.randint(LENGTH, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)


def close(actual: Tensor, x: Tensor, positions: Tensor, interleaved: bool = False, base: float = BASE) -> None:
    """The result is rounded once, when it is stored, so the float64 result in this dtype is the best there is."""
    oracle = by_complex_numbers(x.double(), positions, base, interleaved)
    assert actual.is_contiguous()
    assert_kernel_close(actual, oracle, oracle.to(x.dtype), f"{x.dtype} {tuple(x.shape)} {positions} {interleaved}")


# (tokens, heads, key-value heads, head dim): the least; odd halves; halves that are no power of two; heads that do not
# divide a block's rows, so that a block begins inside a token
SHAPES = ((1, 1, 1, 2), (3, 2, 1, 6), (4, 5, 2, 90), (7, 3, 3, 80), (11, 7, 1, 128), (70, 1, 1, 64))
GPU_SHAPES = (*SHAPES, (4096, 32, 8, 128), (1000, 12, 12, 64))
QUARTERS = torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]])  # cos and sin


def check(module: ModuleType, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    """Compare rotations and their inverses with float64, in both conventions; quarter turns of integers are exact."""
    tokens, heads, kv_heads, head_dim = shape
    positions = make(tokens, 1, 2, tokens, device=device)[2]
    whole = {n: make(tokens, n, head_dim, n, device=device)[0].to(dtype) for n in {heads, kv_heads}}
    q, k = whole[heads], whole[kv_heads].flip(0)
    table = rope_table(LENGTH, head_dim, BASE, dtype, device)
    indices = torch.arange(LENGTH)[:, None] + torch.arange(head_dim // 2)
    quarters = QUARTERS[indices % 4].to(device, torch.float32).movedim(-1, 0).contiguous()
    for interleaved in (False, True):
        with poisoned_memory():
            turned = module.rope_rotate(q, k, table, positions, interleaved)
            back = module.rope_rotate(q, k, table, positions.int(), interleaved, inverse=True)
            integers = [(x * 7).round() for x in (q, k)]
            exact = module.rope_rotate(*integers, (quarters[0], quarters[1]), positions, interleaved)
        for x, y, z in zip((q, k), turned, back, strict=True):
            close(y, x, positions, interleaved)
            close(z, x, -positions, interleaved)
        for x, y in zip(integers, exact, strict=True):
            c, s = (rows[positions][:, None].to(dtype) for rows in quarters)
            first, second = pair(x, interleaved)
            assert torch.equal(y, unpair(first * c - second * s, second * c + first * s, interleaved))


@everywhere("rope", FLOATS | OF_REFERENCE)
def test_equals_complex_multiplication(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for shape in GPU_SHAPES if device == "cuda" else SHAPES:
        check(module, shape, dtype, device)


@everywhere("rope", FAR)
def test_far_positions_are_exact(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Angles are made in float64: in float32, position 100000 would be off by thousandths of a radian."""
    q, k, _ = (x.to(dtype) for x in make(3, 2, 8, 0))
    positions = torch.tensor([0, 1, 100_000])
    for base in (BASE, 500000.0):
        table = rope_table(100_001, 8, base, dtype, "cpu")
        assert table[0].dtype == table[1].dtype == torch.float32
        # a shorter one is its beginning, so an offset changes only which rows are read
        assert_identical(rope_table(5, 8, base, dtype, "cpu"), tuple(rows[:5] for rows in table))
        for x, y in zip((q, k), module.rope_rotate(q, k, table, positions), strict=True):
            close(y, x, positions, base=base)


@everywhere("rope")
def test_takes_any_layout(module: ModuleType, device: str) -> None:
    """Also heads that lie one after the other, a gradient that is expanded, and q and k of one wide projection."""
    table = rope_table(LENGTH, 6, BASE, torch.float32, device)
    positions = torch.tensor([3, 0, 1, 2, 49], device=device)
    q, k = draw(0, torch.float32, device, (5, 3, 6), (5, 2, 6))
    wide = between_nans(torch.cat([q, k], 1), margin=4)
    for interleaved in (False, True):

        def rotated(q: Tensor, k: Tensor, interleaved: bool = interleaved) -> tuple[Tensor, Tensor]:
            results = module.rope_rotate(q, k, table, positions[: len(q)], interleaved)
            assert all(y.is_contiguous() for y in results)
            return results

        check_layouts(rotated, q, k)
        assert_identical(rotated(*(x[:1].expand_as(x) for x in (q, k))), rotated(q[[0] * 5], k[[0] * 5]))
        assert_identical(rotated(*wide.split((3, 2), 1)), rotated(q, k))
        assert_identical(rotated(q, between_nans(k)), rotated(q, k))


@everywhere("rope", FLOATS)
def test_extreme_values_are_exact(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """The largest values stay exact at position 0, and equal rows stay equal at the table's last position."""
    x = torch.full((2, 3, 8), torch.finfo(dtype).max, dtype=dtype, device=device)
    table = rope_table(LENGTH, 8, BASE, dtype, device)
    zero = torch.zeros(2, dtype=torch.int64, device=device)
    for interleaved, inverse in itertools.product((False, True), (False, True)):
        assert all(torch.equal(y, x) for y in module.rope_rotate(x, x, table, zero, interleaved, inverse))
        for y in module.rope_rotate(x / 2, -x / 2, table, zero + LENGTH - 1, interleaved, inverse):
            assert y.isfinite().all() and torch.equal(y, y[:1, :1].expand_as(y))

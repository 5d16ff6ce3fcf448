"""Rotary embedding is complex multiplication by exp(i position theta): the reference and the kernel."""

from importlib import import_module
from types import ModuleType

import pytest
import torch
from pool import WorkerPool
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.rope import kernel, reference
from tpformer.kernels.rope.reference import rope_rotate, rope_table
from tpformer.ops import rope

BASE = 10000.0
LENGTH = 50


def by_complex_numbers(x: Tensor, positions: Tensor, base: float, interleaved: bool = False) -> Tensor:
    """The rotation of x, which is float64."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([base ** (-2 * i / (2 * half)) for i in range(half)], dtype=torch.float64, device=x.device)
    angle = positions.double()[:, None, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn).flatten(-2)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def make(
    tokens: int, heads: int, head_dim: int, seed: int, length: int = LENGTH, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k with one head less, and positions."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(tokens, n, head_dim, generator=generator, dtype=torch.float64) for n in (heads, max(1, heads - 1))
    )
    return q.to(device), k.to(device), torch.randint(length, (tokens,), generator=generator).to(device)


def close(
    actual: Tensor, x: Tensor, positions: Tensor, what: str, interleaved: bool = False, base: float = BASE
) -> None:
    """The result is rounded once, when it is stored, so the float64 result in this dtype is the best there is."""
    oracle = by_complex_numbers(x.double(), positions, base, interleaved)
    assert actual.is_contiguous()
    assert_kernel_close(actual, oracle, oracle.to(x.dtype), f"{what} {x.dtype} {tuple(x.shape)} {interleaved}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_far_positions(dtype):
    """Angles are made in float64: in float32, position 100000 would be off by thousandths of a radian."""
    q, k, _ = (x.to(dtype) for x in make(3, 2, 8, 0))
    positions = torch.tensor([0, 1, 100_000])
    for base in (BASE, 500000.0):
        table = rope_table(100_001, 8, base, dtype, "cpu")
        assert table[0].dtype == table[1].dtype == torch.float32
        for x, y in zip((q, k), rope_rotate(q, k, table, positions), strict=True):
            close(y, x, positions, "reference", base=base)


def test_a_shorter_table_is_the_beginning_of_a_longer_one():
    """An offset therefore changes only which rows are read."""
    short, long = (rope_table(n, 12, BASE, torch.float32, "cpu") for n in (5, 9))
    assert all(torch.equal(a, b[:5]) for a, b in zip(short, long, strict=True))


# (tokens, heads, key-value heads, head dim): the least; odd halves; halves that are no power of two; heads that do not
# divide a block's rows, so that a block begins inside a token
SHAPES = ((1, 1, 1, 2), (3, 2, 1, 6), (4, 5, 2, 90), (7, 3, 3, 80), (11, 7, 1, 128), (70, 1, 1, 64))
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
            close(y, x, positions, "rotated", interleaved)
            close(z, x, -positions, "rotated back", interleaved)
        for x, y in zip(integers, exact, strict=True):
            c, s = (rows[positions][:, None].to(dtype) for rows in quarters)
            first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
            pair = (first * c - second * s, second * c + first * s)
            assert torch.equal(y, torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reference(dtype):
    for shape in SHAPES:
        check(reference, shape, dtype)


def equals_complex_multiplication() -> None:
    for dtype in (torch.float32, torch.float16):
        for shape in SHAPES:
            check(kernel, shape, dtype)


def layouts(module: ModuleType, device: str = "cpu") -> None:
    """Take columns of a wide projection with NaNs beside them, other strides, an expanded gradient, and no tokens."""
    table = rope_table(LENGTH, 6, BASE, torch.float32, device)
    positions = torch.tensor([3, 0, 1, 2, 49], device=device)
    wide = torch.full((5, 40), float("nan"), device=device)
    wide[:, 4:34] = torch.randn(5, 30)
    q, k = wide[:, 4:22].unflatten(1, (3, 6)), wide[:, 22:34].unflatten(1, (2, 6))
    packed = [x.contiguous() for x in (q, k)]
    headwise = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    for interleaved in (False, True):
        expected = module.rope_rotate(*packed, table, positions, interleaved)
        for given_q, given_k in ((q, k), headwise, (packed[0], k)):
            actual = module.rope_rotate(given_q, given_k, table, positions, interleaved)
            assert all(y.is_contiguous() for y in actual)
            assert all(torch.equal(y, z) for y, z in zip(actual, expected, strict=True))
        one = [x[:1] for x in packed]
        expanded = module.rope_rotate(*(x.expand(5, -1, -1) for x in one), table, positions, interleaved)
        repeated = module.rope_rotate(*(x.repeat(5, 1, 1) for x in one), table, positions, interleaved)
        assert all(torch.equal(y, z) for y, z in zip(expanded, repeated, strict=True))
        nothing = module.rope_rotate(q[:0], k[:0], table, positions[:0], interleaved)
        assert [tuple(y.shape) for y in nothing] == [(0, 3, 6), (0, 2, 6)]


def test_layouts_of_the_reference() -> None:
    layouts(reference)


def takes_any_layout() -> None:
    layouts(kernel)


def extreme(module: ModuleType, dtype: torch.dtype, device: str = "cpu") -> None:
    """The largest values stay exact at position 0, and equal rows stay equal at the table's last position."""
    largest = torch.finfo(dtype).max
    x = torch.full((2, 3, 8), largest, dtype=dtype, device=device)
    table = rope_table(LENGTH, 8, BASE, dtype, device)
    zero = torch.zeros(2, dtype=torch.int64, device=device)
    for interleaved in (False, True):
        for inverse in (False, True):
            assert all(torch.equal(y, x) for y in module.rope_rotate(x, x, table, zero, interleaved, inverse))
        last = zero + LENGTH - 1
        for y in module.rope_rotate(x / 2, -x / 2, table, last, interleaved):
            assert y.isfinite().all() and torch.equal(y, y[:1, :1].expand_as(y))


def extreme_cases() -> None:
    for dtype in (torch.float32, torch.float16):
        extreme(kernel, dtype)


def test_extreme_values_of_the_reference() -> None:
    extreme(reference, torch.bfloat16)


def has_the_gradients_of_the_formula() -> None:
    """dq and dk equal float64 autograd of the complex formula, also if only one result is used."""
    q, k, positions = make(5, 3, 10, 3)
    dq, dk, _ = make(5, 3, 10, 4)
    table = rope_table(LENGTH, 10, BASE, torch.float32, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        # tpformer.ops.rope as an attribute is the function, not the module
        patch.setattr(import_module("tpformer.ops.rope"), "implementation", lambda op, x: kernel)
        for interleaved in (False, True):
            for used in ((0, 1), (0,), (1,)):
                narrow = [x.float().requires_grad_() for x in (q, k)]
                wide = [x.detach().double().requires_grad_() for x in narrow]
                y = rope(*narrow, table, positions, interleaved)
                z = [by_complex_numbers(x, positions, BASE, interleaved) for x in wide]
                grads = [d.float() for d in (dq, dk)]
                torch.autograd.backward([y[i] for i in used], [grads[i] for i in used])
                torch.autograd.backward([z[i] for i in used], [grads[i].double() for i in used])
                for i in (0, 1):
                    oracle = wide[i].grad if i in used else torch.zeros_like(wide[i])
                    assert_kernel_close(narrow[i].grad, oracle, oracle.float(), f"gradient {i} of {used}")


@pytest.mark.parametrize(
    "check",
    [equals_complex_multiplication, takes_any_layout, extreme_cases, has_the_gradients_of_the_formula],
    ids=lambda check: check.__name__,
)
def test_kernel(interpreted: WorkerPool, check) -> None:
    interpreted(1).run(check)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_gpu(dtype: torch.dtype) -> None:
    for shape in (*SHAPES, (4096, 32, 8, 128), (1000, 12, 12, 64)):
        check(kernel, shape, dtype, "cuda")
    layouts(kernel, "cuda")
    extreme(kernel, dtype, "cuda")

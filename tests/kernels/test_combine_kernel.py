"""The sum of each token's rows equals a loop over tokens: the reference and the kernel."""

from types import ModuleType

import pytest
import torch
from row_checks import FLOATS, LAYOUTS, columnwise, everywhere
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.combine import kernel  # noqa: F401 - tests/execute takes it from here


def draw(tokens: int, k: int, h: int, dtype, device: str = "cpu", own: int = 5, experts: int = 8) -> tuple[Tensor, ...]:
    """rows, tokens, positions: each token goes to k of `experts` experts, of which this rank has the first `own`."""
    generator = torch.Generator().manual_seed(tokens + h)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:k].sort().values for _ in range(tokens)])
    slots = [(token, j) for expert in range(own) for token, j in (chosen == expert).nonzero().tolist()]
    positions = torch.full((tokens, k), -1, dtype=torch.int32)
    for row, (token, j) in enumerate(slots):
        positions[token, j] = row
    index = torch.tensor([token for token, _ in slots], dtype=torch.int32)
    rows = torch.randn(len(slots), h, generator=generator, dtype=torch.float64)
    return rows.to(device, dtype), index.to(device), positions.to(device)


def by_loop(rows: Tensor, positions: Tensor) -> Tensor:
    """Sums from left to right in the rows' dtype."""
    y = rows.new_zeros(len(positions), rows.shape[1])
    for token, place in (positions >= 0).nonzero().tolist():
        y[token] += rows[positions[token, place]]
    return y


def check(module: ModuleType, rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Compare with a loop: in float64 by the accuracy rule, and in float32 to the bit, as the order is promised."""
    with poisoned_memory():
        y = module.combine(rows, tokens, positions)
    wide = by_loop(rows.to(torch.promote_types(rows.dtype, torch.float32)), positions)
    assert_kernel_close(y, by_loop(rows.double(), positions), wide.to(rows.dtype), f"combine {tuple(rows.shape)}")
    assert torch.equal(y, wide.to(rows.dtype))


# one element, odd sizes, whole vectors, two blocks of columns with a rest, more experts of a token than this rank has
SHAPES = ((1, 1, 1), (7, 3, 13), (9, 2, 64), (3, 4, 1040), (5, 8, 33))
GPU_SHAPES = ((500, 2, 4096), (300, 8, 2048), (70, 8, 1001))


@everywhere("combine", FLOATS)
def test_equals_a_loop(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        check(module, *draw(*shape, dtype, device))
    for shape in GPU_SHAPES if device == "cuda" else ():
        check(module, *draw(*shape, dtype, device, own=min(shape[1] + 3, 16), experts=16))
    check(module, *draw(2, 16, 5, dtype, device, own=16, experts=16))


@everywhere("combine")
def test_takes_any_layout(module: ModuleType, device: str) -> None:
    """Rows may lie apart, and positions too. There may be no rows, and tokens without rows, which are 0."""
    rows, tokens, positions = draw(6, 3, 5, torch.float32, device, own=2)
    for layout in LAYOUTS:
        y = module.combine(layout(rows), tokens, columnwise(positions))
        assert torch.equal(y, by_loop(rows, positions))
    nowhere = (positions < 0).all(1)
    assert nowhere.any() and not y[nowhere].any()
    for dtype in (torch.float32, torch.float16):
        with poisoned_memory():
            alone = module.combine(rows[:0].to(dtype), tokens[:0], torch.full_like(positions, -1))
        assert alone.dtype == dtype and torch.equal(alone, torch.zeros(6, 5, dtype=dtype, device=device))
    assert module.combine(rows[:0], tokens[:0], positions[:0]).shape == (0, 5)

"""Grouped GEMMs: autograd agrees with the reference, a loop over the groups, and the kernel equals it."""

from importlib import import_module
from itertools import product
from types import ModuleType

import pytest
import torch
from gemms import in_interpreter
from row_checks import draw, with_gradients
from testing import assert_same, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from test_matmul_kernel import TILE, shipped_tile
from test_matmul_kernel import close as close_to

from tpformer.kernels.configurations import TILES
from tpformer.kernels.grouped_matmul import reference
from tpformer.kernels.launch import Tile

# rows of each group: few, none, a tile and a remainder, a whole one, one, none; all in one; one each; none; one group
COUNTS = ((5, 0, 17, 16, 1, 0), (0, 37, 0), (1,) * 5, (0, 0), (19,))
SHAPES = ((21, 19), (16, 32), (1, 1))  # (n, k)
TOKENS = 11  # rows that an index takes from, most of them several times
GPU_COUNTS = ((300, 0, 129, 64, 1, 0, 2000, 7), (33,) * 128, (0, 0, 1000), (0,) * 8)
GPU_SHAPES = ((520, 136), (768, 2048), (37, 19))


def kernel() -> ModuleType:
    return import_module("tpformer.kernels.grouped_matmul.kernel")


def offsets_of(counts: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def draw_index(rows: int, device: str = "cpu") -> Tensor:
    index = torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(rows))
    return index.to(device, torch.int32)


def close(module: ModuleType, name: str, *arguments, tile: Tile | None, **options) -> None:
    """Compare a function of the kernel with the reference in float64 and in the kernel's dtype."""
    with poisoned_memory():
        actual = getattr(module, name)(*arguments, tile=tile, **options)
    close_to(actual, getattr(reference, name), *arguments, **options)


def products(
    module: ModuleType, counts: tuple[int, ...], n: int, k: int, dtype: torch.dtype, device: str, tile: Tile | None,
    turn: int | None = None,
) -> None:  # fmt: skip
    """Both orientations of the matrices, with rows side by side, and with rows that an index names. With `turn`, one of
    these four."""
    offsets, rows = offsets_of(counts, device), sum(counts)
    a, tokens, w, wt = draw(n, dtype, device, (rows, k), (TOKENS, k), (len(counts), n, k), (len(counts), k, n))
    index = draw_index(rows, device)
    forms = list(product(((w, False), (wt, True)), ((a, None), (tokens, index))))
    for (matrices, transposed), (x, given) in forms if turn is None else [forms[turn % 4]]:
        close(module, "grouped_matmul", x, matrices, offsets, given, tile=tile, transposed=transposed)


def gradients(
    module: ModuleType, counts: tuple[int, ...], n: int, k: int, dtype: torch.dtype, device: str, tile: Tile | None,
    turn: int | None = None,
) -> None:  # fmt: skip
    """The weight's gradient, with an index of dy, of x, and without one. With `turn`, one of these three."""
    offsets, rows = offsets_of(counts, device), sum(counts)
    index = draw_index(rows, device)
    forms = ((None, None), (index, None), (None, index))
    for of_dy, of_x in forms if turn is None else [forms[turn % 3]]:
        sizes = [(rows if given is None else TOKENS, width) for given, width in ((of_dy, n), (of_x, k))]
        dy, x = draw(k, dtype, device, *sizes)
        close(module, "grouped_weight_gradient", dy, x, offsets, of_dy, of_x, tile=tile)


def all_cases() -> None:
    """Every form with the groups of most kinds, and one form with the others and in the other shapes."""
    cases = [*((counts, *SHAPES[0]) for counts in COUNTS), *((COUNTS[0], *shape) for shape in SHAPES[1:])]
    for number, case in enumerate(cases):
        products(kernel(), *case, torch.float32, "cpu", TILE, number or None)
        gradients(kernel(), *case, torch.float32, "cpu", TILE, number or None)
    products(kernel(), *cases[0], torch.float32, "cpu", TILE._replace(tma=True))
    products(kernel(), *cases[0], torch.float16, "cpu", TILE._replace(tma=True))
    gradients(kernel(), *cases[0], torch.float16, "cpu", TILE)


test_kernels_match_the_reference = in_interpreter(all_cases, 1)


def infinities_of_another_group() -> None:
    """Groups share blocks of rows, and their matrices lie side by side: no product may take what is another group's."""
    n, k, offsets = 19, 21, offsets_of((5, 20, 3))
    a, dy, w, wt = draw(0, torch.float32, "cpu", (28, k), (28, n), (3, n, k), (3, k, n))
    for x in (a[5:25], dy[5:25], w[1], wt[1]):
        x.fill_(float("inf"))
    for tma in (False, True):
        tile = TILE._replace(tma=tma)
        for matrices, transposed in ((w, False), (wt, True)):
            y = kernel().grouped_matmul(a, matrices, offsets, transposed=transposed, tile=tile)
            assert y[:5].isfinite().all() and y[25:].isfinite().all()
        gradient = kernel().grouped_weight_gradient(dy, a, offsets, tile=tile)
        assert gradient[0].isfinite().all() and gradient[2].isfinite().all()


test_groups_do_not_leak = in_interpreter(infinities_of_another_group, 1)


def strided() -> None:
    """Rows of a larger matrix, whose other columns are NaN; zeros and ones, whose sums are exact."""
    counts, n = (4, 0, 18), 23
    for tma, index in product((False, True), (None, draw_index(22) + 11)):
        a, w = torch.full((22, 40), float("nan"))[:, 3:20], torch.randint(0, 2, (3, n, 17)).float()
        a.copy_(torch.randint(0, 2, (22, 17)))
        dy, tile, offsets = torch.randint(0, 2, (22, n)).float(), TILE._replace(tma=tma), offsets_of(counts)
        for programs in (1, 3) if tma else (3,):
            y = kernel().grouped_matmul(a, w, offsets, index, tile=tile, programs=programs)
            assert torch.equal(y, reference.grouped_matmul(a, w, offsets, index))
            gradient = kernel().grouped_weight_gradient(dy, a, offsets, None, index, tile=tile, programs=programs)
            assert torch.equal(gradient, reference.grouped_weight_gradient(dy, a, offsets, None, index))


test_zeros_and_ones_are_exact_in_strided_operands = in_interpreter(strided, 1)


@pytest.mark.parametrize("counts", COUNTS)
def test_autograd_agrees_with_the_reference(counts: tuple[int, ...]) -> None:
    """Row by row: dgrad is the transposed product, and of an index the sum over its rows."""
    n, k, offsets, index = 5, 7, offsets_of(counts), draw_index(sum(counts))
    tokens, w, dy = draw(1, torch.float64, "cpu", (TOKENS, k), (len(counts), n, k), (len(index), n))
    group = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    y, dtaken, dw = with_gradients(lambda taken, w: torch.einsum("rnk,rk->rn", w[group], taken), (tokens[index], w), dy)
    assert_same(reference.grouped_matmul(tokens, w, offsets, index), y)
    assert_same(reference.grouped_matmul(dy, w, offsets, transposed=True), dtaken)
    assert_same(reference.grouped_weight_gradient(dy, tokens, offsets, None, index), dw)
    assert_same(reference.grouped_weight_gradient(tokens, dy, offsets, index), dw.transpose(1, 2))


def test_the_reference_has_shapes_without_values() -> None:
    a, w, offsets = (torch.empty(size, device="meta") for size in ((12, 3), (4, 5, 3), (5,)))
    assert reference.grouped_matmul(a, w, offsets).shape == (12, 5)
    assert reference.grouped_weight_gradient(a.new_empty(12, 5), a, offsets).shape == (4, 5, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*TILES, None])
def test_on_gpu(name: str | None, dtype: torch.dtype) -> None:
    """Every tile, and the one that the launcher picks."""
    tile = None if name is None else shipped_tile(name, dtype)
    for counts, (n, k) in [*((COUNTS[0], shape) for shape in SHAPES), *product(GPU_COUNTS, GPU_SHAPES)]:
        for check in (products, gradients):
            check(kernel(), counts, n, k, dtype, "cuda", tile)

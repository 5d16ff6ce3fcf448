"""Grouped GEMMs: autograd agrees with the reference, a loop over the groups, and the kernel equals it."""

from functools import partial
from importlib import import_module
from itertools import product

import pytest
import torch
from gemms import in_interpreter
from row_checks import between_nans, draw, with_gradients
from test_matmul_kernel import TILE, close, shipped_tile
from testing import assert_same, poisoned_memory
from torch import Tensor

from tpformer.kernels.configurations import TILES
from tpformer.kernels.grouped_matmul import reference
from tpformer.kernels.launch import Tile

kernel = partial(import_module, "tpformer.kernels.grouped_matmul.kernel")
# rows of each group: few, none, a tile and a remainder, a whole one, one, none; all in one; one each; none; one group
COUNTS = ((5, 0, 17, 16, 1, 0), (0, 37, 0), (1,) * 5, (0, 0), (19,))
SHAPES = ((21, 19), (16, 32), (1, 1))  # (n, k)
TOKENS = 11  # rows that an index takes from, most of them several times
GPU_COUNTS = ((300, 0, 129, 64, 1, 0, 2000, 7), (33,) * 128, (0, 0, 1000), (0,) * 8)
GPU_SHAPES = ((520, 136), (768, 2048), (37, 19))


def offsets_of(counts: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def draw_index(rows: int, device: str = "cpu") -> Tensor:
    index = torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(rows))
    return index.to(device, torch.int32)


def products(module, counts, n: int, k: int, dtype, device: str, tile: Tile | None, turn: int | None = None) -> None:
    """Both orientations of the matrices, with rows side by side and with rows that an index names; or one of these."""
    offsets, rows = offsets_of(counts, device), sum(counts)
    a, tokens, w, wt = draw(n, dtype, device, (rows, k), (TOKENS, k), (len(counts), n, k), (len(counts), k, n))
    index = draw_index(rows, device)
    forms = list(product(((w, False), (wt, True)), ((a, None), (tokens, index))))
    for (matrices, transposed), (x, given) in forms if turn is None else [forms[turn % 4]]:
        with poisoned_memory():
            y = module.grouped_matmul(x, matrices, offsets, given, tile=tile, transposed=transposed)
        close(y, reference.grouped_matmul, x, matrices, offsets, given, transposed=transposed)


def gradients(module, counts, n: int, k: int, dtype, device: str, tile: Tile | None, turn: int | None = None) -> None:
    """The weight's gradient, with an index of dy, of x, and without one. With `turn`, one of these three."""
    offsets, rows = offsets_of(counts, device), sum(counts)
    index = draw_index(rows, device)
    forms = ((None, None), (index, None), (None, index))
    for of_dy, of_x in forms if turn is None else [forms[turn % 3]]:
        sizes = [(rows if given is None else TOKENS, width) for given, width in ((of_dy, n), (of_x, k))]
        dy, x = draw(k, dtype, device, *sizes)
        with poisoned_memory():
            gradient = module.grouped_weight_gradient(dy, x, offsets, of_dy, of_x, tile=tile)
        close(gradient, reference.grouped_weight_gradient, dy, x, offsets, of_dy, of_x)


@in_interpreter(1)
def test_kernels_match_the_reference() -> None:
    """Every form with the groups of most kinds, and one form with the others and in the other shapes."""
    cases = [*((counts, *SHAPES[0]) for counts in COUNTS), *((COUNTS[0], *shape) for shape in SHAPES[1:])]
    for (number, case), check in product(enumerate(cases), (products, gradients)):
        check(kernel(), *case, torch.float32, "cpu", TILE, number or None)
    for dtype in (torch.float32, torch.float16):
        products(kernel(), *cases[0], dtype, "cpu", TILE._replace(tma=True))
    gradients(kernel(), *cases[0], torch.float16, "cpu", TILE)


@in_interpreter(1)
def test_groups_do_not_leak() -> None:
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


@in_interpreter(1)
def test_zeros_and_ones_are_exact_in_strided_operands() -> None:
    """Rows of a larger matrix, whose other columns are NaN; zeros and ones, whose sums are exact."""
    counts, n = (4, 0, 18), 23
    for tma, index in product((False, True), (None, draw_index(22) + 11)):
        a, dy, w = (torch.randint(0, 2, size).float() for size in ((22, 17), (22, n), (3, n, 17)))
        a, tile, offsets = between_nans(a), TILE._replace(tma=tma), offsets_of(counts)
        for programs in (1, 3) if tma else (3,):
            y = kernel().grouped_matmul(a, w, offsets, index, tile=tile, programs=programs)
            assert torch.equal(y, reference.grouped_matmul(a, w, offsets, index))
            gradient = kernel().grouped_weight_gradient(dy, a, offsets, None, index, tile=tile, programs=programs)
            assert torch.equal(gradient, reference.grouped_weight_gradient(dy, a, offsets, None, index))


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
    tokens, w, dy, offsets, index = (x.to("meta") for x in (tokens, w, dy, offsets, index))  # shapes without values
    assert reference.grouped_matmul(tokens, w, offsets, index).shape == y.shape
    assert reference.grouped_weight_gradient(dy, tokens, offsets, None, index).shape == dw.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*TILES, None])
def test_on_gpu(name: str | None, dtype: torch.dtype) -> None:
    """Every tile, and the one that the launcher picks."""
    tile = None if name is None else shipped_tile(name, dtype)
    for counts, (n, k) in [*((COUNTS[0], shape) for shape in SHAPES), *product(GPU_COUNTS, GPU_SHAPES)]:
        for check in (products, gradients):
            check(kernel(), counts, n, k, dtype, "cuda", tile)

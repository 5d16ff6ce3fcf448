"""matmul and matmul_derivative equal their references: layouts, epilogues, odd shapes, exact integers."""

import pytest
import torch
from gemms import TILE, in_interpreter
from row_checks import between_nans, draw
from testing import assert_kernel_close

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.configurations import TILES, tile_names
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul.reference import matmul_derivative_reference, matmul_reference

SHAPES = ((1, 1, 1), (3, 1, 7), (17, 37, 19), (16, 32, 48), (3, 5, 600))  # (m, n, k); 600 is many tiles long


def close(actual, reference, *arguments, **options) -> None:
    """Compare every output of the kernel with the reference in float64 and in the kernel's dtype."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    oracles, baselines = reference(*wide, **options), reference(*arguments, **options)
    if isinstance(actual, torch.Tensor):
        actual, oracles, baselines = [actual], [oracles], [baselines]
    for number, (x, oracle, baseline) in enumerate(zip(actual, oracles, baselines, strict=True)):
        if oracle is None:
            assert x is None
        else:
            assert_kernel_close(x, oracle, baseline, f"{reference.__name__} output {number} {options}")


def layouts(m: int, n: int, k: int, dtype: torch.dtype, device: str, tile: Tile) -> None:
    a, at, w, wt = draw(m, dtype, device, (m, k), (k, m), (n, k), (k, n))
    for left, right, *transposed in ((a, w, False, False), (a, wt, False, True), (at, wt, True, True)):
        options = dict(zip(("a_transposed", "b_transposed"), transposed, strict=True))
        close(matmul(left, [right], tile=tile, **options)[0], matmul_reference, left, right, **options)


def epilogues(m: int, n: int, k: int, dtype, device: str, tile: Tile, activations=(None, *ACTIVATIONS)) -> None:
    widths = (n, n + 5, max(1, n // 2))
    a, x, gate, wt, *rest = draw(m + 1, dtype, device, (m, k), (m, n), (m, n), (k, n), *[(w, k) for w in widths])
    biases = draw(m + 2, dtype, device, *[(w,) for w in widths])
    for activation in activations:
        outputs = matmul(a, rest, biases, activation=activation, tile=tile)
        for y, w, bias in zip(outputs, rest, biases, strict=True):
            close(y, matmul_reference, a, w, bias, activation=activation)
        if activation is not None:
            for given in (None, gate):
                actual = matmul_derivative(a, wt, x, activation, given, tile=tile)
                close(actual, matmul_derivative_reference, a, wt, x, activation, given)


@in_interpreter(1)
def test_kernels_match_references() -> None:
    """Every layout in every shape, and every activation in one of them."""
    for shape, activation in zip(SHAPES, (None, *ACTIVATIONS), strict=True):
        layouts(*shape, torch.float32, "cpu", TILE)
        epilogues(*shape, torch.float32, "cpu", TILE, [activation])
    layouts(17, 37, 19, torch.float16, "cpu", TILE._replace(tma=True))
    epilogues(16, 24, 8, torch.float16, "cpu", TILE._replace(tma=True), [None, "silu"])


@in_interpreter(1)
def test_zeros_and_ones_are_exact_in_strided_operands() -> None:
    """Sums of zeros and ones are exact. Operands are columns of larger matrices, whose other columns are NaN."""
    a, w = (between_nans(torch.randint(0, 2, (rows, 17)).float(), margin) for rows, margin in ((19, 3), (23, 8)))
    for tma in (False, True):
        assert torch.equal(matmul(a, [w], tile=TILE._replace(tma=tma))[0], a @ w.t())


def shipped_tile(name: str, dtype: torch.dtype) -> Tile:
    """The tile of this name, where it ships for this GPU; else the test is skipped."""
    capability = 10 * torch.cuda.get_device_capability()[0]
    if name not in tile_names(capability, dtype.itemsize):
        pytest.skip(f"{name} is not for sm_{capability} and {dtype}")
    return TILES[name]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", TILES)
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    """Every layout in every shape. Each call compiles for seconds: all activations have one shape, and one each."""
    tile = shipped_tile(name, dtype)
    for shape, activation in zip(SHAPES, (None, *ACTIVATIONS), strict=True):
        layouts(*shape, dtype, "cuda", tile)
        epilogues(*shape, dtype, "cuda", tile, [activation])
    for shape, activations in (((300, 520, 136), (None, *ACTIVATIONS)), ((1024, 768, 2048), [None])):
        layouts(*shape, dtype, "cuda", tile)
        epilogues(*shape, dtype, "cuda", tile, activations)

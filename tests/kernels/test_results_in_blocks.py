"""Norms, activations and dropout whose results are blocks of e4m3, or have them beside: the bytes that quantising what
they store gives."""

from itertools import product
from types import ModuleType
from unittest import mock

import blocks
import pytest
import torch
from row_checks import FLOATS, check_normalised, columnwise, draw, draw_dropout, draw_norm, everywhere
from testing import assert_identical, assert_kernel_close, poisoned_memory

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.finish import Finish
from tpformer.kernels.pack import kernel as pack_kernel
from tpformer.kernels.pack import reference as pack_reference
from tpformer.kernels.quantize.format import BLOCK, Blocks
from tpformer.kernels.quantize.reference import quantize_rows

KINDS = ("layernorm", "rmsnorm")
FORMS = ("", "packed")


def scaled(rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows of numbers at many scales."""
    (x,) = draw(rows + columns, torch.float64, "cpu", (rows, columns))
    return (x * torch.exp2(torch.arange(rows) % 17 - 8.0)[:, None]).to(device, dtype)


def assert_quantised(found: Blocks, stored: torch.Tensor, what: str) -> None:
    blocks.assert_blocks(found, quantize_rows(stored.cpu()), what)


def check_norm(module: ModuleType, shape: tuple[int, int], dtype: torch.dtype, device: str, **options: int) -> None:
    """Norms, rebuilt ones, and those of what is finished before; statistics and what is finished stay the same."""
    x, what = scaled(*shape, dtype, device), f"{shape} {dtype} {options}"
    for kind in KINDS:
        norm = draw_norm(shape[1], shape[1], kind, dtype, device)
        finish = Finish(norm.weight, draw_dropout(*shape, 0.4, device), scaled(*shape, dtype, device), norm)
        with poisoned_memory():
            y, statistics = module.norm_forward(x, norm, **options)
            found, same = module.norm_forward(x, norm, blocks=True, **options)
            z, of_z, others = module.finish_norm_forward(x.clone(), finish, **options)
            z_again, blocks_of_z, others_again = module.finish_norm_forward(x.clone(), finish, blocks=True, **options)
        assert_quantised(found, y, what)
        assert_quantised(blocks_of_z, of_z, what)
        assert_identical([same, z_again, others_again], [statistics, z, others])
        rebuilt = module.norm_rebuilt(x, statistics, norm, True)
        assert_quantised(rebuilt, module.norm_rebuilt(x, statistics, norm), what)


def check_norm_gradients(
    module: ModuleType,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    kinds: tuple[str, ...] = KINDS,
    **options: int,
) -> None:
    """The gradient of x stays as it is, and beside it are its blocks. On a GPU it is as near: a tile whose blocks are
    stored may lie in registers in another way, in whose order a row is summed. Gradients of the norm's parameters are
    sums, of short rows in another order. Of bfloat16 x may be packed."""
    dy, x, dresidual = (scaled(*shape, dtype, device).roll(i, 1) for i in range(3))
    pack = (pack_kernel if module.__name__.endswith(".kernel") else pack_reference).pack
    forms = FORMS if dtype == torch.bfloat16 and x.numel() else FORMS[:1]
    for kind, form in product(kinds, forms):
        added = dresidual if kind == "layernorm" else None
        norm = draw_norm(shape[1], shape[1], kind, dtype, device)
        y, statistics = module.norm_forward(x, norm)
        given = dy, pack(x)[0] if form else x, statistics, norm, added
        dx, *sums = module.norm_backward(*given, **options)
        with poisoned_memory():
            found, *sums_again, beside = module.norm_backward(*given, blocks=True, **options)
        what = f"{kind} {form} {shape} {dtype} {options}"
        assert_identical(found, dx) if device == "cpu" else assert_kernel_close(found, dx.double(), dx, what)
        assert_quantised(beside, found, what)
        if shape[1] > 1024:
            assert_identical(sums_again, sums)
        elif not form:
            check_normalised(module, x, y, statistics, norm, dy, added, blocks=True, **options)


def check_activation(module: ModuleType, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x, gate = scaled(*shape, dtype, device), columnwise(scaled(*shape, dtype, device).flip(0))
    for name in ACTIVATIONS:
        for other in (None, gate):
            with poisoned_memory():
                found = module.activation_forward(x, name, other, blocks=True)
            assert_quantised(found, module.activation_forward(x, name, other), f"{shape} {dtype} {name}")
    assert_quantised(module.activation_forward(x, None, blocks=True), x, "no activation")
    check_gradients(module, x, gate)


def check_gradients(module: ModuleType, x: torch.Tensor, gate: torch.Tensor) -> None:
    """Gradients stay as they are, and beside each are its blocks. Of bfloat16 x and gate may be packed."""
    da = scaled(*x.shape, x.dtype, str(x.device)).flip(1)
    pack = (pack_kernel if module.__name__.endswith(".kernel") else pack_reference).pack
    kept = [lambda x: x, *([lambda x: pack(x)[0]] if x.dtype == torch.bfloat16 and x.numel() else [])]
    for name, other, form in product(ACTIVATIONS, (None, gate), kept):
        given = form(x), name, None if other is None else form(other)
        dx, dgate, a = module.activation_backward(da.clone(), *given)
        with poisoned_memory():
            *found, of_a, beside = module.activation_backward(da.clone(), *given, blocks=True)
        assert_identical(found, [dx, dgate])
        assert_quantised(of_a, a, f"{tuple(x.shape)} {x.dtype} {name}")
        for blocks_of, gradient in zip(beside, (dx, dgate), strict=True):
            assert (blocks_of is None) == (gradient is None)
            if gradient is not None:
                assert_quantised(blocks_of, gradient, f"{tuple(x.shape)} {x.dtype} {name}")
    same, nothing, of_x, beside = module.activation_backward(da, x, None, blocks=True)
    assert same is da and nothing is None and beside == (None, None)
    assert_quantised(of_x, x, "no activation")


def check_finished(module: ModuleType, shape: tuple[int, int], dtype: torch.dtype, device: str, **options: int) -> None:
    """dx in blocks; the gradient of the bias is that of dx in 16 bits, to the bit. Rows may lie apart."""
    apart = scaled(shape[0], 2 * shape[1], dtype, device)[:, : shape[1]]
    for dropout, bias in product((None, draw_dropout(*shape, 0.4, device)), (False, True)):
        dx, dbias = module.finish_backward(apart, dropout, bias, **options)
        with poisoned_memory():
            found, again = module.finish_backward(apart, dropout, bias, blocks=True, **options)
        assert_quantised(found, dx, f"{shape} {dtype} {dropout} {bias} {options}")
        assert (again is None) == (not bias)
        assert_identical([dbias], [again]) if bias else None


@everywhere("norm", FLOATS)
def test_norms(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Several rows in a tile, one, a width that is no power of two, and rows of several tiles."""
    for shape in ((0, BLOCK), (1, BLOCK), (33, BLOCK), (3, 3 * BLOCK), (5, 8 * BLOCK)):
        check_norm(module, shape, dtype, device)
    if module.__name__.endswith(".kernel"):
        check_norm(module, (3, 5 * BLOCK), dtype, device, widest=2 * BLOCK)


@everywhere("norm", FLOATS)
def test_gradients_of_norms(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """As above, with rows of one tile that programs share with a remainder, and of several tiles."""
    for shape in ((0, BLOCK), (1, BLOCK), (33, BLOCK), (3, 3 * BLOCK), (5, 8 * BLOCK)):
        check_norm_gradients(module, shape, dtype, device)
    if module.__name__.endswith(".kernel"):
        check_norm_gradients(module, (40, 3 * BLOCK), dtype, device, programs=4)
        check_norm_gradients(module, (5, 9 * BLOCK), dtype, device, programs=2)
        check_norm_gradients(module, (3, 5 * BLOCK), dtype, device, widest=2 * BLOCK)


@everywhere("activation", FLOATS)
def test_activations(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for shape in ((0, BLOCK), (1, BLOCK), (3, 3 * BLOCK), (17, 2 * BLOCK)):
        check_activation(module, shape, dtype, device)


@everywhere("dropout", FLOATS)
def test_gradients_behind_dropout(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Rows of one tile, of several with a remainder, and of shares of them."""
    for shape in ((0, BLOCK), (1, BLOCK), (17, 2 * BLOCK), (9, 3 * BLOCK)):
        check_finished(module, shape, dtype, device)
    if module.__name__.endswith(".kernel"):
        check_finished(module, (40, 3 * BLOCK), dtype, device, programs=4)


@everywhere("norm", {**FLOATS, "interpreter": (torch.float32,)})
def test_what_is_not_finite_makes_its_block_nan(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """A NaN weight reaches one block of every row, and an infinite element of x its whole row."""
    x = scaled(3, 2 * BLOCK, dtype, device)
    norm = draw_norm(0, 2 * BLOCK, "rmsnorm", dtype, device)
    assert norm.weight is not None
    norm.weight[BLOCK + 3] = float("nan")
    x[1, 0] = float("inf")
    found, _ = module.norm_forward(x, norm, blocks=True)
    nan = found.exponents == 127
    assert nan.tolist() == [[False, True, False], [True, True, True]], "by blocks, then rows"


@everywhere("activation", {**FLOATS, "interpreter": (torch.float32,)})
def test_widths_that_are_not_whole_blocks_are_refused(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    with pytest.raises(ValueError, match="a multiple of 128, such as 256"):
        module.activation_forward(scaled(3, BLOCK + 64, dtype, device), "silu", blocks=True)


@everywhere("dropout", {**FLOATS, "interpreter": (torch.float32,)})
def test_what_is_not_finite_reaches_its_block_and_its_bias(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Where dropout keeps an infinity its block is NaN and the bias's gradient infinite, else neither."""
    dz = scaled(3, 2 * BLOCK, dtype, device)
    dropout = draw_dropout(3, 2 * BLOCK, 0.5, device)
    dropped = module.finish_backward(torch.ones_like(dz), dropout, False)[0] == 0
    for at in (tuple(each[0].tolist()) for each in (dropped.nonzero(), (~dropped).nonzero())):
        given = dz.clone()
        given[at] = float("inf")
        found, dbias = module.finish_backward(given, dropout, True, blocks=True)
        assert bool((found.exponents == 127).any()) == bool(dbias.isinf().any()) == (not dropped[at])


def check_small(activation: ModuleType, norm: ModuleType, dropout: ModuleType, rows: int) -> None:
    """For tiles of a few rows and for programs of two blocks."""
    for widest in (BLOCK, 4 * BLOCK):
        check_norm(norm, (rows, 3 * BLOCK), torch.float32, "cpu", widest=widest)
        check_norm_gradients(norm, (rows, 3 * BLOCK), torch.float32, "cpu", KINDS[:1], widest=widest)
    with mock.patch.multiple(activation, FORWARD_BYTES=2 * BLOCK * 4, BACKWARD_BYTES=2 * BLOCK * 4):
        check_activation(activation, (rows, 3 * BLOCK), torch.float32, "cpu")
    for columns in (BLOCK, 2 * BLOCK):
        with mock.patch.multiple(dropout, BACKWARD_COLUMNS=columns, BACKWARD_ELEMENTS=2 * columns):
            check_finished(dropout, (rows, 3 * BLOCK), torch.float32, "cpu")

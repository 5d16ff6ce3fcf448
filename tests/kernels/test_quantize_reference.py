"""Quantisation to blocks of e4m3 has the bytes of its definition in exact fractions, whatever the dtype, and the same
bytes for a slice as for the whole. Each planted mistake is caught."""

from collections.abc import Callable

import blocks
import pytest
import torch
from mutations import Edit, edited, replace
from row_checks import LAYOUTS, draw
from testing import assert_identical
from torch import Tensor

from tpformer.kernels.quantize import reference
from tpformer.kernels.quantize.format import BLOCK, VALUES, Blocks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bytes_are_those_of_the_definition(dtype: torch.dtype) -> None:
    blocks.check(reference, dtype)


def test_every_tie_is_tried() -> None:
    """All 254 numbers of e4m3 and all that lie between two of one sign; torch's own cast of float64 fails there."""
    x, expected = blocks.telling(torch.float64)
    assert set(range(256)) - {0xFF} == set(expected.values.view(torch.uint8).flatten().tolist())
    middles = {float((a + b) / 2) for a, b in zip(blocks.GRID, blocks.GRID[1:], strict=False)}
    tried = {value for block in blocks.ties(torch.float64) for value in (block / (block.abs().max() / 448)).tolist()}
    assert middles | {-value for value in middles} <= tried and len(middles) == 126
    rounded_twice = (x[:, :BLOCK] / torch.exp2(expected.exponents[:, :1].double())).to(VALUES).view(torch.uint8)
    finite = expected.exponents[:, 0] != 127
    assert not torch.equal(rounded_twice[finite], expected.values.view(torch.uint8)[finite, :BLOCK])


def test_numbers_are_exact_in_bfloat16() -> None:
    """But for those that are 2**128 by rounding, which only float64 has."""
    x, expected = blocks.telling(torch.float32)
    rows = reference.quantize_rows(x)
    wide = reference.dequantize(rows, torch.float64)
    exact = wide.abs() != 2.0**128
    for dtype in (torch.bfloat16, torch.float32):
        assert_identical(reference.dequantize(rows, dtype)[exact].double(), wide[exact])
        assert reference.dequantize(rows, dtype)[~exact].isinf().all()
    assert (~exact).any() and expected.exponents.max() == 127


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_slice_is_quantised_as_a_part_of_the_whole(dtype: torch.dtype) -> None:
    """By rows, by 128 features, and for weights by 128 of both; so whoever holds whole blocks has the same numbers."""
    (x,) = draw(0, torch.float64, "cpu", (4 * BLOCK, 3 * BLOCK))
    x = (x * torch.exp2(torch.arange(4 * BLOCK) % 13 - 6.0)[:, None]).to(dtype)
    whole, weight = reference.quantize_rows(x), reference.quantize_weight(x)
    for rows in (slice(0, 1), slice(5, 8), slice(BLOCK, 3 * BLOCK)):
        blocks.assert_blocks(reference.quantize_rows(x[rows]), part(whole, rows, slice(None), True), f"{rows}")
    for features in (slice(0, 1), slice(1, 3)):
        own = x[:, features.start * BLOCK : features.stop * BLOCK]
        blocks.assert_blocks(reference.quantize_rows(own), part(whole, slice(None), features, True), f"{features}")
        for outputs in (slice(0, 4), slice(1, 3), slice(3, 4)):
            mine = own[outputs.start * BLOCK : outputs.stop * BLOCK]
            wanted = part(weight, outputs, features, False)
            blocks.assert_blocks(reference.quantize_weight(mine), wanted, f"{outputs} {features}")


def part(whole: Blocks, rows: slice, features: slice, of_rows: bool) -> Blocks:
    """These rows, or blocks of rows, and these blocks of features of a matrix in blocks."""
    values, exponents = whole.values.view(torch.uint8), whole.exponents
    columns = slice(None) if features.start is None else slice(features.start * BLOCK, features.stop * BLOCK)
    if of_rows:
        values, exponents = values[rows, columns], exponents[features, rows]
    else:
        values = values[rows.start * BLOCK : rows.stop * BLOCK, columns]
        exponents = exponents[rows, features]
    return Blocks(values.contiguous().view(VALUES), exponents.contiguous())


def test_equal_numbers_give_equal_blocks() -> None:
    for narrow in (torch.float16, torch.bfloat16):
        for x, quantize in (
            (blocks.telling(narrow)[0], reference.quantize_rows),
            (blocks.telling_weight(narrow)[0], reference.quantize_weight),
        ):
            for dtype in (torch.float32, torch.float64):
                blocks.assert_blocks(quantize(x.to(dtype)), quantize(x), f"{dtype} {narrow}")
    x = blocks.telling(torch.float32)[0]
    blocks.assert_blocks(reference.quantize_rows(x.double()), reference.quantize_rows(x), "float64")


def test_float64_beyond_float32() -> None:
    """Numbers that no block can have are infinite, not cut off."""
    x = torch.full((1, BLOCK), 1.0, dtype=torch.float64)
    x[0, 7] = 448 * 2.0**120
    assert reference.dequantize(reference.quantize_rows(x), torch.float64)[0, 7] == x[0, 7]
    x[0, 7] = -torch.nextafter(x[0, 7], x.new_tensor(torch.inf))
    assert reference.dequantize(reference.quantize_rows(x), torch.float64).isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_and_rows_that_lie_apart(rows: int) -> None:
    (x,) = draw(rows, torch.float32, "cpu", (rows, 2 * BLOCK))
    found = reference.quantize_rows(x)
    assert found.values.shape == (rows, 2 * BLOCK) and found.exponents.shape == (2, rows)
    assert reference.dequantize(found, torch.bfloat16).shape == x.shape
    for layout in LAYOUTS:
        blocks.assert_blocks(reference.quantize_rows(layout(x)), found, layout.__name__)
    empty = reference.quantize_weight(x[:0])
    assert empty.values.shape == (0, 2 * BLOCK) and empty.exponents.shape == (0, 2)


def test_no_gradient_passes() -> None:
    x = torch.ones(BLOCK, BLOCK, requires_grad=True)
    assert not any(part.requires_grad for part in (*reference.quantize_rows(x), *reference.quantize_weight(x)))


ROWS = Blocks(torch.zeros(3, 2 * BLOCK).to(VALUES), torch.zeros(2, 3, dtype=torch.int8))
SHARDS = Blocks(torch.zeros(2, 128, 256).to(VALUES), torch.zeros(2, 1, 2, dtype=torch.int8))
REFUSED: list[tuple[Callable, tuple, str]] = [
    (reference.quantize_rows, (torch.ones(3, 200),), r"x has 200 columns.* multiple of 128, such as 256"),
    (reference.quantize_rows, (torch.ones(2, 3, 128),), r"\(2, 3, 128\) torch.float32: give a matrix"),
    (reference.quantize_rows, (torch.ones(3, 128, dtype=torch.int32),), "torch.int32: give a matrix of torch.bfloat16"),
    (reference.quantize_weight, (torch.ones(100, 128),), "w has 100 rows.* such as 128"),
    (reference.quantize_weight_twice, (torch.ones(128, 130),), "quantize_weight_twice: w has 130 columns"),
    (reference.dequantize, (Blocks(ROWS.values, ROWS.exponents.t()), torch.float32), r"exponents is \(3, 2\)"),
    (reference.dequantize, (Blocks(ROWS.values.view(torch.int8), ROWS.exponents), torch.float32), "values is"),
    (reference.dequantize, (ROWS, torch.int8), "the result's dtype is torch.int8"),
    (reference.dequantize_weight, (ROWS, torch.float32), "values has 3 rows"),
    (reference.dequantize_shards, (SHARDS, torch.zeros(2, 128, 256, dtype=torch.int8)), "out is .* torch.int8"),
    (reference.dequantize_shards, (SHARDS, torch.zeros(1, 128, 256)), r"values is \(2, 128, 256\)"),
    (reference.dequantize_shards, (SHARDS, torch.zeros(2, 256, 128).mT), r"strides \(32768, 1, 128\): give three dims"),
    (reference.dequantize_shards, (Blocks(SHARDS[0], SHARDS[1][:1]), torch.zeros(2, 128, 256)), "exponents is"),
]


@pytest.mark.parametrize("function, arguments, message", REFUSED)
def test_refusals_say_what_to_give(function: Callable, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def by_logarithm(largest: Tensor) -> Tensor:
    """The exponent as one would write it."""
    exponents = (largest / 448).log2().ceil().clamp(-120, 120)
    return torch.where(largest.isfinite(), exponents, 127).to(torch.int8)


# by name: the function, and the edit of its source, or what stands in its place
MISTAKES: dict[str, tuple[str, Edit | Callable]] = {
    "the scale for its inverse": ("powers", replace(".mul_(sign)", "")),
    "the exponent by a logarithm": ("exponents_of", lambda source: ""),
    "at 448 already the next exponent": ("exponents_of", replace("> 3 <<", ">= 3 <<")),
    "no lowest exponent": ("exponents_of", replace(".clamp_(min=LOWEST)", "")),
    "an infinity is a number": ("exponents_of", replace("~largest.isfinite() |", "largest.isnan() |")),
    "a maximum that drops NaN": ("quantize_rows", replace(".abs().amax(2)", ".abs().nan_to_num(0, torch.inf).amax(2)")),
    "exponents by rows": ("quantize_rows", replace("exponents.t().contiguous()", "exponents.contiguous()")),
    "exponents in the order of rows": (
        "quantize_rows", replace("exponents.t().contiguous()", "exponents.view(exponents.shape[::-1])"),
    ),
    "a weight's exponents transposed": (
        "_quantize_weight", replace("contiguous(), exponents)", "contiguous(), exponents.t())"),
    ),
    "float64 rounded twice": ("to_e4m3", replace("(x if x.dtype == torch.float32 else rounded(x))", "x")),
    "ties away from zero": ("rounded", replace("- 1 + ((bits >> drop) & 1)", "")),
    "a small number loses its sign": (
        "rounded", replace("torch.copysign((x + shift).sub_(shift), x)", "(x + shift).sub_(shift)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, edit = MISTAKES[name]
    planted = by_logarithm if "logarithm" in name else edited(getattr(reference, function), edit)
    monkeypatch.setattr(reference, function, planted)
    for dtype in (torch.float32, torch.float64):
        try:
            blocks.check(reference, dtype)
        except AssertionError:
            return
    pytest.fail(f"{name}: nothing has noticed it")

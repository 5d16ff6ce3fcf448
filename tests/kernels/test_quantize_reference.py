"""Quantisation to blocks of e4m3 has the bytes of its definition in exact fractions, which knows one block and the
numbers in it: so neither their dtype nor what lies beside a block matters. Each planted mistake is caught."""

from collections.abc import Callable

import blocks
import pytest
import torch
from mutations import Edit, edited, replace
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
    with pytest.raises(AssertionError):
        for dtype in (torch.float32, torch.float64):
            blocks.check(reference, dtype)

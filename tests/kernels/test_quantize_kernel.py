"""Kernels that quantise to blocks of e4m3 give the bytes of their reference, and the numbers back. Each planted mistake
is caught."""

import re
from types import ModuleType
from unittest import mock

import blocks
import pytest
import torch
from gemms import in_interpreter
from mutations import Edit, interpreting, replace
from row_checks import FLOATS, LAYOUTS, draw, everywhere
from testing import assert_identical, poisoned_memory
from turns import in_turns

pytest.importorskip("triton")

from checks.compile import compiler
from checks.compile.cases import meta
from tpformer.kernels.quantize import kernel, reference
from tpformer.kernels.quantize.format import BLOCK, Blocks

OF_KERNEL = {**FLOATS, "reference": ()}


@everywhere("quantize", OF_KERNEL)
def test_bytes_are_those_of_the_definition(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    with poisoned_memory():
        blocks.check(module, dtype, device)


def check(module: ModuleType, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Rows, and the whole blocks of them as a weight, of normal numbers at many scales, a third of them ties."""
    (x,) = draw(rows, torch.float64, "cpu", (rows, columns))
    x *= torch.exp2(torch.arange(rows) % 23 - 12.0)[:, None]
    tie = torch.arange(columns) % 3 == 0
    _, power = torch.frexp(x[:, tie])
    x[:, tie] = torch.ldexp(2 * torch.floor(torch.ldexp(x[:, tie].abs(), 4 - power)) + 1, power - 5)
    x = x.to(dtype)
    with poisoned_memory():
        found = module.quantize_rows(x.to(device))
        back = module.dequantize(found, dtype)
    expected = reference.quantize_rows(x)
    blocks.assert_blocks(found, expected, f"({rows}, {columns}) {dtype}")
    assert_identical(back.cpu(), reference.dequantize(expected, dtype))
    whole = x[: rows - rows % BLOCK]
    with poisoned_memory():
        copies = module.quantize_weight_twice(whole.to(device))
        again = module.dequantize_weight(copies[1], dtype)
    for mine, theirs in zip(copies, reference.quantize_weight_twice(whole), strict=True):
        blocks.assert_blocks(mine, theirs, f"({len(whole)}, {columns}) {dtype} as a weight")
    assert_identical(again.cpu(), reference.dequantize_weight(copies[0], dtype).t().contiguous().cpu())


@everywhere("quantize", OF_KERNEL)
def test_bytes_are_those_of_the_reference(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for rows in (0, 1, 3, 33, 130):
        check(module, rows, 2 * BLOCK, dtype, device)


@everywhere("quantize", {**OF_KERNEL, "interpreter": (torch.float32,)})
def test_a_million_values(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """In the interpreter, which takes as long for a program of a few rows, by programs of many."""
    with mock.patch.object(module, "ROWS", module.ROWS if device == "cuda" else 512):
        check(module, 1025, 8 * BLOCK, dtype, device)


@everywhere("quantize", {**OF_KERNEL, "reference": (torch.float32,), "interpreter": (torch.float32,)})
def test_operands_that_lie_apart(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    (x,) = draw(0, dtype, device, (BLOCK, 2 * BLOCK))
    for name in ("quantize_rows", "quantize_weight"):
        found = getattr(module, name)(x)
        numbers = getattr(module, name.replace("quantize_rows", "dequantize").replace("quantize_w", "dequantize_w"))
        for layout in LAYOUTS:
            blocks.assert_blocks(getattr(module, name)(layout(x)), found, f"{name} {layout.__name__}")
        apart = Blocks(*(part.t().contiguous().t() for part in found))
        assert_identical(numbers(apart, dtype), numbers(found, dtype))
    shards = Blocks(*(part.cpu() for part in module.quantize_weight(x)))
    blocks.check_shards(module, shards, dtype, device, offset=5)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_compiled_weights_are_transposed_by_words() -> None:
    """Four bytes at a time: nothing of 8 bits has two layouts, or lies in shared memory. One instruction rounds two."""
    with compiler.compile_only(90, "quantize_weight_kernel") as found:
        kernel.quantize_weight_twice(meta(2 * BLOCK, BLOCK, dtype=torch.bfloat16))
    (code,) = found
    moved = re.findall(r"(?:tt\.trans|ttg\.convert_layout) .*: tensor<(\w+),", code.ttgir)
    assert moved == [f"{BLOCK // 4}x{BLOCK}xi32", f"{BLOCK}x{BLOCK // 4}xi32"]
    assert not re.search(r"\.shared\S*\.b8", code.ptx)
    assert code.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == BLOCK * BLOCK // (2 * 32 * kernel.WEIGHT_WARPS)


def test_a_gpu_without_e4m3_is_refused() -> None:
    class OnGpu:
        is_cuda, device = True, "cuda:0"

    def found(major: int, minor: int) -> None:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: (major, minor)),
            mock.patch.object(torch.cuda, "get_device_name", lambda device: "NVIDIA A100"),
        ):
            kernel.require_e4m3(OnGpu())  # type: ignore[arg-type]

    for capability in ((8, 0), (8, 6), (7, 5)):
        with pytest.raises(ValueError, match=rf"NVIDIA A100 is sm_{capability[0]}{capability[1]}, .* sm_89 or later"):
            found(*capability)
    for capability in ((8, 9), (9, 0), (10, 0)):
        found(*capability)
    kernel.require_e4m3(torch.empty(1))


FILE = "quantize/kernel.py"
BY_ROWS = replace("block.to(tl.int64) * m + rows", "rows.to(tl.int64) * width + block")
# by name: the function, and the edit of its source
MISTAKES: dict[str, tuple[str, Edit]] = {
    "the scale for its inverse": ("power", replace("127 - exponent", "127 + exponent")),
    "at 448 already the next exponent": ("exponent_of", replace("> 0x600000", ">= 0x600000")),
    "the next exponent too late": ("exponent_of", replace("> 0x600000", "> 0x600001")),
    "no lowest exponent": ("exponent_of", replace("exceeds, LOWEST)", "exceeds, -200)")),
    "an infinity is a number": ("exponent_of", replace(">= 0x7F800000", "> 0x7F800000")),
    "a maximum that drops NaN": ("magnitude_bits", replace("& 0x7FFFFFFF", "& tl.where(x == x, 0x7FFFFFFF, 0)")),
    "exponents by rows": ("quantize_rows_kernel", BY_ROWS),
    "exponents read by rows": ("dequantize_kernel", BY_ROWS),
    "all values of the first rank": ("dequantize_kernel", replace("values += matrix *", "values += 0 *")),
    "all exponents of the first rank": ("dequantize_kernel", replace("exponents += matrix *", "exponents += 0 *")),
    "all results the first rank's": ("dequantize_kernel", replace("x += matrix *", "x += 0 *")),
    "a weight's exponents transposed": (
        "quantize_weight_kernel",
        replace("row.to(tl.int64) * width + column", "column.to(tl.int64) * (n // BLOCK) + row"),
    ),
    "rows of a word exchanged": ("quantize_weight_kernel", replace("* (byte * byte)", "* (byte * byte * byte)")),
    "words that stay": ("quantize_weight_kernel", replace("tl.trans(words)", "tl.reshape(words, (BLOCK, WORDS))")),
    "the interpreter's own cast": ("to_e4m3", replace("if INTERPRETED:", "if not INTERPRETED:")),
    "ties up": ("to_e4m3", replace("+ 0x7FFFF + ((magnitude >> 20) & 1)", "+ 0x80000")),
    "small numbers cut off": ("to_e4m3", replace("tl.abs(x) + 16384.0", "tl.abs(x) - 0.0009 + 16384.0")),
    "NaN is a scale of one": ("power", replace("exponent == NOT_A_NUMBER", "exponent > NOT_A_NUMBER")),
}


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@in_interpreter(1)
def test_a_mistake_is_caught(name: str) -> None:
    with interpreting(FILE, *MISTAKES[name]), pytest.raises(AssertionError):
        blocks.check(kernel, torch.float32)

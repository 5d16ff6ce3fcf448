"""The GEMM of blocks of e4m3 equals its reference, and both equal the numbers that blocks stand for. Each planted
mistake is caught."""

from contextlib import nullcontext
from types import ModuleType

import blocks
import pytest
import torch
from gemms import TILE, in_interpreter
from mutations import Edit, interpreting, replace
from row_checks import FLOATS, draw, everywhere
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, Blocks
from tpformer.kernels.quantized_matmul import kernel, reference

SHAPES = ((1, 1, 1), (3, 2, 3), (40, 1, 2), (130, 2, 2))  # rows, blocks of N, blocks of K
WIDE = TILE._replace(m=64, n=64)  # in the interpreter a program of it takes as long as one of less


def drawn(rows: int, n: int, k: int) -> tuple[Blocks, Blocks, Tensor]:
    """(rows, a weight, a bias) with a scale of its own in each block, a block of zeros, and a row far from others."""
    a, w, bias = draw(rows + k, torch.float64, "cpu", (rows, k * BLOCK), (n * BLOCK, k * BLOCK), (n * BLOCK,))
    a *= torch.exp2((torch.arange(rows)[:, None] * 3 + torch.arange(k * BLOCK) // BLOCK * 5) % 11 - 8.0)
    w *= torch.exp2((torch.arange(n * BLOCK)[:, None] // BLOCK * 3 + torch.arange(k * BLOCK) // BLOCK * 7) % 13 - 10.0)
    a[0, :BLOCK] = 0
    a[-1, -1] = 300.0
    return quantize.quantize_rows(a), quantize.quantize_weight(w), bias


def check(module: ModuleType, rows: int, n: int, k: int, dtype: torch.dtype, device: str, **options) -> None:
    a, b, bias = drawn(rows, n, k)
    given = [Blocks(*(part.to(device) for part in each)) for each in (a, b)]
    left, right = blocks.numbers(Blocks(a.values, a.exponents.t()), 1), blocks.numbers(b, BLOCK)
    for added in (None, bias.to(dtype)):
        with poisoned_memory():
            found = module.quantized_matmul(*given, None if added is None else added.to(device), dtype=dtype, **options)
        oracle = left @ right.t() if added is None else left @ right.t() + added.double()
        kind = blocks.judged(dtype, device)
        plain = left.to(kind) @ right.to(kind).t()
        baseline = plain if added is None else plain + added.to(kind)
        assert_kernel_close(found.cpu().to(kind), oracle, baseline, f"({rows}, {n}, {k}) {dtype}")


@everywhere("quantized_matmul", {**FLOATS, "reference": (torch.bfloat16, torch.float32, torch.float64)})
def test_products_are_those_of_the_numbers(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        check(module, *shape, dtype, device, **({} if module is reference or device == "cuda" else {"tile": WIDE}))


def test_what_tensor_cores_keep_of_a_sum_is_right_on_a_gpu_alone() -> None:
    for rows, n, k in SHAPES[1:]:
        a, b, _ = drawn(rows, n, k)
        left, right = blocks.numbers(Blocks(a.values, a.exponents.t()), 1), blocks.numbers(b, BLOCK)
        found, oracle = blocks.sum_of_tensor_cores(a, b), left @ right.t()
        for device in ("cuda", "cpu"):
            kind = blocks.judged(torch.float32, device)
            given = found.to(kind), oracle, left.to(kind) @ right.to(kind).t(), f"({rows}, {n}, {k}) on {device}"
            with nullcontext() if device == "cuda" else pytest.raises(AssertionError, match="exceeds"):
                assert_kernel_close(*given)


@everywhere("quantized_matmul", {"interpreter": (torch.float32,), "gpu": (torch.bfloat16,)})
def test_what_is_not_a_number_stays_in_its_rows_and_columns(module: ModuleType, dtype: torch.dtype, device) -> None:
    x, w = torch.ones(5, 2 * BLOCK), torch.ones(2 * BLOCK, 2 * BLOCK)
    x[1, 3], x[3, 200], w[130, 7] = torch.nan, torch.inf, torch.nan
    given = quantize.quantize_rows(x), quantize.quantize_weight(w)
    found = module.quantized_matmul(*(Blocks(*(part.to(device) for part in each)) for each in given), dtype=dtype)
    expected = torch.full((5, 2 * BLOCK), 2.0 * BLOCK, dtype=dtype)
    expected[[1, 3]], expected[:, BLOCK:] = torch.nan, torch.nan
    assert torch.equal(found.cpu().nan_to_num(-1), expected.nan_to_num(-1))


OF_A_STEP: dict[str, Edit] = {
    "scales folded into the sum": replace(
        "result + tl.dot(left, right.T) * scale[:, None]", "(result + tl.dot(left, right.T)) * scale[:, None]"
    ),
    "no exponent of rows": replace("mask=inside", "mask=inside & (tl.program_id(0) < 0)"),
    "no exponent of the weight": replace("scale *= power(", "scale *= 0 * power("),
}
OF_THE_KERNEL: dict[str, Edit] = {
    "the rows' exponents of one block": replace("a_exponents + step * m + rows", "a_exponents + rows"),
    "exponents by rows": replace("a_exponents + step * m + rows", "a_exponents + rows * steps + step"),
    "the weight's exponents of one block": replace("b_blocks + step", "b_blocks"),
    "the first columns' exponents": replace("b_exponents + column // BLOCK * steps", "b_exponents + column * 0"),
    "a block less": replace("steps = k // BLOCK", "steps = tl.maximum(k // BLOCK - 1, 1)"),
}
MISTAKES = {name: ("add_scaled", edit) for name, edit in OF_A_STEP.items()}
MISTAKES |= {name: ("quantized_matmul_kernel", edit) for name, edit in OF_THE_KERNEL.items()}


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@in_interpreter(1)
def test_a_mistake_is_caught(name: str) -> None:
    with interpreting("quantized_matmul/kernel.py", *MISTAKES[name]):
        with pytest.raises(AssertionError):
            check(kernel, 3, 2, 3, torch.float32, "cpu", tile=WIDE)
            check(kernel, 40, 1, 2, torch.float32, "cpu", tile=WIDE)


def test_operands_that_do_not_fit_are_refused() -> None:
    a, b, bias = drawn(4, 2, 3)
    wrong = {
        "weight's values": (a, drawn(4, 2, 2)[1], None),
        "bias": (a, b, bias.float()[1:]),
        "exponents": (Blocks(a.values, a.exponents.t()), b, None),
    }
    for name, operands in wrong.items():
        with pytest.raises(ValueError, match=rf"quantized_matmul: .*{name}"):
            reference.quantized_matmul(*operands, dtype=torch.float32)
    with pytest.raises(ValueError, match="the bias"):
        reference.quantized_matmul(a, b, bias, dtype=torch.bfloat16)

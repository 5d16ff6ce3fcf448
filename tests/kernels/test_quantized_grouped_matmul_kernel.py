"""GEMMs of groups in blocks of e4m3 equal their reference, and both the numbers that blocks stand for; each planted
mistake is caught."""

from types import ModuleType

import blocks
import pytest
import torch
from gemms import in_interpreter
from mutations import Edit, interpreting, replace
from row_checks import FLOATS, draw, everywhere
from test_grouped_matmul_kernel import offsets_of
from test_quantized_matmul_kernel import WIDE
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, Blocks
from tpformer.kernels.quantized_grouped_matmul import kernel, reference

# rows of each group: several tiles and a remainder, none, one; all in one; one each; none at all
COUNTS = ((130, 0, 3, 1), (0, 5), (1,) * 3, (0, 0))
SIZES = (2, 3)  # blocks of N and of K
TOKENS = 7  # rows that an index takes from


def drawn(counts: tuple[int, ...], transposed: bool, indexed: bool) -> tuple[Blocks, Blocks, Tensor, Tensor | None]:
    """(rows, all groups' matrices, offsets, an index) with a scale of its own in each block."""
    (n, k), rows, groups = (size * BLOCK for size in SIZES), sum(counts), len(counts)
    index = torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    taken = TOKENS if indexed else rows
    shape = (groups * k, n) if transposed else (groups * n, k)
    a, w = draw(rows, torch.float64, "cpu", (taken, k), shape)
    a *= torch.exp2((torch.arange(taken)[:, None] * 3 + torch.arange(k) // BLOCK * 5) % 11 - 8.0)
    w *= torch.exp2((torch.arange(len(w))[:, None] // BLOCK * 3 + torch.arange(w.shape[1]) // BLOCK * 7) % 13 - 10.0)
    weights = quantize.quantize_weight_twice(w)[transposed]
    return quantize.quantize_rows(a), weights, offsets_of(counts), index if indexed else None


def check(
    module: ModuleType, counts: tuple[int, ...], transposed: bool, indexed: bool, dtype: torch.dtype, device: str,
    **options,
) -> None:  # fmt: skip
    a, weights, offsets, index = drawn(counts, transposed, indexed)
    given = [Blocks(*(part.to(device) for part in each)) for each in (a, weights)]
    places = offsets.to(device), None if index is None else index.to(device)
    with poisoned_memory():
        y = module.quantized_grouped_matmul(*given, *places, transposed=transposed, dtype=dtype, **options)
    left, right = blocks.numbers(Blocks(a.values, a.exponents.t()), 1), blocks.numbers(weights, BLOCK)
    left = left if index is None else left[index]
    matrices = right.chunk(len(counts), 1) if transposed else right.chunk(len(counts), 0)  # each (N, K)
    products = zip(left.split(list(counts)), matrices, strict=True)
    kind = blocks.judged(dtype, device)
    oracle, plain = (
        torch.cat([x.to(of) @ w.to(of).t() for x, w in pairs])
        for of, pairs in zip((torch.float64, kind), [[*products]] * 2, strict=True)
    )
    assert_kernel_close(y.cpu().to(kind), oracle, plain, f"{counts} {transposed=} {indexed=} {dtype}")


def check_forms(module: ModuleType, dtype: torch.dtype, device: str, **options) -> None:
    """Every form with the groups of most kinds, and one form with the others."""
    for number, counts in enumerate(COUNTS):
        for form in range(4) if number == 0 else (number,):
            check(module, counts, form % 2 == 1, form > 1, dtype, device, **options)


@everywhere("quantized_grouped_matmul", {**FLOATS, "reference": (torch.bfloat16, torch.float32, torch.float64)})
def test_products_are_those_of_the_numbers(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    interpreted = module is not reference and device == "cpu"
    check_forms(module, dtype, device, **({"tile": WIDE} if interpreted else {}))


@in_interpreter(1)
def test_descriptors_give_the_same() -> None:
    check(kernel, COUNTS[0], False, False, torch.float32, "cpu", tile=WIDE._replace(tma=True))
    check(kernel, COUNTS[0], True, True, torch.float32, "cpu", tile=WIDE._replace(tma=True))


MISTAKES: dict[str, Edit] = {
    "exponents of the rows' places": replace(
        "a_exponents + step * m + rows", "a_exponents + step * m + tl.arange(0, BLOCK_M)"
    ),
    "the rows' exponents of one block": replace("a_exponents + step * m + rows", "a_exponents + rows"),
    "the weight's exponents of one block": replace("blocks + step)", "blocks)"),
    "the first group's exponents": replace(
        "exponents + first // BLOCK * (width // BLOCK) + begin // BLOCK",
        "exponents + column // BLOCK * (width // BLOCK)",
    ),
    "the first group's matrix": replace("load_block(weights, first, begin + at,", "load_block(weights, column, at,"),
    "a block less": replace("in range(steps)", "in range(steps - 1)"),
}


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@in_interpreter(1)
def test_a_mistake_is_caught(name: str) -> None:
    with interpreting(
        "quantized_grouped_matmul/kernel.py", "multiply_group", MISTAKES[name]
    ), pytest.raises(AssertionError):  # fmt: skip
        check(kernel, (3, 0, 2), False, True, torch.float32, "cpu", tile=WIDE)
        check(kernel, (3, 0, 2), True, False, torch.float32, "cpu", tile=WIDE)


def test_operands_that_do_not_fit_are_refused() -> None:
    a, weights, offsets, _ = drawn((2, 3), False, False)
    other = drawn((2, 3), True, False)[1]
    for words, operands in {
        "the weights' values": (a, other, offsets),
        "offsets": (a, weights, offsets.long()),
        "offsets ascend": (a, weights, offsets - 1),
    }.items():
        match = "let them ascend" if words.endswith("ascend") else f"quantized_grouped_matmul: .*{words}"
        with pytest.raises(ValueError, match=match):
            reference.quantized_grouped_matmul(*operands, dtype=torch.float32)

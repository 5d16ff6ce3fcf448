"""quantized_matmul_reduce_scatter and quantized_matmul_all_reduce equal their references on processes and on virtual
ranks, with any inputs and finish. Each planted mistake is caught.

Protocol and sums are those of the kernels in 16 bits, which have tests of their own.
"""

from collections.abc import Sequence
from functools import partial

import gemms
import pytest
import torch
from mutations import Edit, interpreting, replace
from test_all_gather_quantized_matmul_kernel import scaled
from testing import fails_on_a_rank
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer.kernels.configurations import tile_names
from tpformer.kernels.matmul_all_reduce.kernel import quantized_matmul_all_reduce
from tpformer.kernels.matmul_all_reduce.reference import quantized_matmul_all_reduce_reference
from tpformer.kernels.matmul_reduce_scatter.kernel import quantized_matmul_reduce_scatter
from tpformer.kernels.matmul_reduce_scatter.reference import quantized_matmul_reduce_scatter_reference
from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, Blocks
from tpformer.kernels.quantized_matmul.reference import check_products

KERNEL = "matmul_reduce_scatter/kernel.py"
TILE = gemms.TILE._replace(n=128)  # in the interpreter a program of it takes as long as one of less
TMA_TILE = TILE._replace(tma=True)
SHAPES = ((1, 1, 1), (5, 1, 3), (17, 2, 2))  # rows, blocks of N, blocks of K


def quantised(x: dict[str, Tensor], inputs: int, whole: bool) -> tuple[list[Blocks], list[Blocks]]:
    """The blocks of rows "a", "a1", ... and of weights "w0", ..., the same in every dtype. whole: of the numbers as
    they are; else each block has a scale of its own."""
    rows, weights = [], []
    for i in range(inputs):
        a, w = x[f"a{i}" if i else "a"].double(), x[f"w{i}"].double()
        rows.append(quantize.quantize_rows(a if whole else scaled(a, 1)))
        weights.append(quantize.quantize_weight(w if whole else scaled(w, BLOCK)))
    return rows, weights


def reduction(
    launch, reference, inputs: int, parts: Sequence[str], rows_of_all: bool, whole: bool = False, **fields
) -> gemms.Gemm:
    """gemms.sum_of_products for blocks, of which each product has one more along K than that before."""

    def make(rank, world, rows, n, k):
        made = {"bias": (n * BLOCK,), "residual": (rows, n * BLOCK), "start": (rows,)}
        made = {name: made[name] for name in parts}
        for i in range(inputs):
            width = (k + i) * BLOCK
            made |= {f"a{i}" if i else "a": (world * rows if rows_of_all else rows, width), f"w{i}": (n * BLOCK, width)}
        return gemms.shapes(**made)

    def run(x, channel, tile):
        given = {"dtype": x["a"].dtype, "tile": tile}
        return [launch(*quantised(x, inputs, whole), channel, gemms.finish_of(x), **given)]

    def refer(xs):
        factors = zip(*(quantised(x, inputs, whole) for x in xs), strict=True)
        return [[y] for y in reference(*factors, [gemms.finish_of(x) for x in xs], dtype=xs[0]["a"].dtype)]

    return gemms.Gemm(make, run, refer, exact=whole, **fields)


def scatter(inputs: int, parts: Sequence[str] = (), whole: bool = False, **options) -> gemms.Gemm:
    launch = partial(quantized_matmul_reduce_scatter, **options)
    return reduction(launch, quantized_matmul_reduce_scatter_reference, inputs, parts, True, whole)


def all_reduce(inputs: int, one_shot: bool, parts: Sequence[str] = (), whole: bool = False) -> gemms.Gemm:
    """A shape's rows are all rows here, not those of a rank."""

    def reference(a, w, finishes, **given):
        return [quantized_matmul_all_reduce_reference(a, w, finishes[0], **given)] * len(a)

    launch = partial(quantized_matmul_all_reduce, one_shot=one_shot)
    return reduction(launch, reference, inputs, parts, False, whole, same=frozenset(parts))


@gemms.in_interpreter(2, *in_turns([4, 3, 1], first=1))
def test_on_processes() -> None:
    gemms.run_on_processes(scatter(1, gemms.FINISH), TILE, sizes=SHAPES)
    gemms.run_on_processes(scatter(3), TMA_TILE, sizes=SHAPES[1:2])
    gemms.run_on_processes(scatter(1, partial=torch.float32), TILE, torch.float16, SHAPES[1:])
    gemms.run_on_processes(all_reduce(1, False, gemms.FINISH), TILE, sizes=(*SHAPES[:2], (15, 2, 2)))
    gemms.run_on_processes(all_reduce(2, True), TMA_TILE, sizes=SHAPES[1:2])


@gemms.in_interpreter(2, *in_turns([3], first=2))
def test_whole_numbers_to_the_bit() -> None:
    """Of zeros and ones, as the last operation on processes is."""
    for gemm in (scatter(2, whole=True), all_reduce(2, False, whole=True), all_reduce(1, True, whole=True)):
        gemms.run_on_processes(gemm, TILE, sizes=SHAPES[1:2])


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(scatter(2, gemms.FINISH), 3, TILE, torch.float32, SHAPES[1:2], repeat=3)
    gemms.run_on_virtual_ranks(scatter(1), 2, TMA_TILE, torch.float32, SHAPES[2:])
    gemms.run_on_virtual_ranks(all_reduce(2, False, gemms.FINISH), 2, TILE, torch.float32, SHAPES[2:], repeat=2)
    gemms.run_on_virtual_ranks(all_reduce(1, True), 3, TILE, torch.float32, SHAPES[1:2])


test_virtual_ranks_on_gpu = gemms.on_gpu(
    scatter(1, gemms.FINISH), scatter(3), scatter(1, partial=torch.float32), all_reduce(3, False, gemms.FINISH),
    all_reduce(1, True), sizes=((128, 2, 4), (200, 3, 2), (1, 1, 1)), tiles=tile_names(90, 1),
)  # fmt: skip


OF_PRODUCTS: dict[str, Edit] = {
    "the rows' exponents of one block": replace("of_rows + step * a_rows", "of_rows"),
    "exponents by rows": replace("+ a_row + rows\n", "+ (a_row + rows) * steps\n"),
    "the first rank's rows' exponents": replace("a_exponents + a_row + rows", "a_exponents + rows"),
    "the weight's exponents of one block": replace("of_weight + step", "of_weight"),
    "the first columns' exponents": replace("(first + n) // BLOCK * steps", "first // BLOCK * steps"),
    "the first weight's exponents": replace("problem.pairs[i].b_exponents", "problem.pairs[0].b_exponents"),
    "a block less": replace("for step in range(steps)", "for step in range(steps - 1)"),
    "the first product alone": replace("static_range(3)", "static_range(1)"),
    "values of the first rank": replace("lefts[i], a_row + m,", "lefts[i], m,"),
}
MISTAKES = {name: ("multiply_blocks", edit) for name, edit in OF_PRODUCTS.items()}
MISTAKES["a rank's rows for everyone's"] = (
    "push_products_of_blocks", replace("tl.num_programs(1) * FORM.world * rows", "rows")
)  # fmt: skip
OF_VIRTUAL_RANKS = {
    "the first rank's weight": ("multiply_blocks", replace("virtual * problem.n,", "virtual * 0,")),
    "one rank's rows for all ranks'": (
        "push_products_of_blocks", replace("tl.num_programs(1) * FORM.world", "FORM.world")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@gemms.in_interpreter(2)
def test_a_mistake_is_caught(name: str) -> None:
    """By a rank, after one operation: a rank that went on would wait for one that has failed."""
    with interpreting(KERNEL, *MISTAKES[name]):
        assert fails_on_a_rank(lambda: gemms.run_on_processes(scatter(2), TILE, sizes=((17, 2, 3),)))


@pytest.mark.parametrize("name", in_turns(OF_VIRTUAL_RANKS))
@gemms.in_interpreter(1)
def test_a_mistake_with_virtual_ranks_is_caught(name: str) -> None:
    with interpreting(KERNEL, *OF_VIRTUAL_RANKS[name]), pytest.raises(AssertionError):
        gemms.run_on_virtual_ranks(scatter(1), 2, TILE, torch.float32, SHAPES[1:2])


def test_operands_that_do_not_fit_are_refused() -> None:
    rows, weight = quantize.quantize_rows(torch.ones(8, 256)), quantize.quantize_weight(torch.ones(128, 256))
    narrow = quantize.quantize_weight(torch.ones(128, 128))
    for words, given in {
        "2 inputs and 1 weights": ([rows, rows], [weight], torch.float32, 1, 2),
        "an input is": ([rows], [weight], torch.float32, 1, 3),
        "an input is .*: give .4, 256.": (
            [quantize.quantize_rows(torch.ones(4, 256)), rows], [weight] * 2, torch.float32, 1, 2
        ),
        "its weight is": ([rows], [narrow], torch.float32, 1, 2),
        "the result's dtype is": ([rows], [weight], torch.int32, 1, 2),
        "its weight is .*: give .0, 256.": ([rows], [weight], torch.float32, 2, 2),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            check_products("a reduction", rows.values, *given)

"""No kernel touches anything outside of its operands' elements, whatever remainder a shape leaves; without any one of
its masks, or with a bound that is off by one, it does, or its result is wrong.

`make execute` names this file and runs a sample; `--proof` runs all. Masks are the same in compiled code and in the
interpreter, which is faster here because it compiles nothing.

Why these shapes stand for all: a mask compares an index with the end of one direction, so what a program may touch
there is a number of its tile's elements, from none to all. It depends on the size only by how many whole tiles lie
before. Hence one size for each remainder, with and without a whole tile before it, gives all that any size gives. A
mask of two directions is the conjunction of two such masks, so one direction is varied at a time. That the size of a
tile, here a few elements, is a parameter like any other is assumed; `make compile-check` has the tiles that ship.
"""

import pytest
from mask_mutants import Mutant, all_mutants
from masks import CASES, try_mutants, verdict
from pool import WorkerPool
from turns import in_turns

# the cases that reach a file's masks, fastest first
REACH = {
    "activation/kernel.py": ["activation", "results in blocks"],
    "all_gather_grouped_matmul/kernel.py": ["all-gather groups", "all-gather blocks"],
    "all_gather_matmul/kernel.py": ["gather", "all-gather matmul"], "combine/kernel.py": ["combine"],
    "cross_entropy/kernel.py": ["targets outside", "cross entropy"],
    "dropout/kernel.py": ["dropout", "results in blocks"],
    "grouped_matmul/kernel.py": ["groups"], "launch.py": ["matmul by descriptors"],
    "matmul_all_reduce/kernel.py": ["all-reduce", "reductions of blocks"],
    "matmul_reduce_scatter/kernel.py": ["reduce-scatter", "reductions of blocks"],
    "norm/kernel.py": ["norm", "results in blocks"], "pack/kernel.py": ["pack"], "philox/kernel.py": ["dropout"],
    "quantize/kernel.py": ["quantize", "results in blocks"],
    "all_gather_quantized_matmul/kernel.py": ["all-gather blocks"],
    "quantized_grouped_matmul/kernel.py": ["quantized groups"], "quantized_matmul/kernel.py": ["quantized matmul"],
    "rope/kernel.py": ["rope"], "route/kernel.py": ["route"], "rows.py": ["dropout", "norm"],
    "tile.py": ["matmul", "reduce-scatter", "all-gather matmul", "all-reduce"],
    "update/kernel.py": ["update"], "weighted_activation/kernel.py": ["weighted activation"],
}  # fmt: skip

WHOLE = "a whole block may take the path with a mask, too: it is slower, and the same"
ROWS = "the rows of the last share that do not exist are masked: a step more is done in vain"
TURN = "which pieces are pushed before the wait is a matter of time, and pieces beyond the shard are masked"
BLOCKS = "columns of blocks of e4m3 are multiples of 128, which a tile divides: no mask of theirs leaves anything out"
PACKED = "packed memory has room for whole tiles: rows that do not exist are sent, read and added in vain"
WEIGHTS, REST = "weights, first, begin + at, (virtual + 1) * height", "width, BLOCK_N, BLOCK, TILE.tma)"
EQUIVALENT = {
    "tile.py store_packed: tl.store(target + offsets, block.to(target.dtype.element_ty), mask=mask)"
    " -> tl.store(target + offsets, block.to(target.dtype.element_ty))": PACKED,
    "tile.py load_packed: tl.load(source + offsets, mask=mask, other=None if rows is None else 0.0)"
    " -> tl.load(source + offsets)": PACKED,
    **{
        f"tile.py {function}: tl.arange(0, ROWS) < rows -> tl.arange(0, ROWS) < rows + 1": PACKED
        for function in ("store_packed", "load_packed")
    },
    "activation/kernel.py activation_forward_kernel: first + BLOCK <= n -> first + BLOCK <= n - 1": WHOLE,
    "activation/kernel.py activation_backward_kernel: first + BLOCK <= n -> first + BLOCK <= n - 1": WHOLE,
    "update/kernel.py adamw_kernel: rest >= BLOCK -> rest >= BLOCK + 1": WHOLE,
    "update/kernel.py sgd_kernel: rest >= BLOCK -> rest >= BLOCK + 1": WHOLE,
    "pack/kernel.py pack_kernel: rest >= GROUP -> rest >= GROUP + 1": WHOLE,
    "pack/kernel.py unpack_kernel: rest >= PART -> rest >= PART + 1": WHOLE,
    "quantize/kernel.py store_blocks: columns < n -> columns < n - 1":
        "the first columns of blocks of e4m3 are compared, and they and n are multiples of 128",
    "matmul_all_reduce/kernel.py matmul_all_reduce_kernel: tl.minimum(rows, m - owner * rows)"
    " -> tl.minimum(m - owner * rows, m - owner * rows)":
        "the last tile of a chunk then multiplies rows of the next one, too, which no rank adds or stores",
    "all_gather_matmul/kernel.py push_rows: tl.minimum(turn, end) -> tl.minimum(end, end)": TURN,
    "all_gather_matmul/kernel.py push_rows: tl.minimum(turn, end) -> tl.minimum(turn, turn)": TURN,
    "all_gather_grouped_matmul/kernel.py expert_tiles:"
    " load_rows(source, rows, inside, at, columns, a_stride, BLOCK_K)"
    " -> load_rows(source, rows, inside, at, columns + 1, a_stride, BLOCK_K)":
        "rows of a shard and of a slot are padded by zeros to a multiple of a block's four columns",
    "matmul_reduce_scatter/kernel.py matmul_reduce_scatter_kernel: tl.minimum(rows - first_row, BLOCK_M)"
    " -> tl.minimum(BLOCK_M, BLOCK_M)": PACKED,
    "cross_entropy/kernel.py slice_statistics_kernel: whole < valid -> whole < valid + 1":
        "a last block without valid columns adds nothing to any statistic",
    "route/kernel.py route_forward_kernel: POLICY.top_groups < POLICY.groups -> POLICY.top_groups < POLICY.groups + 1":
        "experts whose groups are all allowed are chosen in the way of those that are not: it is slower, and the same",
    **{
        f"quantized_matmul/kernel.py quantized_matmul_kernel: load_block({before}, {rows}, {tile}, BLOCK, TILE.tma)"
        f" -> load_block({before}, {other}, {tile}, BLOCK, TILE.tma)": BLOCKS
        for before, rows, other, tile in (
            ("b, column, step * BLOCK", "n, k, k", "n + 1, k, k", "BLOCK_N"),
            ("b, column, step * BLOCK", "n, k, k", "n, k + 1, k", "BLOCK_N"),
            ("a, row, step * BLOCK", "m, k, k", "m, k + 1, k", "BLOCK_M"),
        )
    },
    **{
        f"matmul_reduce_scatter/kernel.py multiply_blocks: load_block({before}, {ends}, {tile}, BLOCK, TILE.tma)"
        f" -> load_block({before}, {other}, {tile}, BLOCK, TILE.tma)": BLOCKS
        for before, ends, other, tile in (
            ("rights[i], first + n, at", "first + problem.n, k, k", "first + problem.n + 1, k, k", "BLOCK_N"),
            ("rights[i], first + n, at", "first + problem.n, k, k", "first + problem.n, k + 1, k", "BLOCK_N"),
            ("lefts[i], a_row + m, at", "a_row + m_end, k, k", "a_row + m_end, k + 1, k", "BLOCK_M"),
        )
    },
    **{
        f"quantized_grouped_matmul/kernel.py multiply_group: {before} -> {other}": BLOCKS
        for before, other in (
            (f"load_block({WEIGHTS}, width, {REST}", f"load_block({WEIGHTS} + 1, width, {REST}"),
            (f"load_block({WEIGHTS}, width, {REST}", f"load_block({WEIGHTS}, width + 1, {REST}"),
            ("load_rows(a, rows, inside, at, k, k, BLOCK)", "load_rows(a, rows, inside, at, k + 1, k, BLOCK)"),
        )
    },
    **{
        f"{place}_kernel: tl.minimum(first + share, m) -> tl.minimum(first + share, first + share)": ROWS
        for place in ("dropout/kernel.py finish_backward", "norm/kernel.py norm_backward",
                      "norm/kernel.py norm_weight_gradient")
    },
}  # fmt: skip


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.proof, id="all"), pytest.param(6, id="some")])
@pytest.mark.parametrize("case", CASES)
def test_accesses_at_remainders(interpreted: WorkerPool, case: str, step: int) -> None:
    assert interpreted(1).run(verdict, case, slice(0, None, step)) == [""]


def survivors(pool: WorkerPool, file: str, mutants: list[Mutant]) -> set[str]:
    """The names of those that no case catches."""
    (verdicts,) = pool(1).run(try_mutants, mutants, REACH[file])
    return {mutant.name for mutant, found in zip(mutants, verdicts, strict=True) if not found}


@pytest.mark.parametrize("file", in_turns(REACH, proof=False))
def test_mutants_of_masks(interpreted: WorkerPool, file: str) -> None:
    """Of those that are not listed: the first of each function that loses a mask, and each 16-th of all."""
    own = [mutant for mutant in all_mutants() if mutant.file == file and mutant.name not in EQUIVALENT]
    lost = {mutant.function: mutant for mutant in reversed(own) if mutant.kind == "mask"}.values()
    tried = [mutant for number, mutant in enumerate(own) if mutant in lost or number % 16 == 0]
    assert tried and not survivors(interpreted, file, tried)


@pytest.mark.proof
@pytest.mark.parametrize("part", range(4))  # a worker gives up after some minutes
@pytest.mark.parametrize("file", REACH)
def test_every_mutant_of_a_mask(interpreted: WorkerPool, file: str, part: int) -> None:
    own = [mutant for mutant in all_mutants() if mutant.file == file][part::4]
    assert survivors(interpreted, file, own) == EQUIVALENT.keys() & {mutant.name for mutant in own}


def test_every_file_with_masks_has_mutants() -> None:
    mutants = all_mutants()
    assert {mutant.file for mutant in mutants} == REACH.keys()
    assert EQUIVALENT.keys() <= {mutant.name for mutant in mutants}

"""Runs every kernel with masks in Triton's interpreter, with tiles of a few elements, over shapes that leave every
remainder.

Belongs here: the shapes, and how tiles are made small. What is right is what tests/kernels says, and that
no access is outside of the operands (accesses.py). Workers import it with the interpreter on.
"""

import contextlib
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import execution
import gemms
import row_checks
import test_activation_kernel as activations
import test_all_gather_grouped_matmul_kernel as experts
import test_all_gather_matmul_kernel as gathers
import test_all_gather_quantized_matmul_kernel as quantized_gathers
import test_combine_kernel as combinations
import test_cross_entropy_kernel as losses
import test_dropout_kernel as dropouts
import test_grouped_matmul_kernel as groups
import test_matmul_all_reduce_kernel as all_reduces
import test_matmul_kernel as matmuls
import test_matmul_reduce_scatter_kernel as scatters
import test_norm_kernel as norms
import test_pack_kernel as packs
import test_quantize_kernel as quantizing
import test_quantized_grouped_matmul_kernel as quantized_grouped
import test_quantized_matmul_kernel as quantized_products
import test_quantized_reductions as quantized_reductions
import test_results_in_blocks as in_blocks
import test_rope_kernel as ropes
import test_route_kernel as routes
import test_update_kernel as updates
import test_weighted_activation_kernel as weighted
import torch
import triton
import triton.language as tl
from accesses import Watch, storage_of, watching
from channels import virtual_channel
from mask_mutants import Mutant
from mutations import interpreting
from testing import poisoned_memory

from tpformer.kernels import rows as row_kernels
from tpformer.kernels.finish import Finish
from tpformer.kernels.launch import Tile
from tpformer.kernels.pack import reference
from tpformer.kernels.pack.format import GROUP
from tpformer.kernels.route.reference import Policy

TILE = Tile(4, 4, 4, 1, 1, False)
WIDE_TILE = Tile(4, 8, 4, 1, 1, True)
DEEP_TILE = Tile(4, 4, 8, 1, 1, False)  # two times 16 bytes, up to a multiple of which kernels of groups read rows
SHAPES_OF_MUTANTS = 3  # so many of a case's first shapes; they are chosen so that mutants show
LIMIT = 4  # polls: a flag is there at once, or never
FLOAT = torch.float32

Shape = tuple[int, ...]


def kernel(name: str) -> ModuleType:
    """The module of an operation's kernel."""
    return importlib.import_module(f"tpformer.kernels.{name}.kernel")


def every_remainder(*directions: int) -> Iterator[Shape]:
    """Vary one direction after the other over one tile and another that is partial; the others leave a remainder."""
    for number, tile in enumerate(directions):
        for size in range(1, 2 * tile + 2):
            yield tuple(size if i == number else 2 * other - 1 for i, other in enumerate(directions))


def activation(shape: Shape, watch: Watch) -> None:
    for gated in (False, True):
        activations.check(kernel("activation"), "silu", gated, *activations.draw(shape, FLOAT))


def norm(shape: Shape, watch: Watch) -> None:
    """Rows in one tile, and in several."""
    x, dy, dresidual = row_checks.draw(shape[1], FLOAT, "cpu", *[shape] * 3)
    for kind, widest in itertools.product(norms.KINDS, (16, 4)):
        weights = row_checks.draw_norm(shape[1], shape[1], kind, FLOAT)
        row_checks.check_norm(kernel("norm"), x, weights, dy, dresidual, widest=widest)
        finish = Finish(weights.weight, row_checks.draw_dropout(*shape, 0.4), dresidual, weights)
        row_checks.check_finish_norm(kernel("norm"), x, finish, dy, dresidual, widest=widest)


def rope(shape: Shape, watch: Watch) -> None:
    """The table ends with the last position that is used."""
    tokens, half = shape
    for length in itertools.count(2):  # which positions are drawn depends on it
        with mock.patch.object(ropes, "LENGTH", length):
            if ropes.make(tokens, 1, 2, tokens)[2].max() == length - 1:
                return ropes.check(kernel("rope"), (tokens, 3, 2, 2 * half), FLOAT)


def cross_entropy(shape: Shape, watch: Watch) -> None:
    """Slices of `columns` each, the last of which has `padding` columns that hold nothing."""
    tokens, columns, padding = shape
    vocab = max(2, 2 * columns - padding)  # with one entry gradients are zero, and no error is allowed
    for terms in losses.TERMS[:2]:
        case = losses.draw(columns, tokens, vocab, 2 * columns - vocab, FLOAT)
        losses.check(kernel("cross_entropy"), case, columns, vocab, terms)


def strange_targets(shape: Shape, watch: Watch) -> None:
    losses.outside(kernel("cross_entropy"))
    losses.infinite_logits(kernel("cross_entropy"))
    # an ignored row is not read for its gradient, which with these numbers would not be 0
    infinite = torch.full((1, 8), torch.inf)
    loss, gradient = losses.in_slices(kernel("cross_entropy"), infinite, torch.tensor([-100]), None, 8, 8)
    assert loss.tolist() == [0] and bool((gradient == 0).all())


def pack(shape: Shape, watch: Watch) -> None:
    """Values into their packed form and back, with escapes up to more than there are slots; rows read in that form."""
    (numel,), module = shape, kernel("pack")
    exponents = 100 + torch.randint(18, (numel,), generator=torch.Generator().manual_seed(numel))
    for offset in (18, 12):
        x = packs.values(100 + exponents % offset)
        expected, counts = reference.pack(x)
        with poisoned_memory():
            packed, own_counts = module.pack(x)
            back = module.unpack(packed)
        assert torch.equal(packed.buffer, expected.buffer) and torch.equal(own_counts, counts)
        assert packs.same_bits(back, reference.unpack(expected))
    # a row that fills a group, so that nothing lies behind it
    rows, n = (1, GROUP) if numel == 2 * GROUP else (1 + numel % 4, 8 * (1 + numel % 3))
    (dy,) = row_checks.draw(n, torch.bfloat16, "cpu", (rows, n))
    x = packs.values(100 + torch.arange(rows * n) % 12).view(rows, n)
    given, found = (module.pack(x)[0], x), []
    if n < GROUP:  # or there would be thousands of programs
        found += [kernel("activation").activation_backward(dy.clone(), each, "relu2") for each in given]
    weights = row_checks.draw_norm(n, n, "layernorm", FLOAT)
    statistics = x.float().mean(1, keepdim=True), torch.ones(rows, 1)
    found += [kernel("norm").norm_backward(dy, each, statistics, weights, widest=GROUP) for each in given]
    for packed, plain in (found[:2], found[-2:]):
        assert all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True) if a is not None)


def route(shape: Shape, watch: Watch) -> None:
    """Any number of experts, and three groups of so many."""
    tokens, experts = shape
    routes.check(kernel("route"), tokens, experts, Policy(min(3, experts), normalised=False), FLOAT)
    routes.check(kernel("route"), tokens, experts, Policy(experts, "sigmoid"), FLOAT)
    groups = Policy(min(3, experts), "sigmoid", groups=3, top_groups=2)
    routes.check(kernel("route"), tokens, 3 * experts, groups, FLOAT)


def update(shape: Shape, watch: Watch) -> None:
    """Several tensors, of which the last one ends where its memory does."""
    for name in ("adamw", "nesterov"):
        sizes = (shape, (3,), shape)
        updates.check(
            updates.VARIANTS[name], (FLOAT, torch.float16), torch.float16, sizes=sizes,
            reach=lambda tensors: watch.shared.__setitem__(slice(None), [*tensors]),
        )  # fmt: skip


def matmul(shape: Shape, watch: Watch, tile: Tile = TILE) -> None:
    with mock.patch.object(matmuls, "ACTIVATIONS", ["silu"]):
        matmuls.layouts(*shape, FLOAT, "cpu", tile)
        matmuls.epilogues(*shape, FLOAT, "cpu", tile)


def grouped_matmul(shape: Shape, watch: Watch) -> None:
    """The last group, which ends where the memory ends, has one row, then as many as the shape has."""
    rows, n, k = shape
    groups.products(kernel("grouped_matmul"), (rows % 3, rows, 1), n, k, FLOAT, "cpu", DEEP_TILE)
    for counts in ((rows % 3, rows, 1), (1, rows)):
        groups.gradients(kernel("grouped_matmul"), counts, n, k, FLOAT, "cpu", DEEP_TILE)


def quantized_groups(shape: Shape, watch: Watch) -> None:
    """As grouped_matmul: rows side by side, and by an index, which ends where its memory does."""
    tile = quantized_products.WIDE._replace(m=4)
    for form in (False, False), (True, True):
        counts = shape[0] % 3, shape[0], 1
        quantized_grouped.check(kernel("quantized_grouped_matmul"), counts, *form, FLOAT, "cpu", tile=tile)


def on_ranks(
    gemm: gemms.Gemm, world: int, shape: Shape, watch: Watch, flags: int = gemms.WRITER_FLAGS, tile: Tile = TILE
) -> None:
    """Run a communicating GEMM on the virtual ranks of a group. flags: of a writer, that the launcher asks for. No
    others may be set: in a channel without them they are those of the next writer."""
    made = []

    def channel(*sizes: int, **options: Any):
        made.append(virtual_channel(*sizes, **options, limit=LIMIT))
        watch.shared[:] = [storage_of(made[0].slots[0])]
        return made[0]

    with mock.patch.object(gemms, "virtual_channel", channel):
        gemms.run_on_virtual_ranks(gemm, world, tile, FLOAT, [shape])
    words = storage_of(made[0].slots[0]).view(torch.int32)[-world * world * gemms.WRITER_FLAGS :]
    assert (words.view(-1, gemms.WRITER_FLAGS)[:, flags:] == gemms.BEFORE_WRAP).all(), "flags beyond those asked"


def all_gather_matmul(shape: Shape, watch: Watch) -> None:
    on_ranks(gathers.linear(2, "silu"), 2, shape, watch)
    on_ranks(gathers.derivative("silu", gated=True), 2, shape, watch)


def all_gather_quantized_matmul(shape: Shape, watch: Watch) -> None:
    tile = quantized_products.WIDE._replace(m=4)
    on_ranks(quantized_gathers.linear(2), 2, (shape[0], 1, 2), watch, tile=tile)
    on_ranks(quantized_gathers.derivative("silu", gated=True), 2, (shape[0], 1, 1), watch, tile=tile)
    on_ranks(experts.grouped_blocks(), 2, (shape[0], 1, 2), watch, tile=tile)
    on_ranks(experts.grouped_blocks(True, "own"), 2, (shape[0], 1, 1), watch, tile=tile)


def all_gather_grouped_matmul(shape: Shape, watch: Watch) -> None:
    on_ranks(experts.grouped(), 2, shape, watch)
    on_ranks(experts.grouped(True, "own"), 2, shape, watch)
    second_of_two(kernel("all_gather_grouped_matmul").all_gather_grouped_matmul, shape[0], watch)


def second_of_two(launcher: Callable, rows: int, watch: Watch) -> None:
    """A launch of one rank alone, whose shard begins at a token that is not 0, and whose peer has sent its rows."""
    channel, tokens = execution.group(2, 1 << 12, 1, LIMIT)[1], torch.arange(2 * rows, dtype=torch.int32)
    watch.shared[:] = [storage_of(channel.slots[0])]
    channel.slot(1, 4, torch.empty(0))[:rows] = 1.0
    counts = torch.tensor([[rows], [rows]], dtype=torch.int32)
    y = launcher(torch.full((rows, 4), 2.0), torch.ones(1, 3, 4), channel, counts, tokens, tile=TILE)
    assert torch.equal(y, torch.tensor([4.0, 8.0]).repeat_interleave(rows)[:, None].expand(-1, 3))


def gather(shape: Shape, watch: Watch) -> None:
    """A rank's own shard, put into a slot that it fills, and copied out of one that ends where its memory ends."""
    shard = torch.arange(12.0 * shape[0]).view(3, -1)
    channel = virtual_channel(1, shard.numel() * FLOAT.itemsize, 16, limit=LIMIT)
    watch.shared[:] = [storage_of(channel.slots[0])]
    channel.slots[1].zero_()  # it lies behind slot 0
    kernel("all_gather_matmul").await_gathered(channel, shard, push=True)
    assert not channel.error.any() and not channel.slots[1].any()
    watch.shared.clear()
    apart = replace(channel, slots=tuple(slot.clone() for slot in channel.slots))
    with poisoned_memory():
        copy = kernel("all_gather_matmul").gathered_copy(apart, shard)
    assert torch.equal(copy, shard)


def matmul_reduce_scatter(shape: Shape, watch: Watch) -> None:
    on_ranks(scatters.gemm(2, gemms.FINISH), 2, shape, watch)
    on_ranks(scatters.gemm(1, transposed=True), 2, shape, watch)


def matmul_all_reduce(shape: Shape, watch: Watch) -> None:
    for one_shot in (True, False):
        space = kernel("matmul_all_reduce").matmul_all_reduce_space(*shape[:2], 3, FLOAT, FLOAT, TILE, one_shot)
        on_ranks(all_reduces.gemm(1, True, one_shot), 3, shape, watch, space[1])


def reductions_of_blocks(shape: Shape, watch: Watch) -> None:
    tile = quantized_products.WIDE._replace(m=4)
    on_ranks(quantized_reductions.scatter(2), 2, (shape[0], 1, 1), watch, tile=tile)
    for one_shot in (True, False):
        on_ranks(quantized_reductions.all_reduce(1, one_shot), 3, (shape[0], 1, 2), watch, tile=tile)


# the check, and the shapes: those of mutants, then those that leave every remainder
CASES: dict[str, tuple[Callable[[Shape, Watch], object], list[Shape]]] = {
    "activation": (activation, [(13,), (15,), *[(n,) for n in range(1, 18)]]),
    "norm": (norm, [(3, 7), (5, 3), *every_remainder(2, 4)]),
    "dropout": (lambda shape, watch: dropouts.check_finish(kernel("dropout"), *shape, FLOAT),
        [(3, 7), (5, 3), (3, 8), *every_remainder(2, 4)]),
    "rope": (rope, [(3, 3), *every_remainder(4, 4)]),
    "cross entropy": (cross_entropy, [(3, 13, 3), (13, 3, 2), (1, 17, 5), *every_remainder(4, 8, 8)]),
    "weighted activation": (
        lambda shape, watch: weighted.check(kernel("weighted_activation"), "silu", *weighted.draw(*shape, FLOAT)),
        [(3, 7), (5, 3), *every_remainder(2, 4)]),
    "combine": (
        lambda shape, watch: combinations.check(kernel("combine"), *combinations.draw(shape[0], 3, shape[1], FLOAT)),
        [(3, 7), (5, 3), *every_remainder(2, 4)]),
    "pack": (pack, [(GROUP - 1,), (GROUP + 3,), (2 * GROUP,), (5,), (50,), (4097,)]),
    "quantize": (lambda shape, watch: quantizing.check(kernel("quantize"), *shape, 2 * quantizing.BLOCK, FLOAT),
        [(3,), (5,), *[(n,) for n in (1, 2, 4, 130)]]),
    "results in blocks": (
        lambda shape, watch: in_blocks.check_small(*map(kernel, ("activation", "norm", "dropout")), *shape),
        [(3,), (5,), *[(n,) for n in (1, 2, 4)]]),
    "quantized matmul": (
        lambda shape, watch: quantized_products.check(
            kernel("quantized_matmul"), *shape, 1, 2, FLOAT, "cpu", tile=quantized_products.WIDE._replace(m=4)
        ),
        [(3,), (5,), *[(n,) for n in range(1, 10)]]),
    "quantized groups": (quantized_groups, [(3,), (5,), *[(n,) for n in range(1, 10)]]),
    "route": (route, [(3, 5), (5, 3), (3, 1), *every_remainder(2, 4)]),
    "update": (update, [(13,), (15,), *[(n,) for n in range(1, 18)]]),
    "targets outside": (strange_targets, [()]),
    "matmul": (matmul, [(10, 7, 5), (10, 9, 5), *every_remainder(4, 4, 4)]),
    "matmul by descriptors": (partial(matmul, tile=WIDE_TILE), [(6, 12, 4), *every_remainder(4, 8, 4)]),
    "groups": (grouped_matmul, [(7, 7, 5), (8, 9, 5), (10, 5, 4), *every_remainder(4, 4, 8)]),
    "all-gather matmul": (all_gather_matmul, [(5, 6, 8), (5, 6, 7), *every_remainder(4, 4, 4)]),
    "all-gather groups": (all_gather_grouped_matmul, [(5, 6, 8), (13, 6, 7), *every_remainder(4, 4, 4)]),
    "all-gather blocks": (all_gather_quantized_matmul, [(3,), (5,), *[(n,) for n in range(1, 10)]]),
    "gather": (gather, [(5,), *[(n,) for n in range(1, 9)]]),
    "reduce-scatter": (matmul_reduce_scatter, [(11, 6, 7), *every_remainder(4, 4, 4)]),
    "all-reduce": (matmul_all_reduce, [(13, 6, 7), *every_remainder(4, 4, 4)]),
    "reductions of blocks": (reductions_of_blocks, [(13,), (7,), *[(n,) for n in range(1, 10)]]),
}  # fmt: skip


def several_shares(m: int, rows: int, device: Any, warps: int, programs: None, blocks: int = 1) -> tuple[int, int]:
    """rows.shares for six resident programs, so that rows are shared even where there are several column blocks."""
    return row_kernels.shares(m, rows, device, warps, 6, blocks)


def small_row_tile(n: int, widest: int, elements: int = 0) -> tuple:
    """rows.row_tile for tiles of two rows."""
    return row_kernels.RowTile(2, min(triton.next_power_of_2(n), widest), 4)


def uneven_finishing(rows: int, n: int, tile: Tile, *rest: int) -> tuple[int, int, int]:
    """Early blocks in more runs than late ones, and than their units fill: the last run of a block has none, and one
    unit too many would be written behind the unit that it spoils."""
    return min(2, -(-rows // tile.m) - 1), 3, 1


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Within, kernels have tiles of a few elements."""
    constants: dict[str, dict[str, Any]] = {
        "rows": {"SUM_ROWS": 2, "SUM_COLUMNS": 4},
        "tile": {"PACKED_BYTES": tl.constexpr(32), **dict.fromkeys(
            ("EPILOGUE_COLUMNS", "PLAIN_COLUMNS", "GROUP_M"), tl.constexpr(2)
        )},
        "norm.kernel": {
            "row_tile": small_row_tile, "shares": several_shares, "WEIGHT_GRADIENT": row_kernels.RowTile(2, 4, 4),
        },
        "dropout.kernel": {
            "FORWARD_COLUMNS": 4, "FORWARD_ELEMENTS": 16, "BACKWARD_COLUMNS": 4, "BACKWARD_ELEMENTS": 8,
            "shares": several_shares,
        },
        "activation.kernel": {"FORWARD_BYTES": 32, "BACKWARD_BYTES": 32},
        "quantize.kernel": {"ROWS": 2},
        "rope.kernel": {"BLOCK_BYTES": 64},
        "update.kernel": {"BLOCK": 8},
        "weighted_activation.kernel": {"row_tile": small_row_tile, "FORWARD_COLUMNS": 4, "BACKWARD_COLUMNS": 4},
        "combine.kernel": {"row_tile": small_row_tile, "COLUMNS": 4},
        "route.kernel": {"form_of": lambda experts, groups, k: kernel("route").Form(
            2, *map(triton.next_power_of_2, (groups, experts // groups, k))  # for two tokens
        )},
        "cross_entropy.kernel": {
            "COMBINE_TOKENS": 4, "block_options": lambda logits: {"LANES": 4, "VECTOR": 2, "num_warps": 4},
        },
        "all_gather_matmul.plan": {"IN_FLIGHT": 64},
        **{f"{name}.kernel": {"piece_columns": lambda columns: 2} for name in ("matmul", "all_gather_matmul")},
        "matmul_reduce_scatter.kernel": {
            "unit_rows": lambda tile, itemsize, world: 2, "plan_finishing": uneven_finishing,
        },
        "matmul_all_reduce.kernel": {
            "step_rows": lambda tile, itemsize: 2, "unit_rows": lambda tile, itemsize, sources, loads=None: 2,
            "band_rows": lambda *sizes: 2,
        },
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, values in constants.items():
            module = importlib.import_module(f"tpformer.kernels.{name}")
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def verdict(case: str, some: slice) -> str:
    """What is wrong with a case at some of its shapes: "access: ..." or "result: ...", or "" if nothing is."""
    check, shapes = CASES[case]
    for shape in shapes[some]:
        found = ""
        with small_tiles(), watching() as watch, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what mutants compute
            try:
                check(shape, watch)
            except AssertionError as error:
                found = f"result: {case} {shape} {error}"
        if watch.reports:
            found = f"access: {case} {shape} {watch.reports[0]}"
        if found:
            return found
    return ""


def try_mutants(mutants: list[Mutant], cases: list[str]) -> list[str]:
    """The verdict on each mutant by the first case that catches it, or ""."""
    verdicts = []
    for mutant in mutants:
        with interpreting(mutant.file, mutant.function, mutant.edit):
            found = (verdict(case, slice(SHAPES_OF_MUTANTS)) for case in cases)
            verdicts.append(next(filter(None, found), ""))
    return verdicts

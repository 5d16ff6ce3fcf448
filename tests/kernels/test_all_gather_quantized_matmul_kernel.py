"""all_gather_quantized_matmul equals its reference on processes and on virtual ranks, with every number of weights and
epilogue, and both equal the numbers that blocks stand for. Each planted mistake is caught."""

from functools import partial

import gemms
import pytest
import torch
from mutations import Edit, interpreting, replace
from testing import fails_on_a_rank
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer.kernels.all_gather_quantized_matmul import kernel
from tpformer.kernels.all_gather_quantized_matmul import reference as formulas
from tpformer.kernels.configurations import tile_names
from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, Blocks, shard_bytes

KERNEL = "all_gather_quantized_matmul/kernel.py"
TILE = gemms.TILE._replace(m=32, n=128)  # in the interpreter a program of it takes as long as one of less
TMA_TILE = TILE._replace(tma=True)
SHAPES = ((1, 1, 1), (3, 1, 3), (34, 2, 2))  # rows of a rank, blocks of N, blocks of K


def scaled(x: Tensor, base: int) -> Tensor:
    """x with a scale of its own in each block of `base` rows, which follows from its first number and its place."""
    drawn = (37 * x[::base, :1].abs()).floor().repeat_interleave(base, 0)
    return x * torch.exp2((drawn + torch.arange(x.shape[1], device=x.device) // BLOCK * 5) % 11 - 8.0)


def quantised(x: dict[str, Tensor], ranks: int = 1) -> tuple[Tensor, list[Blocks]]:
    """(the shards of rows "a", the blocks of weights "w0", ...) of so many ranks, quantised alike in every dtype."""
    rows = scaled(x["a"].double(), 1).chunk(ranks)
    weights = [quantize.quantize_weight(scaled(x[name].double(), BLOCK)) for name in x if name.startswith("w")]
    return torch.cat([formulas.packed_shard(quantize.quantize_rows(each)) for each in rows]), weights


def gemm(make, launch, reference) -> gemms.Gemm:
    return gemms.Gemm(make, launch, reference, exact=False, piece=lambda rows, k: shard_bytes(rows, k * BLOCK))


def linear(weights: int, biased: bool = True, **options) -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        made = {"a": (rows, k * BLOCK)}
        for i in range(weights):
            made |= {f"w{i}": ((n + i) * BLOCK, k * BLOCK), f"bias{i}": ((n + i) * BLOCK,)}
        return gemms.shapes(**made)

    def biases(x):
        return [x[f"bias{i}"] for i in range(weights)] if biased else None

    def launch(x, channel, tile):
        shard, blocks = quantised(x, channel.served)
        given = {"dtype": x["a"].dtype, "tile": tile, **options}
        return kernel.all_gather_quantized_matmul(shard, blocks, channel, biases(x), **given)

    def reference(xs):
        shards, blocks = zip(*map(quantised, xs), strict=True)
        added = [biases(x) for x in xs] if biased else None
        return formulas.all_gather_quantized_matmul_reference(shards, blocks, added, dtype=xs[0]["a"].dtype)

    return gemm(make, launch, reference)


def derivative(activation: str | None, gated: bool) -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        full = (world * rows, n * BLOCK)
        given = {"x": full, **({"gate": full} if gated else {})}
        return gemms.shapes(a=(rows, k * BLOCK), w=(n * BLOCK, k * BLOCK), **given)

    def launch(x, channel, tile):
        shard, (weight,) = quantised(x, channel.served)
        given = shard, weight, channel, x["x"], activation, x.get("gate")
        return kernel.all_gather_quantized_matmul_derivative(*given, tile=tile)

    def reference(xs):
        shards, blocks = zip(*map(quantised, xs), strict=True)
        columns = [[x.get(name) for x in xs] for name in ("x", "gate")]
        weights = [weight for (weight,) in blocks]
        return formulas.all_gather_quantized_matmul_derivative_reference(
            shards, weights, columns[0], activation, columns[1]
        )

    return gemm(make, launch, reference)


on_processes = partial(gemms.run_on_processes, tile=TILE, sizes=SHAPES)


@gemms.in_interpreter(2, *in_turns([4, 3, 1], first=3))
def test_on_processes() -> None:
    on_processes(linear(3), sizes=SHAPES[:2])
    on_processes(linear(1, biased=False), tile=TMA_TILE, sizes=SHAPES[2:])
    on_processes(derivative("silu", gated=True), sizes=SHAPES[1:2])


@gemms.in_interpreter(*in_turns([2]))
def test_more_on_processes() -> None:
    on_processes(linear(2))
    on_processes(derivative("silu", gated=True), tile=TMA_TILE)
    on_processes(derivative("gelu_tanh", gated=False))
    gemms.pushers_that_join(linear(2), TILE, SHAPES[1:2])


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(linear(2), 2, TMA_TILE, torch.float32, SHAPES[1:2], repeat=2)


@gemms.in_interpreter(*in_turns([1]))
def test_more_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(linear(2), 3, TILE, torch.float32, SHAPES[1:2], repeat=3)
    gemms.run_on_virtual_ranks(derivative("gelu", gated=False), 2, TILE, torch.float32, SHAPES[1:2])


test_virtual_ranks_on_gpu = gemms.on_gpu(
    linear(3), linear(1, biased=False), derivative("silu", gated=True), sizes=((128, 2, 4), (200, 3, 2), (1, 1, 1)),
    tiles=tile_names(90, 1),
)  # fmt: skip


IN_ONE_SLOT = "values of both parities in slot 0"
OF_THE_KERNEL: dict[str, Edit] = {
    "own exponents for everyone's": replace("received + tl.cast(chunk, tl.int64) * problem.nbytes", "own"),
    "exponents of the epoch before": replace(
        "slot_of(me, me.rank, tl.int8)", "slot_of(me, me.rank, tl.int8) + (1 - 2 * (me.epoch & 1)) * me.parity_stride"
    ),
    "the first rank's exponents": replace("tl.cast(chunk, tl.int64) * problem.nbytes", "0"),
    IN_ONE_SLOT: replace("(me.epoch & 1) == 1", "(me.epoch & 0) == 1"),
}
OF_TILES: dict[str, Edit] = {
    "the first shard's values": replace("load_values(values, shard,", "load_values(values, shard * 0,"),
    "exponents by rows": replace("exponents + step * rows + places", "exponents + places * steps + step"),
    "the rows' exponents of one block": replace("exponents + step * rows + places", "exponents + places"),
    "the weight's exponents of one block": replace("of_weight + step", "of_weight"),
    "the first columns' exponents": replace("(first + column) // BLOCK * steps", "0"),
    "a block less": replace("problem.k // BLOCK", "problem.k // BLOCK - 1"),
}
MISTAKES = {name: (KERNEL, "all_gather_quantized_matmul_kernel", edit) for name, edit in OF_THE_KERNEL.items()}
MISTAKES |= {name: (KERNEL, "quantized_tiles", edit) for name, edit in OF_TILES.items()}
MISTAKES["the first weight's exponents"] = (
    KERNEL, "place_quantized", replace("return b, weight.exponents", "return b, problem.weights[0].exponents")
)  # fmt: skip
OF_A_PUSH: dict[str, tuple[str, str, Edit]] = {"a flag that covers values alone": (
    "all_gather_matmul/kernel.py", "push_pieces", replace("first + offsets < numel", "first + offsets < numel - 16")
)}  # fmt: skip
MISTAKES |= OF_A_PUSH


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@gemms.in_interpreter(2)
def test_a_mistake_is_caught(name: str) -> None:
    """By a rank, after one operation: a rank that went on would wait for one that has failed. All see a wrong slot."""
    with interpreting(*MISTAKES[name]):
        assert fails_on_a_rank(lambda: on_processes(linear(2), sizes=SHAPES[1:2] * (1 + (name == IN_ONE_SLOT))))


def test_shards_are_values_then_exponents() -> None:
    """In 129 bytes for 128 values, and up to 15 for a shard; they come back as they were, in memory of their own."""
    x = scaled(torch.randn(2 * 3, 2 * BLOCK, dtype=torch.float64), 1)
    parts = [quantize.quantize_rows(each) for each in x.chunk(2)]
    shards = torch.cat([formulas.packed_shard(part) for part in parts])
    assert shards.shape == (2, shard_bytes(3, 2 * BLOCK)) and shards.shape[1] - 3 * 2 * (BLOCK + 1) == 10
    values, exponents = formulas.unpacked_shards(shards, 2 * BLOCK)
    shards.zero_()
    assert torch.equal(quantize.dequantize(Blocks(values, exponents), torch.float64),
                       quantize.dequantize(quantize.quantize_rows(x), torch.float64))  # fmt: skip
    assert shard_bytes(1024, 2048) * 256 == 1024 * 2048 * 2 * 129


def test_operands_that_do_not_fit_are_refused() -> None:
    a, weight = torch.randn(3, 2 * BLOCK), quantize.quantize_weight(torch.randn(BLOCK, 2 * BLOCK))
    shard, given = formulas.packed_shard(quantize.quantize_rows(a)), {"dtype": torch.float32, "served": 1}
    bias = torch.ones(BLOCK)
    for words, operands in {
        "the shard is": (shard[:, :-16], [weight], None),
        "at least one row": (shard[:, :16], [weight], None),
        "a weight's exponents": (shard, [weight._replace(exponents=weight.exponents.t())], None),
        "a weight's values": (shard, [weight, quantize.quantize_weight(torch.ones(BLOCK, BLOCK))], None),
        "a bias": (shard, [weight], [bias.double()]),
    }.items():
        with pytest.raises(ValueError, match=words):
            formulas.check_operands("a gather", shard, *operands, **given)

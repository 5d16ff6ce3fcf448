"""all_gather_quantized_grouped_matmul equals its reference on processes and on virtual ranks, whichever experts tokens
go to. Each planted mistake is caught."""

from collections.abc import Sequence

import gemms
import pytest
import torch
from mutations import Edit, interpreting, replace
from test_all_gather_grouped_matmul_kernel import EXPERTS, Parts, routed
from test_all_gather_quantized_matmul_kernel import TILE, TMA_TILE, scaled
from testing import fails_on_a_rank
from torch import Tensor
from turns import in_turns

pytest.importorskip("triton")

from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_quantized_grouped_matmul
from tpformer.kernels.all_gather_grouped_matmul.reference import (
    all_gather_quantized_grouped_matmul_reference as formula,
)
from tpformer.kernels.all_gather_grouped_matmul.reference import check_blocks
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.configurations import tile_names
from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, Blocks, shard_bytes

SHAPES = ((1, 1, 1), (5, 1, 3), (34, 2, 2))  # rows of a rank, blocks of N, blocks of K; each rank takes of both's 5
KERNEL = "all_gather_grouped_matmul/kernel.py"


def joined(blocks: Sequence[Blocks]) -> Blocks:
    """Blocks one below the other."""
    values, exponents = zip(*blocks, strict=True)
    return Blocks(torch.cat([each.view(torch.uint8) for each in values]).view(values[0].dtype), torch.cat(exponents))


def quantised(x: dict[str, Tensor], transposed: bool, ranks: int = 1) -> tuple[Tensor, Blocks]:
    """(the shards, all matrices' blocks) of so many ranks, quantised alike in every dtype."""
    rows = scaled(x["a"].double(), 1).chunk(ranks)
    matrices = [scaled(w.double().flatten(0, 1), BLOCK) for w in x["w"].chunk(ranks)]
    weights = [quantize.quantize_weight_twice(each)[transposed] for each in matrices]
    return torch.cat([packed_shard(quantize.quantize_rows(each)) for each in rows]), joined(weights)


def grouped(transposed: bool = False, kind: str = "mixed", **options) -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        sizes = (k * BLOCK, n * BLOCK) if transposed else (n * BLOCK, k * BLOCK)
        return gemms.shapes(a=(rows, k * BLOCK), w=(EXPERTS, *sizes))

    def launch(x, channel, tile):
        world, rows = channel.world, len(x["a"]) // channel.served
        served = routed(world, rows, kind)[channel.rank :][: channel.served]
        every = zip(*((each.counts, each.tokens) for each in served), strict=True)
        counts, tokens = (torch.cat(parts).to(x["a"].device) for parts in every)
        y = all_gather_quantized_grouped_matmul(
            *quantised(x, transposed, channel.served), channel, counts, tokens, transposed=transposed,
            dtype=x["a"].dtype, tile=tile, **options,
        )  # fmt: skip
        return [y if len(served) == 1 else Parts(y.split([len(each.tokens) for each in served]))]

    def reference(xs):
        every, device = routed(len(xs), len(xs[0]["a"]), kind), xs[0]["a"].device
        shards, weights = zip(*(quantised(x, transposed) for x in xs), strict=True)
        places = [[each.counts.to(device) for each in every], [each.tokens.to(device) for each in every]]
        return [[y] for y in formula(shards, weights, *places, transposed=transposed, dtype=xs[0]["a"].dtype)]

    return gemms.Gemm(make, launch, reference, exact=False, piece=lambda rows, k: shard_bytes(rows, k * BLOCK))


def on_processes(gemm: gemms.Gemm, tile: gemms.Tile = TILE, sizes: Sequence = SHAPES) -> None:
    gemms.run_on_processes(gemm, tile, sizes=sizes)


@gemms.in_interpreter(2, *in_turns([4, 3, 1], first=1))
def test_on_processes() -> None:
    """Also with an expert of no row, ranks without any, and a rank whose rows all stay."""
    on_processes(grouped(), sizes=SHAPES[:2])
    on_processes(grouped(transposed=True), TMA_TILE, SHAPES[2:])
    on_processes(grouped(kind="one"), sizes=SHAPES[1:2])


@gemms.in_interpreter(*in_turns([2], first=4))
def test_more_on_processes() -> None:
    on_processes(grouped(transposed=True, kind="one"))
    on_processes(grouped(), TMA_TILE)
    on_processes(grouped(kind="own"))
    gemms.pushers_that_join(grouped(), TILE, SHAPES[1:2])


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped(True), 2, TMA_TILE, torch.float32, SHAPES[1:2], repeat=2)


@gemms.in_interpreter(*in_turns([1], first=2))
def test_more_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped(), 3, TILE, torch.float32, SHAPES[1:2], repeat=3)
    gemms.run_on_virtual_ranks(grouped(True, "one"), 2, TILE, torch.float32, SHAPES[1:2])


test_virtual_ranks_on_gpu = gemms.on_gpu(
    grouped(), grouped(True, "own"), sizes=((128, 2, 4), (200, 3, 2), (1, 1, 1)), tiles=tile_names(90, 1)
)


OWN = "tl.cast(shard, tl.int64) * problem.a_stride"
OF_TILES: dict[str, Edit] = {
    "the first shard": replace(OWN, "0"),
    "the first rank's exponents": replace(
        "piece.to(tl.pointer_type(tl.int8)", "(piece - (rank > 0) * problem.a_stride).to(tl.pointer_type(tl.int8)"
    ),
    "exponents behind a row less": replace(
        "tl.cast(shard_rows, tl.int64) * k", "tl.cast(shard_rows - 1, tl.int64) * k"
    ),
    "another rank's tokens": replace("-rank * shard_rows", "-(rank ^ 1) * shard_rows"),
    "another row's exponents": replace("values, exponents, shard_rows", "values, exponents + 1, shard_rows"),
    "exponents of fewer rows": replace("exponents, shard_rows, None", "exponents, shard_rows - 1, None"),
}
IN_ONE_SLOT = "both parities in slot 0"
OF_THE_KERNEL: dict[str, Edit] = {
    IN_ONE_SLOT: replace("(me.epoch & 1) == 1", "(me.epoch & 0) == 1"),
    "values without exponents": replace("shard_rows * problem.a_stride, GATHER", "rows * problem.k, GATHER"),
    "own rows for everyone's": replace("problem, slot, first, first + source", "problem, shard, first, virtual"),
}
MISTAKES = {name: (KERNEL, "expert_tiles", edit) for name, edit in OF_TILES.items()}
MISTAKES |= {name: (KERNEL, "all_gather_grouped_matmul_kernel", edit) for name, edit in OF_THE_KERNEL.items()}
MISTAKES["a flag that covers values alone"] = (
    "all_gather_matmul/kernel.py", "push_pieces", replace("first + offsets < numel", "first + offsets < numel - 16")
)  # fmt: skip


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@gemms.in_interpreter(2)
def test_a_mistake_is_caught(name: str) -> None:
    """By a rank, after one operation: a rank that went on would wait for one that has failed. All see a wrong slot."""
    with interpreting(*MISTAKES[name]):
        assert fails_on_a_rank(lambda: on_processes(grouped(), sizes=SHAPES[1:2] * (1 + (name == IN_ONE_SLOT))))


def test_operands_that_do_not_fit_are_refused() -> None:
    x = {"a": torch.randn(3, 2 * BLOCK), "w": torch.randn(2, BLOCK, 2 * BLOCK)}
    shard, weights = quantised(x, False)
    counts, tokens = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), torch.tensor([0, 3, 5, 4], dtype=torch.int32)
    given = {"transposed": False, "dtype": torch.float32, "served": 1, "world": 2}
    assert check_blocks("a gather", shard, shard, weights, counts, tokens, **given) == (3, 2, BLOCK, 2 * BLOCK)
    for words, operands in {
        "the shard is": (shard[:, :-16], weights, counts, tokens),
        "at least one row": (shard[:, :16], weights, counts, tokens),
        "the matrices' exponents": (shard, weights._replace(exponents=weights.exponents[:1]), counts, tokens),
        "matrices of whole": (shard, weights, counts.repeat(1, 2), tokens),
        "counts of 4 rows": (shard, weights, counts, tokens[1:]),
        "tokens span": (shard, weights, counts, tokens + 1),
    }.items():
        with pytest.raises(ValueError, match=words):
            check_blocks("a gather", shard, *operands, **given)

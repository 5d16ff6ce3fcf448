"""all_gather_grouped_matmul, of 16 bits and of blocks, equals its reference on processes and on virtual ranks,
whichever experts tokens go to. Each planted mistake with blocks is caught."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import gemms
import pytest
import torch
import torch.distributed as dist
from mutations import Edit, interpreting, replace
from test_all_gather_quantized_matmul_kernel import OF_A_PUSH, TILE, TMA_TILE, scaled
from testing import assert_identical, fails_on_a_rank
from torch import Tensor
from turns import in_turns

from tpformer.kernels.all_gather_grouped_matmul import kernel, reference
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard
from tpformer.kernels.configurations import tile_names
from tpformer.kernels.quantize import reference as quantize
from tpformer.kernels.quantize.format import BLOCK, VALUES, Blocks, shard_bytes
from tpformer.ops.dispatch import Dispatch, dispatch
from tpformer.ops.route import Routing

EXPERTS, CHOSEN = 3, 2  # of a rank; of a token


def routed(world: int, rows: int, kind: str) -> list[Dispatch]:
    """Every rank's dispatched rows. kind: "mixed"; "one", the last rank's last expert has all rows, so the other ranks
    have none; "own", every rank's tokens stay with its experts."""
    generator = torch.Generator().manual_seed(rows)
    total, tokens = EXPERTS * world, rows * world
    picked = torch.rand(tokens, total, generator=generator).argsort(1)[:, :CHOSEN]
    if kind == "one":
        picked = torch.full((tokens, 1), total - 1)
    elif kind == "own":
        picked = (torch.arange(tokens) // rows * EXPERTS + torch.arange(tokens) % 2)[:, None]
    routing = Routing(picked, torch.ones(picked.shape))
    return [Dispatch(dispatch(routing, rank * EXPERTS, EXPERTS, total, world)) for rank in range(world)]


class Parts(tuple):
    """Virtual ranks' results, which have different numbers of rows."""

    def chunk(self, world: int) -> "Parts":
        assert len(self) == world
        return self


def plain(x: gemms.Tensors, transposed: bool, ranks: int = 1) -> tuple[tuple, dict[str, Any]]:
    """What is gathered and the matrices, of so many ranks, and options beside them."""
    return (x["a"], x["w"]), {}


def grouped(
    transposed: bool = False, kind: str = "mixed", launcher: Callable = kernel.all_gather_grouped_matmul,
    formula: Callable = reference.all_gather_grouped_matmul_reference, factors: Callable = plain, block: int = 1,
    **fields,
) -> gemms.Gemm:  # fmt: skip
    """factors: of this launcher and its formula, as `plain`. block: of so many each N and K are multiples."""

    def make(rank, world, rows, n, k):
        n, k = n * block, k * block
        return gemms.shapes(a=(rows, k), w=(EXPERTS, k, n) if transposed else (EXPERTS, n, k))

    def launch(x, channel, tile):
        world, rows = channel.world, len(x["a"]) // channel.served
        served = routed(world, rows, kind)[channel.rank :][: channel.served]
        every = zip(*((each.counts, each.tokens) for each in served), strict=True)
        counts, tokens = (torch.cat(parts).to(x["a"].device) for parts in every)
        given, options = factors(x, transposed, channel.served)
        y = launcher(*given, channel, counts, tokens, transposed=transposed, tile=tile, **options)
        return [y if len(served) == 1 else Parts(y.split([len(each.tokens) for each in served]))]

    def refer(xs):
        every, device = routed(len(xs), len(xs[0]["a"]), kind), xs[0]["a"].device
        given, (options, *_) = zip(*(factors(x, transposed) for x in xs), strict=True)
        places = [[each.counts.to(device) for each in every], [each.tokens.to(device) for each in every]]
        return [[y] for y in formula(*zip(*given, strict=True), *places, transposed=transposed, **options)]

    return gemms.Gemm(make, launch, refer, **fields)


@gemms.in_interpreter(2, *in_turns([4, 1], first=0))
def test_on_processes() -> None:
    gemms.run_on_processes(grouped())
    gemms.run_on_processes(grouped(transposed=True), sizes=gemms.SHAPES[1:3])
    gemms.run_on_processes(grouped(), gemms.TMA_TILE, torch.float16, gemms.SHAPES[1:3])
    gemms.run_on_processes(grouped(True, "one"), gemms.TMA_TILE, sizes=gemms.SHAPES[:3])
    gemms.run_on_processes(grouped(kind="own"), sizes=gemms.SHAPES[:3])


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped(), 3, gemms.TILE, torch.float32, gemms.SHAPES[1:2], repeat=3)
    gemms.run_on_virtual_ranks(grouped(True, "one"), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def keep(shard, channel) -> None:
    """Rows that nobody's expert takes are gathered, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent, w = routed(world, 3, "one")[rank], torch.ones(EXPERTS, 2, 5)
    y = kernel.all_gather_grouped_matmul(shard, w, channel, sent.counts, sent.tokens, keep=True, tile=gemms.TILE)
    every = channel.gathered(int(channel.epoch) % 2, shard).sum(1, keepdim=True).expand(-1, 2)
    assert torch.equal(y, every if rank == world - 1 else y.new_empty(0, 2))


@gemms.in_interpreter(2)
def test_pushers_join() -> None:
    gemms.pushers_that_join(grouped())


@gemms.in_interpreter(3)
def test_gathered_rows_are_kept_on_request() -> None:
    gemms.check_kept_rows(keep)


test_virtual_ranks_on_gpu = gemms.on_gpu(grouped(), grouped(True, "own"))


def turns(programs: int, pushers: int, joins: int, counts: list[int]) -> list[list[range]]:
    """Return for each chunk the tiles of each program."""
    found, before = [], 0
    for step, tiles in enumerate(counts):
        rest = programs, pushers, joins <= step, before, tiles
        with mock.patch("triton.language.where", lambda condition, x, y: x if condition else y):
            ways = [kernel.take_turn.fn(program, *rest) for program in range(programs)]
        found.append([range(first, tiles, distance) for first, distance in ways])
        before = (before + tiles) % ways[0][1]
    return found


def test_every_tile_is_taken_once() -> None:
    for programs, pushers, world in ((1, 1, 2), (3, 1, 3), (5, 2, 3), (7, 3, 4), (4, 0, 2)):
        for joins in range(world + 1 if programs > pushers else 1):
            for index in range(10):
                generator = torch.Generator().manual_seed(index)
                counts = torch.randint(0, 2 * programs + 2, (world,), generator=generator).tolist()
                gemms.check_shares(turns(programs, pushers, joins, counts), pushers, joins, counts)


def test_where_rows_begin() -> None:
    counts = torch.tensor([[2, 0], [1, 4], [0, 0], [3, 1]], dtype=torch.int32)  # two ranks' rows from two
    assert reference.offsets_of(counts[:2]).tolist() == [0, 3, 7]
    begins = [[[0, 3], [2, 3], [3, 7]], [[7, 10], [7, 10], [10, 11]]]
    assert_identical(reference.starts_of(counts, 2), torch.tensor(begins, dtype=torch.int32))


# rows of a rank, blocks of N, blocks of K; each rank takes of both's 5
BLOCK_SHAPES = ((1, 1, 1), (5, 1, 3), (34, 2, 2))
KERNEL = "all_gather_grouped_matmul/kernel.py"


def quantised(x: gemms.Tensors, transposed: bool, ranks: int = 1) -> tuple[tuple[Tensor, Blocks], dict[str, Any]]:
    """(the shards, all matrices' blocks) of so many ranks, quantised alike in every dtype; and this dtype."""
    rows = scaled(x["a"].double(), 1).chunk(ranks)
    matrices = [scaled(w.double().flatten(0, 1), BLOCK) for w in x["w"].chunk(ranks)]
    values, exponents = zip(*(quantize.quantize_weight_twice(each)[transposed] for each in matrices), strict=True)
    weights = torch.cat([each.view(torch.uint8) for each in values]).view(VALUES), torch.cat(exponents)
    shards = torch.cat([packed_shard(quantize.quantize_rows(each)) for each in rows])
    return (shards, Blocks(*weights)), {"dtype": x["a"].dtype}


grouped_blocks = partial(
    grouped, launcher=kernel.all_gather_quantized_grouped_matmul, factors=quantised, block=BLOCK, exact=False,
    formula=reference.all_gather_quantized_grouped_matmul_reference, piece=lambda rows, k: shard_bytes(rows, k * BLOCK),
)  # fmt: skip
on_processes = partial(gemms.run_on_processes, tile=TILE, sizes=BLOCK_SHAPES)


@gemms.in_interpreter(2, *in_turns([4, 3, 1], first=1))
def test_blocks_on_processes() -> None:
    """Also with an expert of no row, ranks without any, and a rank whose rows all stay."""
    on_processes(grouped_blocks(), sizes=BLOCK_SHAPES[:2])
    on_processes(grouped_blocks(transposed=True), tile=TMA_TILE, sizes=BLOCK_SHAPES[2:])
    on_processes(grouped_blocks(kind="one"), sizes=BLOCK_SHAPES[1:2])


@gemms.in_interpreter(*in_turns([2], first=4))
def test_more_blocks_on_processes() -> None:
    on_processes(grouped_blocks(transposed=True, kind="one"))
    on_processes(grouped_blocks(), tile=TMA_TILE)
    on_processes(grouped_blocks(kind="own"))
    gemms.pushers_that_join(grouped_blocks(), TILE, BLOCK_SHAPES[1:2])


@gemms.in_interpreter(1)
def test_blocks_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped_blocks(True), 2, TMA_TILE, torch.float32, BLOCK_SHAPES[1:2], repeat=2)


@gemms.in_interpreter(*in_turns([1], first=2))
def test_more_blocks_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped_blocks(), 3, TILE, torch.float32, BLOCK_SHAPES[1:2], repeat=3)
    gemms.run_on_virtual_ranks(grouped_blocks(True, "one"), 2, TILE, torch.float32, BLOCK_SHAPES[1:2])


test_blocks_of_virtual_ranks_on_gpu = gemms.on_gpu(
    grouped_blocks(), grouped_blocks(True, "own"), sizes=((128, 2, 4), (200, 3, 2), (1, 1, 1)), tiles=tile_names(90, 1)
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
MISTAKES |= OF_A_PUSH


@pytest.mark.parametrize("name", in_turns(MISTAKES))
@gemms.in_interpreter(2)
def test_a_mistake_is_caught(name: str) -> None:
    """By a rank, after one operation: a rank that went on would wait for one that has failed. All see a wrong slot."""
    with interpreting(*MISTAKES[name]):
        assert fails_on_a_rank(
            lambda: on_processes(grouped_blocks(), sizes=BLOCK_SHAPES[1:2] * (1 + (name == IN_ONE_SLOT)))
        )


def test_blocks_that_do_not_fit_are_refused() -> None:
    x = {"a": torch.randn(3, 2 * BLOCK), "w": torch.randn(2, BLOCK, 2 * BLOCK)}
    (shard, weights), _ = quantised(x, False)
    counts, tokens = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), torch.tensor([0, 3, 5, 4], dtype=torch.int32)
    given = {"transposed": False, "dtype": torch.float32, "served": 1, "world": 2}
    sizes = reference.check_blocks("a gather", shard, shard, weights, counts, tokens, **given)
    assert sizes == (3, 2, BLOCK, 2 * BLOCK)
    for words, operands in {
        "the shard is": (shard[:, :-16], weights, counts, tokens),
        "at least one row": (shard[:, :16], weights, counts, tokens),
        "the matrices' exponents": (shard, weights._replace(exponents=weights.exponents[:1]), counts, tokens),
        "matrices of whole": (shard, weights, counts.repeat(1, 2), tokens),
        "counts of 4 rows": (shard, weights, counts, tokens[1:]),
        "tokens span": (shard, weights, counts, tokens + 1),
    }.items():
        with pytest.raises(ValueError, match=words):
            reference.check_blocks("a gather", shard, *operands, **given)

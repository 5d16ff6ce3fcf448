"""all_gather_grouped_matmul equals its reference on processes and on virtual ranks, whichever experts tokens go to."""

from unittest import mock

import gemms
import torch
import torch.distributed as dist
from testing import assert_identical
from turns import in_turns

from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul, take_turn
from tpformer.kernels.all_gather_grouped_matmul.reference import all_gather_grouped_matmul_reference as formula
from tpformer.kernels.all_gather_grouped_matmul.reference import offsets_of, starts_of
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


def grouped(transposed: bool = False, kind: str = "mixed") -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        return gemms.shapes(a=(rows, k), w=(EXPERTS, k, n) if transposed else (EXPERTS, n, k))

    def launch(x, channel, tile):
        world, rows = channel.world, len(x["a"]) // channel.served
        served = routed(world, rows, kind)[channel.rank :][: channel.served]
        every = zip(*((each.counts, each.tokens) for each in served), strict=True)
        counts, tokens = (torch.cat(parts).to(x["a"].device) for parts in every)
        y = all_gather_grouped_matmul(x["a"], x["w"], channel, counts, tokens, transposed=transposed, tile=tile)
        return [y if len(served) == 1 else Parts(y.split([len(each.tokens) for each in served]))]

    def reference(xs):
        every, device = routed(len(xs), len(xs[0]["a"]), kind), xs[0]["a"].device
        factors = [[x[name] for x in xs] for name in ("a", "w")]
        places = [[each.counts.to(device) for each in every], [each.tokens.to(device) for each in every]]
        return [[y] for y in formula(*factors, *places, transposed=transposed)]

    return gemms.Gemm(make, launch, reference)


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
    y = all_gather_grouped_matmul(shard, w, channel, sent.counts, sent.tokens, keep=True, tile=gemms.TILE)
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
            ways = [take_turn.fn(program, *rest) for program in range(programs)]
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
    assert offsets_of(counts[:2]).tolist() == [0, 3, 7]
    begins = [[[0, 3], [2, 3], [3, 7]], [[7, 10], [7, 10], [10, 11]]]
    assert_identical(starts_of(counts, 2), torch.tensor(begins, dtype=torch.int32))

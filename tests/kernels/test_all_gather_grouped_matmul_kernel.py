"""all_gather_grouped_matmul equals its reference on processes and on virtual ranks, whichever experts tokens go to."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from channels import real_channel, region_bytes, virtual_channel

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul, take_turn
from tpformer.kernels.all_gather_grouped_matmul.reference import (
    all_gather_grouped_matmul_cost,
    all_gather_grouped_matmul_reference,
    offsets_of,
    starts_of,
)
from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.kernel import gathered_copy
from tpformer.kernels.protocol import bump
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
        counts = torch.cat([each.counts for each in served]).to(x["a"].device)
        tokens = torch.cat([each.tokens for each in served]).to(x["a"].device)
        y = all_gather_grouped_matmul(x["a"], x["w"], channel, counts, tokens, transposed=transposed, tile=tile)
        return [y if len(served) == 1 else Parts(y.split([len(each.tokens) for each in served]))]

    def reference(xs):
        rows = len(xs[0]["a"])
        every, device = routed(len(xs), rows, kind), xs[0]["a"].device
        products = all_gather_grouped_matmul_reference(
            [x["a"] for x in xs], [x["w"] for x in xs], [each.counts.to(device) for each in every],
            [each.tokens.to(device) for each in every], transposed=transposed,
        )  # fmt: skip
        return [[y] for y in products]

    return gemms.Gemm(make, launch, reference)


def processes() -> None:
    gemms.run_on_processes(grouped())
    gemms.run_on_processes(grouped(transposed=True), sizes=gemms.SHAPES[1:])
    gemms.run_on_processes(grouped(), gemms.TMA_TILE, torch.float16, gemms.SHAPES[1:])
    gemms.run_on_processes(grouped(True, "one"), gemms.TMA_TILE, sizes=gemms.SHAPES[:3])
    gemms.run_on_processes(grouped(kind="own"), sizes=gemms.SHAPES[:3])


@pytest.mark.parametrize("world", gemms.WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(grouped(), 3, gemms.TILE, torch.float32, gemms.SHAPES[1:3], repeat=3)
    gemms.run_on_virtual_ranks(grouped(True, "one"), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def kept_rows() -> None:
    """Rows that nobody's expert takes are gathered, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = SharedMemory(
        region_bytes(world, gemms.CAPACITY, gemms.WRITER_FLAGS), dist.group.WORLD, timeout=gemms.PATIENCE
    )
    channel = real_channel(memory, gemms.CAPACITY, gemms.WRITER_FLAGS)
    sent = routed(world, 3, "one")[rank]
    for epoch in (1, 2):
        shards = [torch.full((3, 5), 10.0 * epoch + r) for r in range(world)]
        bump(channel)
        w = torch.ones(EXPERTS, 2, 5)
        y = all_gather_grouped_matmul(shards[rank], w, channel, sent.counts, sent.tokens, keep=True, tile=gemms.TILE)
        whole = torch.cat(shards)
        assert torch.equal(y, whole.sum(1, keepdim=True).expand(-1, 2) if rank == world - 1 else y.new_empty(0, 2))
        assert torch.equal(channel.gathered(epoch % 2, shards[rank]), whole)
        copy = gathered_copy(channel, shards[rank])
        channel.slots[epoch % 2].zero_()
        assert torch.equal(copy, whole)


def test_gathered_rows_are_kept_on_request(interpreted: WorkerPool) -> None:
    interpreted(3).run(kept_rows)


def pushers_that_join() -> None:
    """As in test_all_gather_matmul_kernel."""
    for joins in range(dist.get_world_size() + 1):
        with mock.patch.object(plan, "plan_push", lambda work, *_, joins=joins: plan.Push(1, joins)):
            gemms.run_on_processes(grouped(), sizes=gemms.SHAPES[2:])


def test_pushers_join(interpreted: WorkerPool) -> None:
    interpreted(2).run(pushers_that_join)


def check_turns(programs: int, pushers: int, joins: int, counts: list[int]) -> None:
    """Every tile is taken once, none by pushers that have not joined; the others' tiles differ by one at most."""
    taken, before = [0] * programs, torch.tensor(0)
    for step, tiles in enumerate(counts):
        found, numbers = [], [torch.tensor(x) for x in (programs, pushers, tiles)]
        for program in range(programs):
            with mock.patch("triton.language.where", torch.where):
                first, distance = take_turn.fn(
                    torch.tensor(program), *numbers[:2], torch.tensor(joins <= step), before, numbers[2]
                )
            own = list(range(int(first), tiles, int(distance)))
            assert not own or step >= joins or program >= pushers
            taken[program] += len(own)
            found += own
        assert sorted(found) == list(range(tiles)), (joins, counts, step)
        before = (before + tiles) % distance
    computing = taken[pushers:]
    assert not computing or max(taken) == max(computing) <= min(computing) + 1, (joins, counts, taken)


def test_every_tile_is_taken_once() -> None:
    for programs, pushers, world in ((1, 1, 2), (3, 1, 3), (5, 2, 3), (7, 3, 4), (4, 0, 2)):
        for joins in range(world + 1 if programs > pushers else 1):
            for index in range(20):
                counts = torch.randint(0, 2 * programs + 2, (world,), generator=torch.Generator().manual_seed(index))
                check_turns(programs, pushers, joins, counts.tolist())


def refused() -> list[str]:
    channel = virtual_channel(2, 64, 1)
    found = []
    for shard, w in ((torch.zeros(8, 16), torch.zeros(6, 4, 16)), (torch.zeros(0, 16), torch.zeros(6, 4, 16))):
        with pytest.raises(ValueError) as caught:
            all_gather_grouped_matmul(
                shard, w, channel, torch.zeros(4, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32),
                tile=gemms.TILE,
            )  # fmt: skip
        found.append(str(caught.value))
    return found


def test_what_cannot_run_is_refused(interpreted: WorkerPool) -> None:
    (messages,) = interpreted(1).run(refused)
    assert "needs 512 bytes per slot and 1 flags per writer, but the channel has 64 and 1" in messages[0]
    assert "takes no empty (0, 16) or (6, 4, 16)" in messages[1]


def test_where_rows_begin() -> None:
    counts = torch.tensor([[2, 0], [1, 4], [0, 0], [3, 1]], dtype=torch.int32)  # two ranks' rows from two
    assert offsets_of(counts[:2]).tolist() == [0, 3, 7]
    assert starts_of(counts[:2]).tolist() == [[[0, 3], [2, 3], [3, 7]]]
    assert starts_of(counts, 2).tolist() == [[[0, 3], [2, 3], [3, 7]], [[7, 10], [7, 10], [10, 11]]]
    assert starts_of(counts).dtype == torch.int32


def test_cost_counts_the_tokens_that_arrive() -> None:
    cost = all_gather_grouped_matmul_cost(6, 3, 5, groups=2, tokens=8, world=4, itemsize=2)
    assert cost == (180, 2 * (6 * 8 + 4 * 2 * 15 + 30))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["large", "medium", "small"])
def test_virtual_ranks_on_gpu(world: int, name: str) -> None:
    for gemm in (grouped(), grouped(True, "own")):
        gemms.run_on_gpu(gemm, world, name)

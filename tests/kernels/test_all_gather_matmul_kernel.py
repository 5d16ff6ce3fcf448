"""all_gather_matmul equals its reference on processes and on virtual ranks, with every number of weights and
epilogue."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

pytest.importorskip("triton")

import gemms
from channels import real_channel, region_bytes, virtual_channel

from tpformer.distributed.shared_memory import SharedMemory
from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.kernel import (
    all_gather_matmul,
    all_gather_matmul_derivative,
    gathered_copy,
    walk,
)
from tpformer.kernels.all_gather_matmul.reference import (
    all_gather_matmul_cost,
    all_gather_matmul_derivative_reference,
    all_gather_matmul_reference,
)
from tpformer.kernels.protocol import bump


def linear(weights: int, activation: str | None = None, transposed: bool = False) -> gemms.Gemm:
    names = [(f"w{i}", f"bias{i}") for i in range(weights)]

    def make(rank, world, rows, n, k):
        made = {"a": (rows, k)}
        for i, (w, bias) in enumerate(names):
            made |= {w: (k, n + 4 * i) if transposed else (n + 4 * i, k), bias: (n + 4 * i,)}
        return gemms.shapes(**made)

    def launch(x, channel, tile):
        return all_gather_matmul(
            x["a"], [x[w] for w, _ in names], channel, [x[bias] for _, bias in names],
            activation=activation, b_transposed=transposed, tile=tile,
        )  # fmt: skip

    def reference(xs):
        return all_gather_matmul_reference(
            [x["a"] for x in xs], [[x[w] for w, _ in names] for x in xs], [[x[bias] for _, bias in names] for x in xs],
            activation=activation, b_transposed=transposed,
        )  # fmt: skip

    return gemms.Gemm(make, launch, reference, exact=activation is None)


def derivative(activation: str, gated: bool) -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        full = (world * rows, n)
        return gemms.shapes(a=(rows, k), w=(k, n), x=full, **({"gate": full} if gated else {}))

    def launch(x, channel, tile):
        return all_gather_matmul_derivative(x["a"], x["w"], channel, x["x"], activation, x.get("gate"), tile=tile)

    def reference(xs):
        columns = [[x.get(name) for x in xs] for name in ("a", "w", "x", "gate")]
        return all_gather_matmul_derivative_reference(*columns[:3], activation, columns[3])

    return gemms.Gemm(make, launch, reference, exact=False)


def processes() -> None:
    gemms.run_on_processes(linear(3, "gelu"))
    gemms.run_on_processes(linear(2), gemms.TMA_TILE, torch.float16, gemms.SHAPES[1:])
    gemms.run_on_processes(linear(1, transposed=True), sizes=gemms.SHAPES[2:])
    gemms.run_on_processes(derivative("gelu_tanh", gated=False), sizes=gemms.SHAPES[:3])
    gemms.run_on_processes(derivative("silu", gated=True), sizes=gemms.SHAPES[2:3] * 2)


@pytest.mark.parametrize("world", gemms.WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes)


def virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(linear(2, "silu"), 3, gemms.TILE, torch.float32, gemms.SHAPES[1:3], repeat=3)
    gemms.run_on_virtual_ranks(linear(1), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)
    gemms.run_on_virtual_ranks(derivative("gelu", gated=False), 2, gemms.TILE, torch.float32, gemms.SHAPES[2:3])


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks)


def kept_rows() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = SharedMemory(
        region_bytes(world, gemms.CAPACITY, gemms.WRITER_FLAGS), dist.group.WORLD, timeout=gemms.PATIENCE
    )
    channel = real_channel(memory, gemms.CAPACITY, gemms.WRITER_FLAGS)
    for epoch in (1, 2):
        shards = [torch.full((3, 5), 10.0 * epoch + r) for r in range(world)]
        bump(channel)
        all_gather_matmul(shards[rank], [torch.ones(2, 5)], channel, keep=True, tile=gemms.TILE)
        whole = torch.cat(shards)
        assert torch.equal(channel.gathered(epoch % 2, shards[rank]), whole)
        copy = gathered_copy(channel, shards[rank])
        channel.slots[epoch % 2].zero_()
        assert torch.equal(copy, whole)


def test_gathered_rows_are_kept_on_request(interpreted: WorkerPool) -> None:
    interpreted(3).run(kept_rows)


def pushers_that_join() -> None:
    """The one pusher of a rank takes tiles from each of the chunks on. With several, this serial interpreter would have
    the first wait for peers that wait for the second."""
    for joins in range(dist.get_world_size() + 1):
        with mock.patch.object(plan, "plan_push", lambda work, *_, joins=joins: plan.Push(1, joins)):
            gemms.run_on_processes(linear(2), sizes=gemms.SHAPES[2:])


def test_pushers_join(interpreted: WorkerPool) -> None:
    interpreted(2).run(pushers_that_join)


@pytest.mark.parametrize("programs, pushers", [(1, 1), (2, 1), (3, 1), (5, 2), (7, 3), (4, 0)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_tile_is_walked_once(programs: int, pushers: int, world: int) -> None:
    for joins in range(world + 1 if programs > pushers else 1):
        for tiles in range(1, 2 * programs + 2):
            taken = [0] * programs
            for step in range(world):
                found = []
                for program in range(programs):
                    first, distance = walk.fn(program, programs, pushers, joins, step, tiles)
                    own = list(range(first, tiles, distance))
                    assert not own or step >= joins or program >= pushers
                    taken[program] += len(own)
                    found += own
                assert sorted(found) == list(range(tiles)), (joins, tiles, step)
            computing = taken[pushers:]
            assert not computing or max(taken) == max(computing) <= min(computing) + 1, (joins, tiles, taken)


def too_small() -> str:
    channel = virtual_channel(2, 64, 1)
    with pytest.raises(ValueError) as caught:
        all_gather_matmul(torch.zeros(8, 16), [torch.zeros(4, 16)], channel, tile=gemms.TILE)
    return str(caught.value)


def test_too_small_a_workspace_is_refused(interpreted: WorkerPool) -> None:
    (message,) = interpreted(1).run(too_small)
    assert "needs 512 bytes per slot and 1 flags per writer, but the channel has 64 and 1" in message


def test_cost_counts_the_shards_that_arrive() -> None:
    assert all_gather_matmul_cost(8, 3, 5, 4, 2) == (240, 2 * (40 + 15 + 24 + 30))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["large", "medium", "small"])
def test_virtual_ranks_on_gpu(world: int, name: str) -> None:
    for gemm in (linear(3), linear(1, "gelu", transposed=True), derivative("silu", gated=True)):
        gemms.run_on_gpu(gemm, world, name)

"""Runs a communicating GEMM for some epochs against its reference: with one process for each rank, or virtual ranks.

Belongs here: what the tests of the fused kernels share. Workers import it with the interpreter on; `gpu` tests use the
virtual ranks on CUDA.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from channels import poison, real_channel, virtual_channel
from testing import assert_identical, assert_kernel_close, on_every_rank, poisoned_memory
from torch import Tensor

from tpformer.distributed.kernel_workspace import wrap
from tpformer.kernels.all_gather_matmul import plan
from tpformer.kernels.all_gather_matmul.kernel import gathered_copy
from tpformer.kernels.configurations import TILES
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.launch import Tile
from tpformer.kernels.protocol import Channel, bump

BEFORE_WRAP = 2**31 - 3  # two more epochs are positive as int32, then they wrap
TILE = Tile(16, 16, 16, 1, 1, False)
TMA_TILE = TILE._replace(tma=True)
CAPACITY = 1 << 17  # bytes of a slot
WRITER_FLAGS = 64
DELAY = 0.05  # seconds
PATIENCE = 60  # seconds that the shared memory's own barrier waits
# (rows per rank, N, K): one of everything, primes below and above the tile in each, three tiles of rows and of K
SHAPES = ((1, 1, 1), (5, 7, 3), (17, 23, 19), (34, 5, 40))
GPU_SHAPES = ((128, 256, 512), (200, 264, 136), (1, 8, 8), (300, 1000, 1024), (8, 256, 512))
GPU_TILES = ("large", "medium", "small")
FINISH = ("bias", "start", "residual")  # what finishes a sum; "start" is dropout's
KEY = 0xF234567887654321  # of dropout: both halves are negative as int32

Tensors = dict[str, Tensor]

# of a function, which every rank of each of these worlds calls, with kernels in Triton's interpreter
in_interpreter = partial(on_every_rank, pool="interpreted")


class Gemm(NamedTuple):
    make: Callable[[int, int, int, int, int], Tensors]
    """(rank, world, rows, N, K) -> shapes by name, as tensors on meta. There must be an "a"; "start" has integers."""
    launch: Callable[[Tensors, Channel, Tile], Sequence[Tensor | None]]
    reference: Callable[[list[Tensors]], Sequence[Sequence[Tensor | None]]]
    """All ranks' tensors -> for each rank what `launch` returns."""
    same: frozenset[str] = frozenset()
    """Names of inputs that are equal on all ranks."""
    exact: bool = True
    """Whether zeros and ones give whole numbers; then the last operation on processes is compared bit for bit."""
    piece: Callable[[int, int], int] | None = None
    """(rows, K) -> bytes of which a slot of virtual ranks holds a whole number; None: those of a row of K elements."""


def shapes(**sizes: tuple[int, ...]) -> Tensors:
    return {name: torch.empty(size, device="meta") for name, size in sizes.items()}


def finish_of(x: Tensors) -> Finish:
    """The finish made of those tensors that x has."""
    return Finish(x.get("bias"), Dropout(x["start"], KEY, 0.25) if "start" in x else None, x.get("residual"))


def sum_of_products(
    launch, reference, inputs: int, parts: Sequence[str], transposed: bool, rows_of_all: bool, **fields
) -> Gemm:
    """A GEMM whose result is the sum of so many products, and of those parts of FINISH. Each product's K is 4 more than
    that of the one before. rows_of_all: inputs have the rows of all ranks, and results those of one."""
    names = [(f"a{i}" if i else "a", f"w{i}") for i in range(inputs)]

    def make(rank: int, world: int, rows: int, n: int, k: int) -> Tensors:
        sizes = {"bias": (n,), "residual": (rows, n), "start": (rows,)}
        made = {name: sizes[name] for name in parts}
        for width, (a, w) in zip(range(k, k + 4 * inputs, 4), names, strict=True):
            made |= {a: (world * rows if rows_of_all else rows, width), w: (width, n) if transposed else (n, width)}
        return shapes(**made)

    def run(x: Tensors, channel: Channel, tile: Tile) -> list[Tensor]:
        factors = [x[a] for a, _ in names], [x[w] for _, w in names]
        with poisoned_memory():
            return [launch(*factors, channel, finish_of(x), b_transposed=transposed, tile=tile)]

    def refer(xs: list[Tensors]) -> list[list[Tensor]]:
        factors = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        return [[y] for y in reference(*factors, [finish_of(x) for x in xs], b_transposed=transposed)]

    return Gemm(make, run, refer, exact=not parts, **fields)


def make_inputs(gemm: Gemm, index: int, world: int, shape: tuple[int, int, int], binary: bool) -> list[Tensors]:
    """All ranks' float64 inputs of the index-th operation: normal, or zeros and ones, whose sums are exact."""
    generator = torch.Generator().manual_seed(index)

    def draw(name: str, like: Tensor) -> Tensor:
        if name == "start":
            return 4 * torch.randint(2**38, like.shape, generator=generator)
        if binary:
            return torch.randint(0, 2, like.shape, generator=generator).double()
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    inputs = [{name: draw(name, like) for name, like in gemm.make(r, world, *shape).items()} for r in range(world)]
    return [x | {name: inputs[0][name] for name in gemm.same} for x in inputs]


def cast(tensors: list[Tensors], dtype: torch.dtype, device: str = "cpu") -> list[Tensors]:
    return [{n: x.to(device, dtype if x.is_floating_point() else None) for n, x in t.items()} for t in tensors]


def compare(actual: Sequence[Tensor | None], gemm: Gemm, inputs: list[Tensors], rank: int, exact: bool, where) -> None:
    """Compare with the reference in float64; the reference in the inputs' own dtype gives the allowed error."""
    baseline = gemm.reference(inputs)[rank]
    oracle = gemm.reference(cast(inputs, torch.float64, inputs[0]["a"].device.type))[rank]
    for number, (x, wide, same) in enumerate(zip(actual, oracle, baseline, strict=True)):
        if exact or wide is None:
            assert_identical(x, same, f"{where} output {number}")
        else:
            assert_kernel_close(x, wide, same, f"{where} output {number}")


def on_gpu(*gemms: Gemm, sizes: Sequence = GPU_SHAPES, tiles: Sequence[str] = GPU_TILES) -> Callable[..., None]:
    """The tests of GEMMs on virtual ranks of one GPU: shapes in bfloat16, eight operations each, with each tile."""

    @pytest.mark.gpu
    @pytest.mark.parametrize("world", [2, 4, 8])
    @pytest.mark.parametrize("name", tiles)
    def test(world: int, name: str) -> None:
        options = {"capacity": 1 << 26, "flags": 1024, "repeat": 8}
        for gemm in gemms:
            run_on_virtual_ranks(gemm, world, TILES[name], torch.bfloat16, sizes, "cuda", **options)

    return test


def run_on_processes(gemm: Gemm, tile: Tile = TILE, dtype=torch.float32, sizes: Sequence = SHAPES) -> None:
    """This process's part. Each time another rank is late: before it starts, and before it poisons what it has read.

    A rank alone takes the last size, as it waits for nobody.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = sizes if world > 1 else sizes[-1:]
    _, channel = real_channel(CAPACITY, WRITER_FLAGS, BEFORE_WRAP, PATIENCE)
    for index, shape in enumerate(sizes):
        binary = gemm.exact and index == len(sizes) - 1
        inputs = cast(make_inputs(gemm, index, world, shape, binary), dtype)
        late = DELAY if index % world == rank and world > 1 else 0
        time.sleep(late)
        bump(channel)
        outputs = gemm.launch(inputs[rank], channel, tile)
        time.sleep(late)
        poison(channel, BEFORE_WRAP + 1 + index)
        compare(outputs, gemm, inputs, rank, binary, (rank, world, shape, dtype))
    assert not channel.error.any() and not channel.counters.any()


def channel_for(
    world: int, k: int, dtype, device: str, capacity: int, flags: int, piece: int | None = None, **options: int
) -> Channel:
    """A virtual channel, for rows of k elements: a TMA descriptor covers all ranks' slots as one matrix, so a slot is a
    whole number of rows, or of pieces of so many bytes."""
    piece = piece or -(-k * dtype.itemsize // 16) * 16
    return virtual_channel(world, capacity // piece * piece, flags, epoch=BEFORE_WRAP, device=device, **options)


def stacked(inputs: list[Tensors]) -> Tensors:
    """The ranks' tensors as those of one launch for all."""
    return {name: torch.cat([x[name] for x in inputs]) for name in inputs[0]}


def run_on_virtual_ranks(
    gemm: Gemm, world: int, tile: Tile, dtype: torch.dtype, sizes: Sequence, device: str = "cpu",
    capacity: int = CAPACITY, flags: int = WRITER_FLAGS, repeat: int = 1, graph: bool = False,
) -> None:  # fmt: skip
    """Run all ranks in one launch. graph: a CUDA graph of one operation, so that parities alternate between replays."""
    for number, shape in enumerate(sizes):
        piece = None if gemm.piece is None else gemm.piece(shape[0], shape[2])
        channel = channel_for(world, shape[2], dtype, device, capacity, flags, piece)
        given: Tensors = {}

        def operate(channel: Channel = channel, given: Tensors = given) -> Sequence[Tensor | None]:
            bump(channel)
            return gemm.launch(given, channel, tile)

        for index in range(repeat):
            inputs = cast(make_inputs(gemm, 100 * number + index, world, shape, False), dtype, device)
            for name, x in stacked(inputs).items():
                given[name] = given[name].copy_(x) if graph and index > 0 else x
            if graph and index == 1:  # the first operation has compiled the kernels
                operate = captured(operate)
            outputs = operate()
            for rank in range(world) if index in (0, repeat - 1) else (index % world,):
                parts = [None if x is None else x.chunk(world)[rank] for x in outputs]
                compare(parts, gemm, inputs, rank, False, (world, shape, dtype, index))
            poison(channel, BEFORE_WRAP + 1 + index)
        assert not channel.error.any() and not channel.counters.any()
        assert bool((channel.epoch == wrap(BEFORE_WRAP + repeat)).all())


def captured(operate: Callable[[], Sequence[Tensor | None]]) -> Callable[[], Sequence[Tensor | None]]:
    """The replays of a CUDA graph of an operation."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = operate()
    return lambda: graph.replay() or outputs


def check_kept_rows(launch: Callable[[Tensor, Channel], object]) -> None:
    """A gather keeps the rows of all ranks in its slot, and gathered_copy has them when the slot is used again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _, channel = real_channel(CAPACITY, WRITER_FLAGS, 0, PATIENCE)
    for epoch in (1, 2):
        shards = [torch.full((3, 5), 10.0 * epoch + r) for r in range(world)]
        bump(channel)
        launch(shards[rank], channel)
        whole = torch.cat(shards)
        assert torch.equal(channel.gathered(epoch % 2, shards[rank]), whole)
        copy = gathered_copy(channel, shards[rank])
        channel.slots[epoch % 2].zero_()
        assert torch.equal(copy, whole)


def pushers_that_join(gemm: Gemm, tile: Tile = TILE, sizes: Sequence = SHAPES[3:]) -> None:
    """The one pusher of a rank takes tiles from each of the chunks on. With several, this serial interpreter would have
    the first wait for peers that wait for the second."""
    for joins in range(dist.get_world_size() + 1):
        with mock.patch.object(plan, "plan_push", lambda work, *_, joins=joins: plan.Push(1, joins)):
            run_on_processes(gemm, tile, sizes=sizes)


def check_shares(shares: list[list[range]], pushers: int, joins: int, counts: list[int]) -> None:
    """Every tile of each chunk is taken once, none by pushers that have not joined; the others' tiles differ by one at
    most. shares: of each chunk the tiles of each program; counts: how many tiles the chunks have."""
    for step, (programs, tiles) in enumerate(zip(shares, counts, strict=True)):
        assert sorted(tile for own in programs for tile in own) == list(range(tiles)), (joins, counts, step)
        assert step >= joins or not any(programs[:pushers]), (joins, counts, step)
    taken = [sum(map(len, own)) for own in zip(*shares, strict=True)]
    computing = taken[pushers:]
    assert not computing or max(taken) == max(computing) <= min(computing) + 1, (joins, counts, taken)

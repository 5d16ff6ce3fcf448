"""matmul_all_reduce, one-shot and two-shot, equals its reference with the same bits on all ranks, and times out."""

from functools import partial

import pytest
import torch
from pool import WorkerPool

pytest.importorskip("triton")

from channels import virtual_channel
from gemms import (
    SHAPES,
    TILE,
    TMA_TILE,
    WORLDS,
    Gemm,
    run_on_processes,
    run_on_virtual_ranks,
    run_without_peer,
    shapes,
)

from tpformer.kernels.configurations import TILES
from tpformer.kernels.finish import NOTHING, Dropout, Finish
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce, plan
from tpformer.kernels.matmul_all_reduce.reference import matmul_all_reduce_cost, matmul_all_reduce_reference
from tpformer.kernels.protocol import bump

KEY = 0xF234567887654321  # both halves negative as int32
FINISH = frozenset({"bias", "residual", "start"})


def finish_of(x: dict[str, torch.Tensor]) -> Finish:
    return Finish(x["bias"], Dropout(x["start"], KEY, 0.25), x["residual"]) if "bias" in x else NOTHING


def gemm(inputs: int, finished: bool, one_shot: bool | None, transposed: bool = False) -> Gemm:
    """`rows` of a shape are all rows here."""
    names = [(f"a{i}" if i else "a", f"w{i}") for i in range(inputs)]

    def make(rank, world, rows, n, k):
        made = {}
        for i, (a, w) in enumerate(names):
            width = k + 4 * i
            made |= {a: (rows, width), w: (width, n) if transposed else (n, width)}
        return shapes(**made, **({"bias": (n,), "residual": (rows, n), "start": (rows,)} if finished else {}))

    def launch(x, channel, tile):
        return [
            matmul_all_reduce(
                [x[a] for a, _ in names], [x[w] for _, w in names], channel, finish_of(x),
                b_transposed=transposed, one_shot=one_shot, tile=tile,
            )
        ]  # fmt: skip

    def reference(xs):
        sums = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        return [[matmul_all_reduce_reference(*sums, finish_of(xs[0]), b_transposed=transposed)]] * len(xs)

    return Gemm(make, launch, reference, same=FINISH if finished else frozenset(), exact=not finished)


def processes() -> None:
    for one_shot in (True, False):
        run_on_processes(gemm(1, True, one_shot), sizes=SHAPES[:3])
        run_on_processes(gemm(2, False, one_shot, transposed=True), sizes=SHAPES[1:3])
    run_on_processes(gemm(1, False, False), TMA_TILE, torch.float16, SHAPES[2:3] * 2)


@pytest.mark.parametrize("world", WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes, timeout=120)


def bits(one_shot: bool) -> None:
    """Three-source sums of numbers of every size: equal on all ranks only if all add in one order."""
    channel = virtual_channel(3, 1 << 14, 64)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3 * 19, 24, generator=generator) * 10.0 ** torch.randint(-6, 6, (3 * 19, 1), generator=generator)
    w = torch.randn(3 * 9, 24, generator=generator)
    bump(channel)
    first, *others = matmul_all_reduce([a], [w], channel, one_shot=one_shot, tile=TILE).chunk(3)
    assert first.abs().max() > 1e4
    for other in others:
        assert torch.equal(first, other)


def virtual_ranks() -> None:
    for one_shot in (True, False):
        run_on_virtual_ranks(gemm(2, True, one_shot), 3, TILE, torch.float32, SHAPES[1:3], repeat=3)
        bits(one_shot)
    run_on_virtual_ranks(gemm(1, False, False), 2, TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks_with_equal_bits(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks, timeout=120)


def without_peer() -> list[int]:
    return run_without_peer(gemm(1, False, False))


def test_missing_peer_is_reported(interpreted: WorkerPool) -> None:
    assert interpreted(3).run(without_peer) == [[1, 2, 7, 8], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_size_rule_and_cost() -> None:
    assert plan(16, 8192, 8, torch.bfloat16, None, TILE)[:2] == (True, 16)
    assert plan(17, 8192, 8, torch.bfloat16, None, TILE)[:2] == (False, 3)
    assert matmul_all_reduce_cost(8, 3, 5, 4, 2, one_shot=True) == (240 + 24, 2 * (40 + 15 + 24 + 192))
    assert matmul_all_reduce_cost(8, 3, 5, 4, 2, one_shot=False) == (240 + 24, 2 * (40 + 15 + 24 + 96))


GPU_SHAPES = ((8, 256, 512), (200, 264, 136), (1, 8, 8), (300, 1000, 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("one_shot", [True, False])
def test_virtual_ranks_on_gpu(world: int, one_shot: bool) -> None:
    for name in ("large", "medium", "small"):
        run = partial(
            run_on_virtual_ranks, world=world, tile=TILES[name], dtype=torch.bfloat16, sizes=GPU_SHAPES, device="cuda",
            capacity=1 << 26, flags=1024, repeat=8,
        )  # fmt: skip
        run(gemm(1, True, one_shot))
        run(gemm(3, False, one_shot, transposed=True))


@pytest.mark.gpu
def test_a_thousand_epochs_on_gpu() -> None:
    run_on_virtual_ranks(
        gemm(1, True, False), 4, TILES["small"], torch.bfloat16, [(64, 128, 64)], "cuda",
        capacity=1 << 21, flags=256, repeat=1000,
    )  # fmt: skip

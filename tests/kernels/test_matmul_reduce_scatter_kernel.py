"""matmul_reduce_scatter equals its reference on processes and on virtual ranks: inputs, finishing band, timeouts."""

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
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.matmul_reduce_scatter.reference import (
    matmul_reduce_scatter_cost,
    matmul_reduce_scatter_reference,
)

KEY = 0xF234567887654321  # both halves negative as int32


def finish_of(x: dict[str, torch.Tensor]) -> Finish:
    return Finish(x["bias"], Dropout(x["start"], KEY, 0.25), x["residual"]) if "bias" in x else NOTHING


def gemm(inputs: int, finished: bool, transposed: bool = False, partial_dtype: torch.dtype | None = None) -> Gemm:
    names = [(f"a{i}" if i else "a", f"w{i}") for i in range(inputs)]

    def make(rank, world, rows, n, k):
        made = {}
        for i, (a, w) in enumerate(names):
            width = k + 4 * i
            made |= {a: (world * rows, width), w: (width, n) if transposed else (n, width)}
        if finished:
            made |= {"bias": (n,), "residual": (rows, n), "start": (rows,)}
        return shapes(**made)

    def launch(x, channel, tile):
        return [
            matmul_reduce_scatter(
                [x[a] for a, _ in names], [x[w] for _, w in names], channel, finish_of(x),
                b_transposed=transposed, partial=partial_dtype, tile=tile,
            )
        ]  # fmt: skip

    def reference(xs):
        sums = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        results = matmul_reduce_scatter_reference(*sums, [finish_of(x) for x in xs], b_transposed=transposed)
        return [[y] for y in results]

    return Gemm(make, launch, reference, exact=not finished)


def processes() -> None:
    run_on_processes(gemm(1, finished=True))
    run_on_processes(gemm(3, finished=False, transposed=True))
    run_on_processes(gemm(2, finished=True), TMA_TILE, sizes=SHAPES[2:3] * 2)
    run_on_processes(gemm(1, finished=False, partial_dtype=torch.float32), dtype=torch.float16, sizes=SHAPES[1:3])


@pytest.mark.parametrize("world", WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes, timeout=120)


def virtual_ranks() -> None:
    run_on_virtual_ranks(gemm(2, finished=True), 3, TILE, torch.float32, SHAPES[1:3], repeat=3)
    run_on_virtual_ranks(gemm(1, finished=False), 2, TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks, timeout=120)


def without_peer() -> list[int]:
    return run_without_peer(gemm(1, finished=False))


def test_missing_peer_is_reported(interpreted: WorkerPool) -> None:
    assert interpreted(3).run(without_peer) == [[1, 2, 7, 8], [0, 0, 0, 0], [0, 0, 0, 0]]


def too_small() -> str:
    with pytest.raises(ValueError) as caught:
        matmul_reduce_scatter([torch.zeros(8, 16)], [torch.zeros(40, 16)], virtual_channel(1, 64, 8), tile=TILE)
    return str(caught.value)


def test_too_small_a_workspace_is_refused(interpreted: WorkerPool) -> None:
    (message,) = interpreted(1).run(too_small)
    assert "needs 3072 bytes per slot and 1 flags per writer, but the channel has 64 and 8" in message


def test_cost_counts_partials_once_out_and_once_in() -> None:
    assert matmul_reduce_scatter_cost(8, 3, 5, 4, 2) == (240 + 24, 2 * (40 + 15 + 6) + 4 * 24)


GPU_SHAPES = ((128, 256, 512), (200, 264, 136), (1, 8, 8), (300, 1000, 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["large", "medium", "small"])
def test_virtual_ranks_on_gpu(world: int, name: str) -> None:
    run = partial(
        run_on_virtual_ranks, world=world, tile=TILES[name], dtype=torch.bfloat16, sizes=GPU_SHAPES, device="cuda",
        capacity=1 << 26, flags=256, repeat=8,
    )  # fmt: skip
    run(gemm(1, finished=True))
    run(gemm(3, finished=False, transposed=True))
    run(gemm(1, finished=False, partial_dtype=torch.float32))


@pytest.mark.gpu
def test_a_thousand_epochs_on_gpu() -> None:
    run_on_virtual_ranks(
        gemm(1, finished=True), 4, TILES["small"], torch.bfloat16, [(64, 128, 64)], "cuda",
        capacity=1 << 20, flags=64, repeat=1000,
    )  # fmt: skip

"""matmul_reduce_scatter equals its reference on processes and on virtual ranks: inputs, finishing band, timeouts."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations

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
from testing import assert_kernel_close, poisoned_memory

from tpformer.kernels.configurations import TILES
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter, matmul_reduce_scatter_space
from tpformer.kernels.matmul_reduce_scatter.reference import (
    matmul_reduce_scatter_cost,
    matmul_reduce_scatter_reference,
)
from tpformer.kernels.norm.reference import Norm, norm_forward
from tpformer.kernels.protocol import bump

KEY = 0xF234567887654321  # both halves negative as int32


EPS = 1e-5
FINISH = ("bias", "start", "residual")  # start: dropout's
NORMS = ("layernorm", "rmsnorm")
NORM_SHAPES = ((1, 1, 1), (5, 7, 3), (17, 90, 4))  # rows per rank, N, K; 90: two turns of the norm's second pass


def finish_of(x: dict[str, torch.Tensor], norm: str = "") -> Finish:
    """Before a norm the residual is about 8: means near 0 would have no precision."""
    dropout = Dropout(x["start"], KEY, 0.25) if "start" in x else None
    if not norm:
        return Finish(x.get("bias"), dropout, x.get("residual"))
    residual = x["residual"] + 8 if "residual" in x else None
    return Finish(x.get("bias"), dropout, residual, Norm(norm, x["norm_weight"], x.get("norm_bias"), EPS))


def flat(results) -> list[torch.Tensor | None]:
    """z, or z, y, mean, rstd; all in z's dtype, as z's own error is in all of them."""
    if isinstance(results, torch.Tensor):
        return [results]
    z, y, (mean, rstd) = results
    return [z, y, None if mean is None else mean.to(z.dtype), rstd.to(z.dtype)]


def gemm(
    inputs: int,
    parts: Sequence[str] = (),
    transposed: bool = False,
    partial_dtype: torch.dtype | None = None,
    norm: str = "",
) -> Gemm:
    """parts: what there is of FINISH, and "norm_bias"."""
    names = [(f"a{i}" if i else "a", f"w{i}") for i in range(inputs)]

    def make(rank, world, rows, n, k):
        made = {}
        for i, (a, w) in enumerate(names):
            width = k + 4 * i
            made |= {a: (world * rows, width), w: (width, n) if transposed else (n, width)}
        sizes = {"bias": (n,), "residual": (rows, n), "start": (rows,), "norm_weight": (n,), "norm_bias": (n,)}
        return shapes(**made, **{name: sizes[name] for name in (*parts, *(["norm_weight"] if norm else []))})

    def launch(x, channel, tile):
        with poisoned_memory():
            return flat(
                matmul_reduce_scatter(
                    [x[a] for a, _ in names], [x[w] for _, w in names], channel, finish_of(x, norm),
                    b_transposed=transposed, partial=partial_dtype, tile=tile,
                )
            )  # fmt: skip

    def reference(xs):
        sums = [[[x[name[part]] for name in names] for x in xs] for part in (0, 1)]
        finishes = [finish_of(x, norm) for x in xs]
        return [flat(y) for y in matmul_reduce_scatter_reference(*sums, finishes, b_transposed=transposed)]

    return Gemm(make, launch, reference, exact=not parts and not norm)


def processes() -> None:
    run_on_processes(gemm(1, FINISH))
    run_on_processes(gemm(3, transposed=True))
    run_on_processes(gemm(2, FINISH), TMA_TILE, sizes=SHAPES[2:3] * 2)
    run_on_processes(gemm(1, partial_dtype=torch.float32), dtype=torch.float16, sizes=SHAPES[1:3])


@pytest.mark.parametrize("world", WORLDS)
def test_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(processes, timeout=120)


def virtual_ranks() -> None:
    run_on_virtual_ranks(gemm(2, FINISH), 3, TILE, torch.float32, SHAPES[1:3], repeat=3)
    run_on_virtual_ranks(gemm(1), 2, TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)


def test_on_virtual_ranks(interpreted: WorkerPool) -> None:
    interpreted(1).run(virtual_ranks, timeout=120)


def norms_on_processes() -> None:
    run_on_processes(gemm(1, (*FINISH, "norm_bias"), norm="layernorm"), sizes=NORM_SHAPES)
    run_on_processes(gemm(2, ("residual",), norm="rmsnorm"), TMA_TILE, torch.float16, NORM_SHAPES[2:])


@pytest.mark.parametrize("world", WORLDS[1:])
def test_norms_on_processes(interpreted: WorkerPool, world: int) -> None:
    interpreted(world).run(norms_on_processes, timeout=120)


def norms_on_virtual_ranks(norm: str, every: bool) -> None:
    """With all and with nothing before the norm, or all combinations; with and without its bias."""
    optional = (*FINISH, "norm_bias") if norm == "layernorm" else FINISH
    counts = range(len(optional) + 1) if every else (0, len(optional))
    for parts in (parts for count in counts for parts in combinations(optional, count)):
        run_on_virtual_ranks(gemm(1, parts, norm=norm), 2, TILE, torch.float32, NORM_SHAPES[1:2])
    run_on_virtual_ranks(gemm(1, optional, norm=norm), 3, TMA_TILE, torch.float16, [(1, 36, 16)], repeat=2)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["some", "all"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_on_virtual_ranks(interpreted: WorkerPool, norm: str, every: bool) -> None:
    interpreted(1).run(norms_on_virtual_ranks, norm, every, timeout=120)


def normalised(norm: Norm, offset: float, spread: float = 1.0, tile: Tile = TILE, rows: int = 5):
    """(z, y, (mean, rstd)) of a group of one rank, z = offset + spread * normal, in the norm's dtype."""
    n, k, like = len(norm.weight), 16, norm.weight
    x, weight = (torch.randn(size, k, generator=torch.Generator().manual_seed(size)).to(like) for size in (rows, n))
    space = matmul_reduce_scatter_space(rows, n, 1, like.dtype, tile)
    channel = virtual_channel(1, *space, device=like.device.type)
    bump(channel)
    finish = Finish(residual=like.new_full((rows, n), offset), norm=norm)
    with poisoned_memory():
        return matmul_reduce_scatter([x], [weight * (spread / k**0.5)], channel, finish, tile=tile)


def check_statistics(kind: str, offset: float, weight: torch.Tensor, tile: Tile = TILE, rows: int = 5) -> None:
    """The norm and its statistics are those of z as it is stored, which its rounding may have moved far."""
    norm = Norm(kind, weight, None, EPS)
    z, y, statistics = normalised(norm, offset, tile=tile, rows=rows)
    wide_y, wide = norm_forward(z.double(), norm._replace(weight=weight.double()))
    same_y, same = norm_forward(z, norm)
    assert_kernel_close(y, wide_y, same_y, f"{kind} {offset} {z.dtype}: y")
    for name, actual, oracle, baseline in zip(("mean", "rstd"), statistics, wide, same, strict=True):
        if oracle is None:
            assert actual is None
        else:
            assert_kernel_close(actual, oracle, baseline, f"{kind} {offset} {z.dtype}: {name}")


def statistics_of_what_is_stored() -> None:
    for kind in NORMS:
        check_statistics(kind, 300.0, torch.linspace(-1, 2, 90, dtype=torch.float16))
        check_statistics(kind, -3e4, torch.linspace(-1, 2, 90))
    # 128 blocks of as many columns: rounded near their sums, the squares would be off by more than torch's are
    check_statistics(
        "layernorm", 300.0, torch.linspace(-1, 2, 2**14, dtype=torch.float16), Tile(8, 128, 16, 1, 1, False)
    )


def test_statistics_are_those_of_what_is_stored(interpreted: WorkerPool) -> None:
    interpreted(1).run(statistics_of_what_is_stored)


def equal_columns() -> None:
    weight = torch.linspace(-1, 2, 90)
    _, y, (mean, rstd) = normalised(Norm("layernorm", weight, weight, 1.0), 3.0, spread=0.0)
    assert torch.equal(y, weight.expand(5, 90)) and bool((mean == 3).all()) and bool((rstd == 1).all())
    _, y, (mean, rstd) = normalised(Norm("rmsnorm", weight, None, 7.0), 3.0, spread=0.0)
    assert torch.equal(y, (0.75 * weight).expand(5, 90)) and mean is None and bool((rstd == 0.25).all())


def test_rows_of_equal_columns_are_exact(interpreted: WorkerPool) -> None:
    interpreted(1).run(equal_columns)


def without_peer() -> list[int]:
    return run_without_peer(gemm(1))


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


def test_cost_of_a_norm_is_without_reading_its_input() -> None:
    plain = matmul_reduce_scatter_cost(8, 3, 5, 4, 2)
    for norm, flops, statistics in (("layernorm", 7, 16), ("rmsnorm", 4, 8)):
        cost = matmul_reduce_scatter_cost(8, 3, 5, 4, 2, norm=norm)
        assert cost == (plain.flops + flops * 6, plain.bytes + 2 * 6 + statistics + 2 * 3 * 2)


GPU_SHAPES = ((128, 256, 512), (200, 264, 136), (1, 8, 8), (300, 1000, 1024))


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["large", "medium", "small"])
def test_virtual_ranks_on_gpu(world: int, name: str) -> None:
    run = partial(
        run_on_virtual_ranks, world=world, tile=TILES[name], dtype=torch.bfloat16, sizes=GPU_SHAPES, device="cuda",
        capacity=1 << 26, flags=256, repeat=8,
    )  # fmt: skip
    run(gemm(1, FINISH))
    run(gemm(3, transposed=True))
    run(gemm(1, partial_dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("large", torch.bfloat16),
        ("medium", torch.float16),
        ("small", torch.bfloat16),
        ("exact", torch.float32),
    ],
)
def test_norms_on_gpu(name: str, dtype: torch.dtype, norm: str) -> None:
    run = partial(
        run_on_virtual_ranks, world=4, tile=TILES[name], dtype=dtype, device="cuda", capacity=1 << 26, flags=256,
        repeat=4,
    )  # fmt: skip
    sizes = [(130, 1000, 136), (256, 4096, 512), (64, 16384, 64)]
    run(gemm(1, ("residual",), norm=norm), sizes=sizes)
    run(gemm(1, (*FINISH, "norm_bias") if norm == "layernorm" else FINISH, norm=norm), sizes=[(1, 8, 8), *sizes])
    for n, rows in ((4096, 300), (16384, 9)):
        for offset in (8.0, 300.0):  # a mean near 0 would have to be exact
            check_statistics(norm, offset, torch.randn(n, device="cuda").to(dtype), TILES[name], rows)


@pytest.mark.gpu
def test_a_thousand_epochs_on_gpu() -> None:
    run_on_virtual_ranks(
        gemm(1, FINISH), 4, TILES["small"], torch.bfloat16, [(64, 128, 64)], "cuda",
        capacity=1 << 20, flags=64, repeat=1000,
    )  # fmt: skip

"""matmul and matmul_derivative equal their references: layouts, epilogues, odd shapes, exact integers."""

from types import SimpleNamespace

import pytest
import torch
from pool import WorkerPool
from testing import assert_kernel_close

pytest.importorskip("triton")

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.configurations import (
    TILES,
    WAVES,
    narrow_tile_names,
    select_local_tile,
    select_tile,
    tile_names,
)
from tpformer.kernels.launch import Tile, resident_programs
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul.reference import (
    matmul_derivative_reference,
    matmul_reference,
)

TILE = Tile(16, 16, 16, 1, 1, False)
SHAPES = ((1, 1, 1), (3, 1, 7), (17, 37, 19), (16, 32, 48), (3, 5, 600))  # (m, n, k); 600 is many tiles long


def draw(index: int, dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


def close(actual, reference, *arguments, **options) -> None:
    """Compare every output of the kernel with the reference in float64 and in the kernel's dtype."""
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
    oracles, baselines = reference(*wide, **options), reference(*arguments, **options)
    if isinstance(actual, torch.Tensor):
        actual, oracles, baselines = [actual], [oracles], [baselines]
    for number, (x, oracle, baseline) in enumerate(zip(actual, oracles, baselines, strict=True)):
        if oracle is None:
            assert x is None
        else:
            assert_kernel_close(x, oracle, baseline, f"{reference.__name__} output {number} {options}")


def layouts(m: int, n: int, k: int, dtype: torch.dtype, device: str, tile: Tile) -> None:
    a, at, w, wt = draw(m, dtype, device, (m, k), (k, m), (n, k), (k, n))
    close(matmul(a, [w], tile=tile)[0], matmul_reference, a, w)
    close(matmul(a, [wt], b_transposed=True, tile=tile)[0], matmul_reference, a, wt, b_transposed=True)
    close(
        matmul(at, [wt], a_transposed=True, b_transposed=True, tile=tile)[0],
        matmul_reference, at, wt, a_transposed=True, b_transposed=True,
    )  # fmt: skip


def epilogues(
    m: int, n: int, k: int, dtype: torch.dtype, device: str, tile: Tile, activations=(None, *ACTIVATIONS)
) -> None:
    widths = (n, n + 5, max(1, n // 2))
    a, x, gate, wt, *rest = draw(m + 1, dtype, device, (m, k), (m, n), (m, n), (k, n), *[(w, k) for w in widths])
    biases = draw(m + 2, dtype, device, *[(w,) for w in widths])
    for activation in activations:
        outputs = matmul(a, rest, biases, activation=activation, tile=tile)
        for y, w, bias in zip(outputs, rest, biases, strict=True):
            close(y, matmul_reference, a, w, bias, activation=activation)
        if activation is not None:
            for given in (None, gate):
                actual = matmul_derivative(a, wt, x, activation, given, tile=tile)
                close(actual, matmul_derivative_reference, a, wt, x, activation, given)


def all_cases() -> None:
    """Every layout in every shape, and every activation in one of them."""
    for shape, activation in zip(SHAPES, (None, *ACTIVATIONS), strict=True):
        layouts(*shape, torch.float32, "cpu", TILE)
        epilogues(*shape, torch.float32, "cpu", TILE, [activation])
    layouts(17, 37, 19, torch.float16, "cpu", TILE._replace(tma=True))
    epilogues(16, 24, 8, torch.float16, "cpu", TILE._replace(tma=True), [None, "silu"])


def test_kernels_match_references(interpreted: WorkerPool) -> None:
    interpreted(1).run(all_cases)


def exact_and_strided() -> None:
    """Sums of zeros and ones are exact. Operands are columns of larger matrices, whose other columns are NaN."""
    wide = torch.full((19, 40), float("nan"))
    a, w = wide[:, 3:20], torch.full((23, 30), float("nan"))[:, :17]
    a.copy_(torch.randint(0, 2, (19, 17)))
    w.copy_(torch.randint(0, 2, (23, 17)))
    for tma in (False, True):
        assert torch.equal(matmul(a, [w], tile=TILE._replace(tma=tma))[0], a @ w.t())


def test_zeros_and_ones_are_exact_in_strided_operands(interpreted: WorkerPool) -> None:
    interpreted(1).run(exact_and_strided)


def test_configurations_are_few_and_used(monkeypatch) -> None:
    assert len(TILES) <= 24
    kinds = [(capability, size) for capability in (80, 90, 100) for size in (2, 4)]
    used = {name for kind in kinds for name in tile_names(*kind)}
    narrow = {name for kind in kinds for name in narrow_tile_names(*kind)}  # for few rows
    assert used | narrow | {"interpreted"} == set(TILES) and used == set(WAVES)
    sm = SimpleNamespace(multi_processor_count=1, shared_memory_per_multiprocessor=228 << 10)  # of an H100
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sm)
    for name in used:
        assert len(WAVES[name]) <= resident_programs(torch.device("cuda"), TILES[name])


@pytest.mark.parametrize(
    ("arguments", "options", "expected"),
    [
        ((1024, 4096), {}, "large"),  # one wave of 128 tiles, against two of the medium ones
        ((4096, 1280), {}, "medium"),  # 160 large tiles would take two waves for little more than one
        ((2048, 512), {}, "small"),  # one per SM
        ((2048, 4608), {}, "large"),  # three waves of 288 tiles against five
        ((128, 13312), {}, "small"),  # decoding
        ((16384, 512, 128, 128), {}, "medium"),  # two weights have 128 columns, half of a large tile's
        ((128, 4096), {"chunks": 8}, "large"),  # one launch for all chunks
        ((8, 4096), {"chunks": 32}, "small"),  # a large tile would pad 8 rows to 128
        ((4096, 4096), {"operands": 3}, "medium"),
    ],
)
def test_the_tile_with_the_shortest_waves_is_picked(h100, arguments, options, expected) -> None:
    """The first five were the fastest on an H100 (bench/results); the others follow from the model."""
    assert select_tile(h100, torch.bfloat16, *arguments, **options) == TILES[expected]
    assert select_tile(h100, torch.float32, *arguments, **options) == TILES["exact"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 13312), "narrow"),  # 208 programs; 104 of the small tile
        ((8, 768, 128, 128), "narrowest"),  # 32 programs are all that there can be
        ((128, 8192), "small"),
        ((129, 13312), "large"),
    ],
)
def test_a_gemm_of_few_rows_gives_each_sm_a_program(h100, arguments, expected) -> None:
    assert select_local_tile(h100, torch.bfloat16, *arguments) == TILES[expected]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", TILES)
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    capability = 10 * torch.cuda.get_device_capability()[0]
    if name not in tile_names(capability, dtype.itemsize):
        pytest.skip(f"{name} is not for sm_{capability} and {dtype}")
    for shape in (*SHAPES, (300, 520, 136), (1024, 768, 2048)):
        layouts(*shape, dtype, "cuda", TILES[name])
        epilogues(*shape, dtype, "cuda", TILES[name])

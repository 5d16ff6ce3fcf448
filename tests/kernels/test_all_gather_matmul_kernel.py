"""all_gather_matmul equals its reference on processes and on virtual ranks, with every number of weights and
epilogue."""

import gemms
import pytest
import torch
from turns import in_turns

from tpformer.kernels.all_gather_matmul.kernel import all_gather_matmul, all_gather_matmul_derivative, walk
from tpformer.kernels.all_gather_matmul.reference import all_gather_matmul_derivative_reference as derivative_formula
from tpformer.kernels.all_gather_matmul.reference import all_gather_matmul_reference as formula


def linear(weights: int, activation: str | None = None, transposed: bool = False, **options) -> gemms.Gemm:
    names = [(f"w{i}", f"bias{i}") for i in range(weights)]
    form = {"activation": activation, "b_transposed": transposed}

    def make(rank, world, rows, n, k):
        made = {"a": (rows, k)}
        for i, (w, bias) in enumerate(names):
            made |= {w: (k, n + 4 * i) if transposed else (n + 4 * i, k), bias: (n + 4 * i,)}
        return gemms.shapes(**made)

    def launch(x, channel, tile):
        weights, biases = [x[w] for w, _ in names], [x[bias] for _, bias in names]
        return all_gather_matmul(x["a"], weights, channel, biases, **form, tile=tile, **options)

    def reference(xs):
        weights, biases = ([[x[pair[part]] for pair in names] for x in xs] for part in (0, 1))
        return formula([x["a"] for x in xs], weights, biases, **form)

    return gemms.Gemm(make, launch, reference, exact=activation is None)


def derivative(activation: str, gated: bool) -> gemms.Gemm:
    def make(rank, world, rows, n, k):
        full = (world * rows, n)
        return gemms.shapes(a=(rows, k), w=(k, n), x=full, **({"gate": full} if gated else {}))

    def launch(x, channel, tile):
        return all_gather_matmul_derivative(x["a"], x["w"], channel, x["x"], activation, x.get("gate"), tile=tile)

    def reference(xs):
        columns = [[x.get(name) for x in xs] for name in ("a", "w", "x", "gate")]
        return derivative_formula(*columns[:3], activation, columns[3])

    return gemms.Gemm(make, launch, reference, exact=False)


@gemms.in_interpreter(2, *in_turns([4, 1], first=3))
def test_on_processes() -> None:
    gemms.run_on_processes(linear(3, "gelu"))
    gemms.run_on_processes(linear(2), gemms.TMA_TILE, torch.float16, gemms.SHAPES[1:3])
    gemms.run_on_processes(linear(1, transposed=True), sizes=gemms.SHAPES[2:3])
    gemms.run_on_processes(derivative("gelu_tanh", gated=False), sizes=gemms.SHAPES[1:3])
    gemms.run_on_processes(derivative("silu", gated=True), sizes=gemms.SHAPES[2:3] * 2)


@gemms.in_interpreter(1)
def test_on_virtual_ranks() -> None:
    gemms.run_on_virtual_ranks(linear(2, "silu"), 3, gemms.TILE, torch.float32, gemms.SHAPES[2:3], repeat=3)
    gemms.run_on_virtual_ranks(linear(1), 2, gemms.TMA_TILE, torch.float32, [(17, 36, 16)], repeat=2)
    gemms.run_on_virtual_ranks(derivative("gelu", gated=False), 2, gemms.TILE, torch.float32, gemms.SHAPES[1:2])


@gemms.in_interpreter(2)
def test_pushers_join() -> None:
    gemms.pushers_that_join(linear(2))


@gemms.in_interpreter(3)
def test_gathered_rows_are_kept_on_request() -> None:
    w = torch.ones(2, 5)
    gemms.check_kept_rows(lambda a, channel: all_gather_matmul(a, [w], channel, keep=True, tile=gemms.TILE))


test_virtual_ranks_on_gpu = gemms.on_gpu(linear(3), linear(1, "gelu", transposed=True), derivative("silu", gated=True))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_tile_is_walked_once(world: int) -> None:
    for programs, pushers in ((1, 1), (2, 1), (3, 1), (5, 2), (7, 3), (4, 0)):
        for joins in range(world + 1 if programs > pushers else 1):
            for tiles in range(1, 2 * programs + 2):
                ways = [[walk.fn(program, programs, pushers, joins, step, tiles) for program in range(programs)]
                        for step in range(world)]  # fmt: skip
                shares = [[range(first, tiles, distance) for first, distance in each] for each in ways]
                gemms.check_shares(shares, pushers, joins, [tiles] * world)

"""Linears in FP8 compute the recipe of docs/fp8.md on any number of ranks, from the same blocks, and gather 129 bytes
for 128 values. The recipe here has a quantiser of its own, which looks numbers up in the list of all that e4m3 has."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import shards
import torch
import torch.distributed as dist
import torch.nn.functional as F
from linears import Column, Row
from opened import opened
from pool import WorkerPool
from shards import Case, Here, check, inputs_of, on_ranks, on_transport, plain
from testing import differ_on_a_rank, on_every_rank
from torch import Tensor

from checks.quantized_blocks import digests
from tpformer import ops
from tpformer.kernels.quantize import reference
from tpformer.kernels.quantize.format import Blocks
from tpformer.ops.transports import quantized
from tpformer.ops.transports.pipelined import Pipelined
from tpformer.ops.transports.products import rows_of
from tpformer.ops.transports.quantized import Quantized, record_blocks
from tpformer.ops.transports.sequential import Sequential


@cache
def grid() -> Tensor:
    """The magnitudes of e4m3, in order: multiples of 2**-9 up to 2**-6, then eight in each octave up to 448."""
    normal = [(8 + m) * 2.0 ** (e - 3) for e, m in product(range(-6, 9), range(8))]
    return torch.tensor([m * 2.0**-9 for m in range(8)] + normal[:-1], dtype=torch.float64)


def nearest(x: Tensor) -> Tensor:
    """The nearest of the grid, with x's sign; of two as near the one at an even place."""
    size = x.abs()
    above = torch.searchsorted(grid(), size).clamp(max=len(grid()) - 1)
    below = (above - 1).clamp(min=0)
    far, near = grid()[above] - size, size - grid()[below]
    up = (far < near) | ((far == near) & (above % 2 == 0))
    return torch.copysign(torch.where(up, grid()[above], grid()[below]), x)


def rounded(x: Tensor, *block: int) -> Tensor:
    """x with each of its blocks (rows, columns) rounded to e4m3 at the smallest power of two that lets it fit."""
    m, k = (size // each for size, each in zip(x.shape, block, strict=True))
    cells = x.double().reshape(m, block[0], k, block[1])
    amax = cells.abs().amax((1, 3), keepdim=True)
    scale = torch.ones_like(amax) * 2.0**-120
    while (large := amax / scale > 448).any():
        scale = torch.where(large, 2 * scale, scale)
    return (nearest(cells / scale) * scale).reshape(x.shape).to(x.dtype)


class Recipe(torch.autograd.Function):
    """x W^T + b by rounded x and W; both gradients by rounded dy, the weight's by the same rounded x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = rounded(x, 1, 128), rounded(weight, 128, 128)
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        (dy,), (x, weight) = dys, ctx.saved_tensors
        small = rounded(dy, 1, 128)
        return small @ weight, small.t() @ x, dy.sum(0)


linear = F.linear


def recipe(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return Recipe.apply(x, weight, torch.zeros_like(weight[:, 0]) if bias is None else bias)


class InFp8:
    """A linear whose plain form is the recipe's, and which sends blocks."""

    def plain(self, x: Tensor, *args: Any, **given: Any) -> dict[str, Tensor]:
        with mock.patch.object(F, "linear", recipe):
            return super().plain(x, *args, **given)  # type: ignore[misc]

    def calls(self, itemsize: int) -> Any:
        return sent_as_blocks(super().calls(itemsize), itemsize)  # type: ignore[misc]


class Fp8Column(InFp8, Column):
    """column_linear in FP8."""


class Fp8Row(InFp8, Row):
    """row_linear in FP8."""


def sent_as_blocks(calls: Any, itemsize: int) -> Any:
    """The collectives with 129 bytes for each 128 values of a gather: 129 / 256 = 0.504 of 16 bits."""
    return tuple(
        [(name, nbytes // itemsize // 128 * 129 if name == "all_gather" else nbytes) for name, nbytes in some]
        for some in calls
    )


def cases(t: int) -> list[Fp8Column | Fp8Row]:
    """One rank's features are 128 or 256. Rows of a rank: 1, 3, 4."""
    wide, t4 = 256, 512 // t
    return [
        Fp8Column(t, 3, wide, (t4,), ("layernorm", True)),
        Fp8Column(t, 1, wide, (t4, 128, 256), ("rmsnorm", False), carry=True),
        Fp8Column(t, 4, 128, (128,), sequence_parallel=False),
        Fp8Row(t, 4, t4, 256, ("silu", True)),
        Fp8Row(t, 3, 128, 128, ("gelu_tanh", False), drop=False, residual=False),
        Fp8Row(t, 4, 256, 128, sequence_parallel=False),
    ]


SEQUENTIAL, PIPELINED, FUSED = "quantized sequential", "quantized pipelined", "quantized fused"


@pytest.mark.parametrize("t, transport", [(1, SEQUENTIAL), *product((2, 4), (SEQUENTIAL, PIPELINED))])
def test_any_number_of_ranks_computes_the_recipe(ranks: WorkerPool, t: int, transport: str) -> None:
    check(partial(ranks(t).run, on_transport, transport), cases(t), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_by_the_error_of_the_recipe(ranks: WorkerPool, dtype: torch.dtype) -> None:
    """What is quantised is given, so it has the same blocks in every dtype."""
    given = [Fp8Column(2, 3, 256, (128,)), Fp8Row(2, 4, 128, 128, drop=False, residual=False)]
    check(partial(ranks(2).run, on_transport, SEQUENTIAL), given, dtype)
    check(partial(ranks(2).run, on_transport, PIPELINED), given, dtype)


def whole(t: int) -> list[Fp8Column | Fp8Row]:
    """Cases whose sizes of all ranks together are the same for every t."""
    return [
        Fp8Column(t, 12 // t, 256, (512 // t, 1024 // t), ("layernorm", True), carry=True),
        Fp8Row(t, 12 // t, 512 // t, 256, ("silu", True)),
        Fp8Row(t, 12 // t, 512 // t, 128, sequence_parallel=False),
    ]


def blocks_of(cases: Sequence[Case], dtype: torch.dtype) -> list[frozenset[bytes]]:
    """What this rank quantises in each case, forward and backward."""
    found = []
    for case in cases:
        with record_blocks() as made:
            on_ranks([case], dtype)
        found.append(digests(made))
    return found


def test_ranks_quantise_the_blocks_of_one_process(ranks: WorkerPool) -> None:
    (one,) = ranks(1).run(on_transport, SEQUENTIAL, blocks_of, whole(1), torch.float64)
    assert all(len(blocks) > 60 for blocks in one)
    for t, transport in product((2, 4), (SEQUENTIAL, PIPELINED)):
        by_rank = ranks(t).run(on_transport, transport, blocks_of, whole(t), torch.float64)
        assert [frozenset().union(*some) for some in zip(*by_rank, strict=True)] == one


ROWS = torch.randn(8, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS *= 2.0 ** torch.arange(-40, 40, 5).view(8, 2).repeat_interleave(128, 1)  # each block has a scale of its own


def own_exponents(rows: Tensor) -> Blocks:
    """A receiver that takes its own rows' exponents for everyone's."""
    values, exponents = unpacked_rows(rows)
    own = exponents.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return Blocks(values, own.repeat(1, dist.get_world_size()))


def exponents_by_row(rows: Tensor) -> Blocks:
    """A receiver that takes the exponents of (M, K / 128) for those of (K / 128, M)."""
    values, exponents = unpacked_rows(rows)
    return Blocks(values, exponents.t().reshape(exponents.shape).contiguous())


def no_exponents(rows: Tensor) -> Blocks:
    values, exponents = unpacked_rows(rows)
    return Blocks(values, torch.zeros_like(exponents))


unpacked_rows = quantized.unpacked_rows
GATHERS: dict[str, Callable] = {
    "right": unpacked_rows,
    "own exponents": own_exponents,
    "exponents by row": exponents_by_row,
    "no exponents": no_exponents,
}


@on_every_rank(2)
def test_gathered_rows_are_what_their_ranks_quantised() -> None:
    x = ROWS.chunk(2)[dist.get_rank()]
    for (name, function), transport in product(GATHERS.items(), (SEQUENTIAL, PIPELINED)):
        with mock.patch.object(quantized, "unpacked_rows", function):
            gathered = opened(dist.group.WORLD, x, transport=transport).start_gather(x)()
        found = reference.dequantize(gathered, torch.float64)
        assert torch.equal(found, rounded(ROWS, 1, 128)) == (name == "right"), name


@on_every_rank(2)
def test_chunks_are_the_rows_of_their_ranks() -> None:
    """Each with its own exponents, as it arrives, and of a reduction as it leaves."""
    x = ROWS.chunk(2)[dist.get_rank()]
    transport = opened(dist.group.WORLD, x, transport=PIPELINED)
    assert isinstance(transport, Pipelined)
    gathered, chunks = transport.arriving(x)
    found = torch.empty_like(ROWS)
    for rows, chunk in chunks:
        found[rows] = reference.dequantize(chunk, torch.float64)
    assert torch.equal(found, rounded(ROWS, 1, 128))
    whole = reference.quantize_rows(ROWS)
    for some in (slice(3, 7), torch.tensor([5, 0, 5]), slice(0, 0)):
        assert torch.equal(reference.dequantize(rows_of(whole, some), torch.float64), rounded(ROWS, 1, 128)[some])


@on_every_rank(2)
def test_ranks_of_two_precisions_are_told_so() -> None:
    """Before one takes the other's numbers for bytes."""
    x = ROWS.chunk(2)[dist.get_rank()]
    transport = opened(dist.group.WORLD, x, transport=SEQUENTIAL if dist.get_rank() else "sequential")
    with pytest.raises(RuntimeError, match="column_linear.*quantized"):
        ops.column_linear(x, torch.ones(128, 256, dtype=torch.float64), transport=transport)


def of_one_scale(x: Tensor) -> Blocks:
    """Blocks with the largest scale of them all, as one scale a matrix gives."""
    exponents = quantize_rows(x).exponents
    exponent = int(exponents.max())
    return Blocks(nearest(x * 2.0**-exponent).to(torch.float8_e4m3fn), torch.full_like(exponents, exponent))


def cut_off(x: Tensor | Blocks) -> Blocks:
    """Blocks whose values have lost their last bit."""
    values, exponents = x if isinstance(x, Blocks) else quantize_rows(x)
    return Blocks((values.view(torch.uint8) & 0xFE).view(values.dtype), exponents)


quantize_rows, quantize_weight = reference.quantize_rows, reference.quantize_weight
twice = reference.quantize_weight_twice
MISTAKES: dict[str, tuple[Any, str, Callable]] = {
    "right": (reference, "quantize_rows", quantize_rows),
    "rows share a scale": (reference, "quantize_rows", of_one_scale),
    "what the operation quantises loses a bit": (Quantized, "factor", lambda self, x: cut_off(x)),
    "what is gathered loses a bit": (Sequential, "_gathered", lambda self, x: cut_off(x)),
    "a weight forgets its scales": (
        reference, "quantize_weight", lambda w: Blocks(quantize_weight(w).values, 0 * quantize_weight(w).exponents)
    ),
    "the gradient of the input takes the weight as it stood": (
        reference, "quantize_weight_twice", lambda w: (twice(w)[0], twice(w.flip(0))[1])
    ),
    "the weight gradient forgets the scales": (
        Quantized, "matrix", lambda self, factor, dtype: factor.values.to(dtype)
    ),
}  # fmt: skip


@on_every_rank(1)
def test_what_is_quantised_otherwise_is_noticed() -> None:
    """Values of widely different sizes, so that a block's scale matters."""
    case = Fp8Row(1, 128, 256, 128, ("silu", True), drop=False, residual=False)
    sizes = 2.0 ** torch.arange(-64, 64, dtype=torch.float64)[:, None]
    made = inputs_of(case, torch.float64)
    made["x"] *= sizes
    with mock.patch.object(shards, "inputs_of", lambda *_: made), mock.patch.object(Here, "transport", SEQUENTIAL):
        expected = plain(case, torch.float64)
        for name, mistake in MISTAKES.items():
            with mock.patch.object(*mistake):
                ((found, _),) = on_ranks([case], torch.float64)
            assert differ_on_a_rank(found, expected) == (name != "right"), name

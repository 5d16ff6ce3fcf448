"""all_gather_quantized_matmul: the column-parallel GEMM of blocks of e4m3 that starts on its own rows.

How shards travel and chunks are walked is in kernel.py of all_gather_matmul, why each block's product is scaled in that
of quantized_matmul. A shard is one piece of memory, its values and then its exponents, so a flag covers both. Values of
all shards in a slot are a tensor of three dims, whose first one is the shard: so one descriptor serves them, though
exponents lie between.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..all_gather_matmul import plan
from ..all_gather_matmul.kernel import all_gather_matmul_space, gather_of, push_rows, walk
from ..arguments import Derivative, LinearForm, three
from ..cost import gemm_seconds
from ..launch import Tile, is_interpreted, launch_options, operand, packed, piece_columns, triton_dtype
from ..matmul.kernel import derivative_arguments
from ..pack.format import Packed
from ..protocol import Channel, flags_of, order_tma_after_acquire, reach, serve, slot_of, wait
from ..quantize.format import VALUES, Blocks, shard_bytes
from ..quantize.kernel import require_capability
from ..quantized_matmul.kernel import BLOCK, CAPABILITIES, NO_TILE, add_scaled
from ..replay import launch, replayed
from ..tile import column_blocks, load_block, store_linear, swizzle
from .reference import check_derivative, check_operands


class QuantizedWeight(NamedTuple):
    """The width, the exponents, the bias and the output of one weight. Its values are an argument of their own. All
    members of a missing weight are None, as those of a Weight of arguments.py."""

    n: Any = None
    exponents: Any = None
    """(n / BLOCK, k / BLOCK)."""
    bias: Any = None
    out: Any = None


class QuantizedLinears(NamedTuple):
    """A @ weight.T for up to three weights, with their epilogues, as Linears of arguments.py."""

    k: Any
    nbytes: Any
    """Bytes from one shard to the next."""
    weights: tuple[QuantizedWeight, QuantizedWeight, QuantizedWeight]
    derivative: Derivative
    slot_shards: Any
    """Shards from one virtual rank's slot to the next one's."""


@triton.jit
def place_quantized(problem, b0, b1, b2, tile, rows, FORM: tl.constexpr):
    """(values, exponents, n, bias and out of the weight, first row, first column) of a tile, as place_tile."""
    TILE: tl.constexpr = FORM.tile
    tiles_0, tiles_1, tiles_n = column_blocks(problem.weights, TILE.n)
    row_block, column_block = swizzle(tile, tl.cdiv(rows, TILE.m), tiles_n)
    b, weight, first = b0, problem.weights[0], 0
    if problem.weights[1].n is not None:
        if column_block >= tiles_0:
            b, weight, first = b1, problem.weights[1], tiles_0
        if problem.weights[2].n is not None:
            if column_block >= tiles_1:
                b, weight, first = b2, problem.weights[2], tiles_1
    bias = 0 if weight.bias is None else weight.bias
    out = 0 if weight.out is None else weight.out
    return b, weight.exponents, weight.n, bias, out, row_block * TILE.m, (column_block - first) * TILE.n


@triton.jit
def load_values(
    source, shard, row, column, rows, k, nbytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """A block of the values of a shard (rows, k), with zeros outside of it."""
    if TMA:
        block = source.load([shard, row, column]).reshape(ROWS, COLUMNS)
    else:
        values = source + tl.cast(shard, tl.int64) * nbytes
        block = load_block(values, row, column, rows, k, k, ROWS, COLUMNS, False)
    return block


@triton.jit
def quantized_tiles(
    problem, values, exponents, b0, b1, b2, shard, chunk, begin, end, programs, rows, virtual, FORM: tl.constexpr
):
    """Compute and store tiles begin, begin + programs, ... below `end` of epilogue(A B_i^T), for up to three weights.

    A is shard number `shard` of `values`, and has these exponents (k / BLOCK, rows). The result is chunk number `chunk`
    of the output of virtual rank `virtual`. The caller must have waited for all of A.
    """
    TILE: tl.constexpr = FORM.tile
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    k, steps = problem.k, problem.k // BLOCK
    for tile in range(begin, end, programs):
        b, of_weight, n, bias, out, row, column = place_quantized(problem, b0, b1, b2, tile, rows, FORM)
        places = row + tl.arange(0, BLOCK_M)
        first = virtual * n
        of_weight += (first + column) // BLOCK * steps
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            at = step * BLOCK
            left = load_values(values, shard, row, at, rows, k, problem.nbytes, BLOCK_M, BLOCK, TILE.tma)
            right = load_block(b, first + column, at, first + n, k, k, BLOCK_N, BLOCK, TILE.tma)
            result = add_scaled(result, left, right, exponents + step * rows + places, places < rows, of_weight + step)
        store_linear(problem, result, n, bias, out, chunk, row, column, rows, virtual, FORM)


@triton.jit(do_not_specialize=["rank", "rows", "pushers", "joins"])
def all_gather_quantized_matmul_kernel(
    links, rank, shard, a, slot0, slot1, b0, b1, b2, problem, rows, pushers, joins,
    FORM: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """all_gather_matmul_kernel for shards of values and exponents. a: the values of the own shards."""
    TILE: tl.constexpr = FORM.tile
    WORLD: tl.constexpr = FORM.world
    virtual = tl.program_id(1)
    me, limit = serve(links, rank, WORLD)
    program, programs = tl.program_id(0), tl.num_programs(0)
    v = virtual.to(tl.int64)
    if GATHER.push:
        if program < pushers:
            push_rows(me, shard, reach(limit, WORLD), program, pushers, problem.nbytes, GATHER)
    own_flags = flags_of(me, me.rank, 0)
    slot = slot0
    if (me.epoch & 1) == 1:
        slot = slot1
    _, _, tiles_n = column_blocks(problem.weights, TILE.n)
    tiles = tl.cdiv(rows, TILE.m) * tiles_n
    numbers = tl.cast(rows, tl.int64) * problem.k  # behind which exponents lie
    start, distance = walk(program, programs, pushers, joins, 0, tiles)
    own = shard.to(tl.pointer_type(tl.int8), bitcast=True) + v * problem.nbytes + numbers
    quantized_tiles(problem, a, own, b0, b1, b2, virtual, me.rank, start, tiles, distance, rows, virtual, FORM)
    received = slot_of(me, me.rank, tl.int8) + numbers
    second = 1
    if program < pushers:
        second = tl.maximum(joins, 1)
    for step in range(second, WORLD):
        chunk = (me.rank + step) % WORLD
        limit = wait(me, own_flags, chunk, limit)
        order_tma_after_acquire(me.epoch, GATHER.fence)
        start, distance = walk(program, programs, pushers, joins, step, tiles)
        end = reach(limit, 1) * tiles
        first = virtual * problem.slot_shards + chunk
        exponents = received + tl.cast(chunk, tl.int64) * problem.nbytes
        quantized_tiles(problem, slot, exponents, b0, b1, b2, first, chunk, start, end, distance, rows, virtual, FORM)


def values_operand(shards: Tensor, rows: int, k: int, tile: Tile) -> Any:
    """What the kernel takes for the values of shards (S, nbytes): a TMA descriptor (S, rows, k), or their memory."""
    flat = shards.view(VALUES)
    if not tile.tma:
        return flat
    return TensorDescriptor(flat, [len(shards), rows, k], [shards.shape[1], k, 1], [1, tile.m, BLOCK.value])


def launch_gather(
    shard: Tensor, rows: int, weights: Sequence[Blocks], channel: Channel, biases: Sequence[Tensor | None] | None,
    outputs: Sequence[Tensor | None], derivative: Derivative, form: LinearForm, *,
    push: bool, keep: bool, programs: int | None, spare: int,
) -> None:  # fmt: skip
    """The launch of both functions below. Tensors of the served ranks are stacked along dim 0."""
    served, world, tile, shard = channel.served, channel.world, form.tile, packed(shard)
    require_capability(weights[0].values, *CAPABILITIES, NO_TILE)
    k, nbytes = weights[0].values.shape[1], shard.shape[1]
    columns = [len(w.values) // served for w in weights]
    channel.require(OPERATION, *all_gather_quantized_matmul_space(rows, k, world))
    if biases and len({bias is None for bias in biases}) > 1:
        raise ValueError("some of a launch's weights have no bias: give zeros, or none to all")
    slots = [channel.slot(parity, nbytes, shard) for parity in (0, 1)]
    work = plan.Work(
        nbytes, world,
        triton.cdiv(rows, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns) * world,
        gemm_seconds(world * rows, sum(columns), k, 2, plan.machine_of(shard.device, 1), 1), itemsize=1,
    )  # fmt: skip
    total, pushing = plan.plan_launch(work, shard.device, tile, push, programs, served, spare)
    each = zip(weights, columns, biases or [None] * len(weights), outputs, strict=True)
    flat = [
        QuantizedWeight(n, w.exponents.contiguous(), None if bias is None else bias.contiguous(), out)
        for w, n, bias, out in each
    ]
    virtual = 0 if served == 1 else len(slots[0]) // served
    problem = QuantizedLinears(k, nbytes, three(flat, QuantizedWeight()), derivative, virtual)
    launch(
        all_gather_quantized_matmul_kernel, (total, served),
        channel.links, channel.rank, shard, *[values_operand(each, rows, k, tile) for each in (shard, *slots)],
        *three([operand(w.values.contiguous(), (tile.n, BLOCK.value), tile) for w in weights]),
        problem, rows, *pushing, form,
        gather_of(channel, shard, pushing.pushers > 0, keep, fence=tile.tma and not is_interpreted()),
        **launch_options(tile.warps, tile.stages, cooperative=True),
    )  # fmt: skip


OPERATION = "all_gather_quantized_matmul"


def all_gather_quantized_matmul_space(rows: int, k: int, world: int) -> tuple[int, int]:
    """(bytes of a slot, flags per writer) that the channel must offer for shards of (rows, k)."""
    return all_gather_matmul_space(1, shard_bytes(rows, k), world, 1)


@replayed
def all_gather_quantized_matmul(
    shard: Tensor,
    weights: Sequence[Blocks],
    channel: Channel,
    biases: Sequence[Tensor | None] | None = None,
    *,
    dtype: torch.dtype,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> list[Tensor]:
    """[gather(A) W_i^T + bias_i for each weight i] of the numbers that blocks stand for, in this dtype: one gather for
    up to three weights.

    Math:     all_gather_quantized_matmul_reference, this rank's entry
    Shapes:   shard (1, shard_bytes) uint8, what packed_shard makes of rows A (M / t, K) in blocks; weight i blocks of
              (N_i, K); bias (N_i,) of this dtype, for all weights or none; results (M, N_i). K and N_i multiples of
              128; dtype bfloat16, float16 or float32. With virtual ranks every tensor is the stack of theirs along
              dim 0
    Numerics: as the kernel of quantized_matmul; every row has the bits that the same tile gives without a gather
    Traffic:  all_gather_quantized_matmul_cost; this rank sends and receives (t - 1) shards: a byte a value, a byte for
              each 128, and up to 15 for a shard
    Order:    as all_gather_matmul, whose push, keep, programs and spare these are. After it await_gathered's views and
              copies of the slot hold all ranks' shards (t, shard_bytes)
    Source:   as all_gather_matmul and quantized_matmul
    Errors:   ValueError for operands of other shapes or dtypes, on a GPU for which no tile ships, or if the channel's
              slots or flags are too small (all_gather_quantized_matmul_space)
    """
    served, world = channel.served, channel.world
    rows = check_operands(OPERATION, channel.epoch, shard, weights, biases, dtype, served)
    triton_dtype(dtype)  # an error for what kernels do not take
    columns = [len(w.values) // served for w in weights]
    outputs = [shard.new_empty((served * world * rows, n), dtype=dtype) for n in columns]
    tile = tile or plan.select_gather_tile(shard.device, VALUES, rows, columns, weights[0].values.shape[1], world)
    launch_gather(
        shard, rows, weights, channel, biases, outputs, Derivative(), LinearForm(tile, "", world=world),
        push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip
    return outputs


@replayed
def all_gather_quantized_matmul_derivative(
    shard: Tensor,
    weight: Blocks,
    channel: Channel,
    x: Tensor | Packed,
    activation: str | None,
    gate: Tensor | Packed | None = None,
    *,
    push: bool = True,
    keep: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    spare: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(dx, dgate or None, act) of da = gather(A) W^T, a row-parallel linear's dgrad: as all_gather_matmul_derivative.

    Math:     all_gather_quantized_matmul_derivative_reference, this rank's entry
    Shapes:   shard as above; weight blocks of (N, K), the transposed copy of the linear's (K, N); x, gate and results
              (M, N), contiguous, of one dtype; x and gate may be packed
    Numerics, order, errors: as all_gather_quantized_matmul; da is never rounded
    Traffic:  as all_gather_quantized_matmul; besides, it reads x (and gate), and writes dx, act (and dgate)
    Source:   as all_gather_quantized_matmul; formulas in activation/reference.py
    """
    served, world = channel.served, channel.world
    rows = check_derivative(
        OPERATION + "_derivative", channel.epoch, shard, weight, x, gate, activation, served, world
    )  # fmt: skip
    triton_dtype(x.dtype)
    dx, rebuilt = (shard.new_empty(x.shape, dtype=x.dtype) for _ in range(2))
    dgate = None if gate is None else shard.new_empty(x.shape, dtype=x.dtype)
    k = weight.values.shape[1]
    tile = tile or plan.select_gather_tile(shard.device, VALUES, rows, x.shape[1:], k, world, operands=3)
    launch_gather(
        shard, rows, [weight], channel, None, [None], derivative_arguments(x, gate, dx, dgate, rebuilt),
        LinearForm(tile, activation or "", world=world, piece=piece_columns(x.shape[1])),
        push=push, keep=keep, programs=programs, spare=spare,
    )  # fmt: skip
    return dx, dgate, rebuilt

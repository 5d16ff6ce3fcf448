"""A toy kernel for the tests of the compile check: it follows the protocol, or breaks it in a named way.

Belongs here: the kernel, its launcher and its cases. Worker processes import this module.
"""

import multiprocessing
import os
from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from checks.compile.cases import Case, meta
from tpformer.kernels.launch import Tile

SIZE = 512
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# the rules that are broken without a barrier before the release: from 3.9 on Triton puts it there itself
NO_BARRIER = {"barrier_before_release"} if TRITON < (3, 9) else set()


@triton.jit
def wait(flag, epoch, SCOPE: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE) - epoch < 0:
        pass


@triton.jit
def load(source, row, column, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        block = source.load([row, column])
    else:
        rows, columns = row + tl.arange(0, BLOCK), column + tl.arange(0, BLOCK_K)
        block = tl.load(source + rows[:, None] * stride + columns[None, :])
    return block


@triton.jit
def exchange_kernel(
    received, weight, slots, flags, epoch, tiles, k, stride,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, BREAK: tl.constexpr,
):  # fmt: skip
    """For each tile: wait for it, multiply it by the weight, store the product at a peer, publish. BREAK names what is
    wrong."""
    SCOPE: tl.constexpr = "gpu" if BREAK == "gpu scope" else "sys"
    LATE: tl.constexpr = BREAK == "wait after the loads" or BREAK == "wait for the first tile, then late"
    if BREAK == "wait for the first tile, then late":
        wait(flags, epoch, SCOPE)
    for tile in tl.range(tl.program_id(0), tiles, 8):
        if not LATE and BREAK != "wait in the K loop" and (BREAK != "wait for every other tile" or tile % 2 == 0):
            wait(flags + tile, epoch, SCOPE)
        if TMA and BREAK != "no fence":
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [epoch], dtype=tl.int32, is_pure=False, pack=1
            )
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(k // BLOCK_K):
            if BREAK == "wait in the K loop":
                wait(flags + tile, epoch, SCOPE)
            left = load(received, tile * BLOCK, step * BLOCK_K, stride, BLOCK, BLOCK_K, TMA)
            right = load(weight, 0, step * BLOCK_K, stride, BLOCK, BLOCK_K, TMA)
            product = tl.dot(left, right.T, product, input_precision="ieee")
        if LATE:
            wait(flags + tile, epoch, SCOPE)
        slot = tl.load(slots + tile).to(tl.pointer_type(DTYPE))
        if BREAK != "no alignment hint":
            slot = tl.multiple_of(slot, 16)
        offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(slot + offsets, product.to(DTYPE))
        if BREAK != "no barrier":
            tl.debug_barrier()
        if BREAK != "no release":
            tl.atomic_xchg(flags + tiles + tile, epoch, sem="release", scope=SCOPE)
        if BREAK == "an unasked release":
            tl.debug_barrier()
            tl.atomic_xchg(flags, epoch, sem="release", scope=SCOPE)


def die() -> None:
    """As a compiler that takes its process down, which is a worker's."""
    if multiprocessing.parent_process() is not None:
        os._exit(3)


def exchange(dtype: torch.dtype, tile: Tile, breakage: str, registers: int | None = None) -> None:
    """Launch the kernel, as the launchers of shipped kernels do."""
    matrices = meta(SIZE, SIZE, dtype=dtype), meta(tile.m, SIZE, dtype=dtype)
    if tile.tma:
        matrices = [TensorDescriptor.from_tensor(matrix, [tile.m, tile.k]) for matrix in matrices]
    options = {} if registers is None else {"maxnreg": registers}
    exchange_kernel[(8,)](
        *matrices, meta(8, dtype=torch.int64), meta(64, dtype=torch.int32), 1234, SIZE // tile.m, SIZE, SIZE,
        BLOCK=tile.m, BLOCK_K=tile.k, DTYPE=getattr(tl, str(dtype).removeprefix("torch.")), TMA=tile.tma,
        BREAK=breakage, num_warps=tile.warps, num_stages=tile.stages, **options,
    )  # fmt: skip


TMA_TILE = Tile(128, 128, 64, 3, 8, True)
POINTER_TILE = Tile(64, 64, 32, 3, 4, False)


def case(
    breakage="", capability=90, dtype=torch.bfloat16, registers: int | None = None, stages=3, **fields
) -> Case:  # fmt: skip
    """A case of the toy kernel. It expects what holds of the unbroken kernel, whatever `breakage` is."""
    tile = (TMA_TILE if capability >= 90 and dtype != torch.float32 else POINTER_TILE)._replace(stages=stages)
    launch = partial(exchange, dtype, tile, breakage, registers)
    fields = {"name": breakage or "good", "kernel": "exchange_kernel", "releases": 1, "acquires": 1, **fields}
    return Case(dtype=dtype, capability=capability, tile=tile, launch=launch, **fields)


def good_cases() -> list[Case]:
    return [case(), case(capability=80, dtype=torch.float16)]


def bad_cases() -> list[Case]:
    """A broken rule, a compiler that refuses, one that takes its process down, and a good case after it."""
    dead = Case(name="dead", kernel="none", dtype=torch.bfloat16, capability=90, launch=die)
    return [case("no release"), case(registers=32, name="refused"), dead, case()]

"""A GEMM whose warps have parts: some load, the others multiply; imports triton. A trial beside kernels/matmul.

Belongs here: what bench matmul_trials launches besides what ships.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpformer.kernels.launch import Tile, persistent_programs
from tpformer.kernels.tile import store_block, swizzle

TILE = Tile(128, 256, 64, 3, 4, True)  # its four warps become 12: those that load, and two groups that multiply


@triton.jit
def specialised_kernel(a, b, out, m, n, k, TILE: tl.constexpr):
    """C = A B^T. A tile's K loop is inside the loop over tiles, as Triton's Hopper pass wants it.

    The pass gives half of the rows to each of two groups of warps, and loads half a block for each: it changes the
    descriptors that are made here, and fails on those that the host makes.
    """
    BLOCK_M: tl.constexpr = TILE.m
    BLOCK_N: tl.constexpr = TILE.n
    BLOCK_K: tl.constexpr = TILE.k
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [BLOCK_M, BLOCK_K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [BLOCK_N, BLOCK_K])
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=False, warp_specialize=True):
        row_block, column_block = swizzle(tile, tiles_m, tiles_n)
        row, column = row_block * BLOCK_M, column_block * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(k, BLOCK_K)):
            at = step * BLOCK_K
            total = tl.dot(left.load([row, at]), right.load([column, at]).T, total)
        store_block(out, total, row, column, m, n, n, BLOCK_M, BLOCK_N)


def scratch(nbytes: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors that programs make."""
    return torch.empty(nbytes, dtype=torch.int8, device="cuda")


def specialised(a: Tensor, b: Tensor, stages: int = TILE.stages) -> Tensor:
    """A B^T for contiguous a (M, K) and b (N, K), in 16 bits, whose rows begin at multiples of 16 bytes."""
    triton.set_allocator(scratch)
    m, n, tile = len(a), len(b), TILE._replace(stages=stages)
    out = a.new_empty(m, n)
    programs = persistent_programs(a.device, triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n), tile)
    compiled = specialised_kernel[(programs,)](
        a, b, out, m, n, a.shape[1], tile, num_warps=tile.warps, num_stages=tile.stages
    )
    if compiled.metadata.num_warps == tile.warps:
        raise AssertionError("triton has given the warps no parts")
    return out

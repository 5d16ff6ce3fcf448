"""Rotary position embedding of queries and keys in one launch.

Letters: T tokens, d elements of a head; a row is one head of one token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_options
from .reference import Table

BLOCK_BYTES = 4096  # of each half of a block's pairs: one 16-byte vector per thread of WARPS, whatever the dtype
WARPS = 8


@triton.jit
def load_pairs(x, pair, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first and the second of every pair of rows that start at x, in float32."""
    if INTERLEAVED:
        element = tl.arange(0, 2 * COLUMNS)[None, :]
        whole = tl.load(x + element, mask=mask & (element < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(whole, (ROWS, COLUMNS, 2)))
    else:
        inside = mask & (pair < HALF)
        first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(
    y, first, second, pair, mask,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The reverse of load_pairs, rounded to y's dtype."""
    if INTERLEAVED:
        element = tl.arange(0, 2 * COLUMNS)[None, :]
        whole = tl.reshape(tl.join(first, second), (ROWS, 2 * COLUMNS))
        tl.store(y + element, whole.to(y.dtype.element_ty), mask=mask & (element < 2 * HALF))
    else:
        inside = mask & (pair < HALF)
        tl.store(y + pair, first.to(y.dtype.element_ty), mask=inside)
        tl.store(y + HALF + pair, second.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotate_rows(
    x, y, cos, sin, positions, block, tokens,
    HEADS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows block * ROWS and on of x, whose tokens are STRIDE elements apart; y is packed."""
    start = tl.cast(block, tl.int64) * ROWS
    row = (start % HEADS).to(tl.int32) + tl.arange(0, ROWS)  # counted from the first head of the block's first token
    token = start // HEADS + row // HEADS
    mask = token < tokens
    place = tl.load(positions + token, mask=mask, other=0).to(tl.int64) * HALF
    token, head, place, mask = token[:, None], (row % HEADS)[:, None], place[:, None], mask[:, None]
    pair = tl.arange(0, COLUMNS)[None, :]
    inside = mask & (pair < HALF)
    first, second = load_pairs(
        x + token * STRIDE + head * (2 * HALF), pair, mask, HALF, INTERLEAVED, ROWS, COLUMNS
    )  # fmt: skip
    c = tl.load(cos + place + pair, mask=inside, other=0.0)
    s = tl.load(sin + place + pair, mask=inside, other=0.0)
    if INVERSE:
        s = -s
    store_pairs(
        y + (token * HEADS + head) * (2 * HALF), first * c - second * s, second * c + first * s, pair, mask,
        HALF, INTERLEAVED, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "query_programs"])
def rope_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, query_programs,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first query_programs programs rotate rows of q, the others rows of k."""
    program = tl.program_id(0)
    if program < query_programs:
        rotate_rows(q, q_out, cos, sin, positions, program, tokens,
                    HEADS, Q_STRIDE, HALF, INTERLEAVED, INVERSE, ROWS, COLUMNS)  # fmt: skip
    else:
        rotate_rows(k, k_out, cos, sin, positions, program - query_programs, tokens,
                    KV_HEADS, K_STRIDE, HALF, INTERLEAVED, INVERSE, ROWS, COLUMNS)  # fmt: skip


def rope_rotate(
    q: Tensor, k: Tensor, table: Table, positions: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate each pair of elements of every head by its token's angle; inverse rotates back (the backward).

    Math:     rope_rotate of reference.py
    Shapes:   as there, q and k of one dtype (bf16, fp16, fp32), the table float32. Tokens may lie apart (any stride of
              the first dim); other layouts are copied first. Positions are not checked: outside [0, length) they read
              beside the table
    Numerics: float32 between load and store, each result rounded once
    Traffic:  rope_cost; 16-byte accesses if d and the strides are multiples of 16 elements in the half convention (of
              8 if interleaved) and q and k so aligned
    Order:    each row by itself, q and k in one launch; no communication, deterministic
    Source:   as in reference.py
    """
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if not tokens:
        return q_out, k_out
    q, k = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k))
    columns = triton.next_power_of_2(head_dim // 2)
    rows = max(1, BLOCK_BYTES // q.element_size() // columns)
    programs = [triton.cdiv(tokens * n, rows) for n in (heads, kv_heads)]
    rope_kernel[(sum(programs),)](
        q, k, q_out, k_out, *table, positions, tokens, programs[0],
        HEADS=heads, KV_HEADS=kv_heads, Q_STRIDE=q.stride(0), K_STRIDE=k.stride(0), HALF=head_dim // 2,
        INTERLEAVED=interleaved, INVERSE=inverse, ROWS=rows, COLUMNS=columns, **launch_options(WARPS, 1),
    )  # fmt: skip
    return q_out, k_out

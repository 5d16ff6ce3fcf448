"""Rotary position embedding of queries and keys in one launch.

Letters: T tokens, d elements of a head; a row is one head of one token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch_options
from ..replay import launch, replayed
from .reference import Table, check_operands

BLOCK_BYTES = 4096  # of all first elements of a block's pairs; 16 for each thread of WARPS
WARPS = 8


class Heads(NamedTuple):
    """What the compiler must know of the queries, or of the keys."""

    heads: int
    """Heads of a token."""
    stride: int
    """Elements from one token to the next."""


class Rotation(NamedTuple):
    """What the compiler must know of queries and keys alike."""

    half: int
    """Pairs of a head."""
    interleaved: bool
    """Whether the elements of a pair lie side by side; else they lie `half` apart."""
    inverse: bool
    """Whether to rotate back."""
    rows: int
    """How many heads a program rotates."""
    columns: int
    """`half`, rounded up to a power of two."""


@triton.jit
def load_pairs(x, pair, mask, ROTATION: tl.constexpr):
    """The first and the second of every pair of rows that start at x, in float32."""
    ROWS: tl.constexpr = ROTATION.rows
    COLUMNS: tl.constexpr = ROTATION.columns
    HALF: tl.constexpr = ROTATION.half
    if ROTATION.interleaved:
        element = tl.arange(0, 2 * COLUMNS)[None, :]
        whole = tl.load(x + element, mask=mask & (element < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(whole, (ROWS, COLUMNS, 2)))
    else:
        inside = mask & (pair < HALF)
        first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(y, first, second, pair, mask, ROTATION: tl.constexpr):
    """Store what load_pairs loads, rounded to y's dtype."""
    ROWS: tl.constexpr = ROTATION.rows
    COLUMNS: tl.constexpr = ROTATION.columns
    HALF: tl.constexpr = ROTATION.half
    if ROTATION.interleaved:
        element = tl.arange(0, 2 * COLUMNS)[None, :]
        whole = tl.reshape(tl.join(first, second), (ROWS, 2 * COLUMNS))
        tl.store(y + element, whole.to(y.dtype.element_ty), mask=mask & (element < 2 * HALF))
    else:
        inside = mask & (pair < HALF)
        tl.store(y + pair, first.to(y.dtype.element_ty), mask=inside)
        tl.store(y + HALF + pair, second.to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotate_rows(x, y, table, positions, block, tokens, length, HEADS: tl.constexpr, ROTATION: tl.constexpr):
    """Rotate the rows of x in block number `block` into y, which has no gaps; into NaN where the table, which has
    `length` rows, has not the position."""
    HALF: tl.constexpr = ROTATION.half
    start = tl.cast(block, tl.int64) * ROTATION.rows
    # `row` counts from the first head of the block's first token
    row = (start % HEADS.heads).to(tl.int32) + tl.arange(0, ROTATION.rows)
    token = start // HEADS.heads + row // HEADS.heads
    mask = token < tokens
    position = tl.load(positions + token, mask=mask, other=0).to(tl.int64)
    exists = ((position >= 0) & (position < length))[:, None]
    token, head, place, mask = token[:, None], (row % HEADS.heads)[:, None], (position * HALF)[:, None], mask[:, None]
    pair = tl.arange(0, ROTATION.columns)[None, :]
    inside = exists & (pair < HALF)
    first, second = load_pairs(x + token * HEADS.stride + head * (2 * HALF), pair, mask, ROTATION)
    cos, sin = table
    c = tl.load(cos + place + pair, mask=inside, other=float("nan"))
    s = tl.load(sin + place + pair, mask=inside, other=float("nan"))
    if ROTATION.inverse:
        s = -s
    target = y + (token * HEADS.heads + head) * (2 * HALF)
    store_pairs(target, first * c - second * s, second * c + first * s, pair, mask, ROTATION)


@triton.jit(do_not_specialize=["tokens", "length", "query_programs"])
def rope_kernel(
    q, k, q_out, k_out, table, positions, tokens, length, query_programs,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """The first query_programs programs rotate rows of q, the others rows of k."""
    program = tl.program_id(0)
    if program < query_programs:
        rotate_rows(q, q_out, table, positions, program, tokens, length, QUERIES, ROTATION)
    else:
        rotate_rows(k, k_out, table, positions, program - query_programs, tokens, length, KEYS, ROTATION)


@replayed
def rope_rotate(
    q: Tensor, k: Tensor, table: Table, positions: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate each pair of elements of every head by its token's angle; inverse rotates back (the backward).

    Math:     rope_rotate of reference.py
    Shapes:   as there, q and k of one dtype (bf16, fp16, fp32), the table float32. Tokens may lie apart (any stride of
              the first dim); other layouts are copied first. A token whose position is outside of [0, length)
              becomes NaN
    Numerics: float32 between load and store, each result rounded once
    Traffic:  rope_cost; accesses have 16 bytes if d and the strides are multiples of 16 elements (of 8 if interleaved)
              and q and k are aligned to 16 bytes
    Order:    rows are independent, q and k share one launch; no communication, deterministic
    Source:   as in reference.py
    """
    check_operands(q, k, table, positions)
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if not tokens:
        return q_out, k_out
    q, k = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k))
    columns = triton.next_power_of_2(head_dim // 2)
    rows = max(1, BLOCK_BYTES // q.element_size() // columns)
    programs = [triton.cdiv(tokens * n, rows) for n in (heads, kv_heads)]
    launch(
        rope_kernel, (sum(programs),),
        q, k, q_out, k_out, tuple(each.contiguous() for each in table), positions.contiguous(), tokens, len(table[0]),
        programs[0],
        QUERIES=Heads(heads, q.stride(0)), KEYS=Heads(kv_heads, k.stride(0)),
        ROTATION=Rotation(head_dim // 2, interleaved, inverse, rows, columns), **launch_options(WARPS, 1),
    )  # fmt: skip
    return q_out, k_out

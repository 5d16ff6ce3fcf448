"""Rotary position embedding: the specification (torch only) of table and rotation, and the cost.

Letters: T tokens, d elements of a head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cost import Cost
from ..operands import FLOATS, INTEGERS, require, require_within

Table = tuple[Tensor, Tensor]  # cos and sin, each (length, d / 2); a row is a position


class RopeScaling(NamedTuple):
    """Lower frequencies for texts longer than those of a model's first training, as in Llama 3.1.

    A frequency that makes at most `low_frequency` turns in `original_length` tokens is divided by `factor`. One that
    makes at least `high_frequency` turns stays. Between them the share that stays grows with the turns.
    Source: Llama 3.1's apply_scaling (meta-llama/llama-models), which Hugging Face calls rope_type "llama3".
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_length: int


def rope_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None, device: torch.device | str | None = None
) -> Tensor:
    """(d / 2,) float64: the angle in radians from one position to the next, base**(-2i / d) if nothing is scaled."""
    frequency = base ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequency
    factor, low, high, length = scaling
    turns = frequency * (length / (2 * math.pi))
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (stays + (1 - stays) / factor)


def rope_table(
    length: int,
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    device: torch.device | str,
    scaling: RopeScaling | None = None,
) -> Table:
    """cos and sin (length, d / 2) of position * rope_frequencies, in promote_types(dtype, float32).

    Angles are float64 and rounded once: in float32, those of far positions would be off by thousandths of a radian.
    """
    wide = torch.promote_types(dtype, torch.float32)
    position = torch.arange(length, device=device, dtype=torch.float64)
    angle = position[:, None] * rope_frequencies(head_dim, base, scaling, device)
    return angle.cos().to(wide), angle.sin().to(wide)


def check_operands(q: Tensor, k: Tensor, table: Table, positions: Tensor) -> None:
    """ValueError unless all have the shapes and dtypes that rope_rotate asks for."""
    (cos, sin), tokens, half = table, q.shape[0], q.shape[-1] // 2
    dtype, rows = (torch.float32, torch.float64), (cos.shape[0], half)
    require(
        "rope", q, ("q", q, (tokens, *q.shape[1:-1], 2 * half), FLOATS),
        ("k", k, (tokens, *k.shape[1:-1], 2 * half), (q.dtype,)), ("positions", positions, (tokens,), INTEGERS),
        ("the table's cos", cos, rows, dtype), ("the table's sin", sin, rows, dtype),
    )  # fmt: skip


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second of every pair, as views."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


def rope_rotate(
    q: Tensor, k: Tensor, table: Table, positions: Tensor, interleaved: bool = False, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate each pair of elements of every head by its token's angle, or back if `inverse`, which is the backward.

    Math:     y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin. Pairs are (i, i + d/2) ("half", as in Hugging Face's Llama),
              or (2i, 2i + 1) if interleaved (as in GPT-J)
    Shapes:   q (T, heads, d), k (T, kv_heads, d), any strides, d even; table: cos and sin (length, d / 2) in
              promote_types(q.dtype, float32); positions (T,) int64 or int32 in [0, length), in any order, name rows of
              the table; results like q and k, contiguous
    Numerics: in the table's dtype, rounded once at the store
    Traffic:  see rope_cost
    Source:   Su et al. 2021 (arXiv:2104.09864); half: Hugging Face Llama checkpoints
    """
    if not inverse:  # else the forward has checked them, and autograd has compared the gradients' shapes
        check_operands(q, k, table, positions)
    try:
        cos, sin = (rows.index_select(0, positions)[:, None] for rows in table)
    except IndexError:  # torch has looked at the positions, and need not be asked twice
        require_within("positions", positions, 0, len(table[0]), "the table's rows ")
        raise
    sign = -1 if inverse else 1
    results = []
    for x in (q, k):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x1, x2 = _pairs(x, interleaved)
        y1, y2 = _pairs(y, interleaved)
        if x.dtype == cos.dtype:
            torch.addcmul(torch.mul(x1, cos, out=y1), x2, sin, value=-sign, out=y1)
            torch.addcmul(torch.mul(x2, cos, out=y2), x1, sin, value=sign, out=y2)
        else:
            y1.copy_((x1 * cos).addcmul_(x2, sin, value=-sign))
            y2.copy_((x2 * cos).addcmul_(x1, sin, value=sign))
        results.append(y)
    return results[0], results[1]


def rope_cost(tokens: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Cost:
    """q and k are read and written, with 3 flops per element; each token reads its position (int64) and its row of the
    table (float32) once. Rows that are still in the cache are read from memory less often than that.
    """
    elements = tokens * (heads + kv_heads) * head_dim
    return Cost(3 * elements, 2 * elements * itemsize + tokens * (4 * head_dim + 8))

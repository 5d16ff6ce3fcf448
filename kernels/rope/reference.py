"""Rotary position embedding: the specification (torch only), table, rotation (its own inverse's mirror) and cost."""

import torch
from torch import Tensor

from ..cost import Cost


def rope_table(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (tokens, head_dim / 2) of position * base**(-2i / head_dim), in promote_types(dtype, float32)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angle = positions.double()[:, None] * torch.pow(torch.tensor(base, dtype=torch.float64), -exponent)
    return angle.cos().to(wide), angle.sin().to(wide)


def rope_rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim/2]) by its position's angle; inverse rotates back (the backward).

    Math:     y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, halves of the head dim ("half" convention, as in Llama)
    Shapes:   x (T, heads, head_dim); cos, sin (T, head_dim / 2); y like x, contiguous
    Numerics: in the table's dtype, rounded once at the store
    Traffic:  see rope_cost
    Source:   Su et al. 2021 (arXiv:2104.09864); pairing of Hugging Face Llama checkpoints
    """
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    first, second = x.chunk(2, -1)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    y1, y2 = y.chunk(2, -1)
    y1.copy_(first * cos - second * sin)
    y2.copy_(second * cos + first * sin)
    return y


def rope_cost(tokens: int, heads: int, head_dim: int, itemsize: int) -> Cost:
    """x in, y out, and the float32 table once."""
    return Cost(3 * tokens * heads * head_dim, 2 * tokens * heads * head_dim * itemsize + 4 * tokens * head_dim)

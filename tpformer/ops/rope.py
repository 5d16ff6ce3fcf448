"""Rotary position embedding of queries and keys."""

import torch
from torch import Tensor

from .first_derivative import first_derivative
from .implementation import implementation
from .uncompiled import uncompiled


class RopeFunction(torch.autograd.Function):
    """y = R(position) x for every pair of features, dx = R(-position) dy: a rotation's transpose is its inverse."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, interleaved):
        # attributes, not saved tensors: they belong to all layers, and no hook on what one layer keeps should see them
        ctx.table, ctx.positions, ctx.interleaved = (cos, sin), positions, interleaved
        return implementation("rope", q).rope_rotate(q, k, (cos, sin), positions, interleaved)

    @staticmethod
    @first_derivative
    def backward(ctx, dq, dk):
        rotate = implementation("rope", dq).rope_rotate
        return *rotate(dq, dk, ctx.table, ctx.positions, ctx.interleaved, inverse=True), None, None, None, None


@uncompiled
def rope(
    q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles; both results contiguous.

    Shapes:  q (tokens, heads, head_dim), k (tokens, kv_heads, head_dim), head_dim even; table: cos and sin, each
             (length, head_dim / 2), from kernels.rope's rope_table; positions (tokens,) int64 or int32, each token's
             row of the table, which starts anywhere and restarts with every packed document.
             interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J, instead of (i, i + head_dim / 2), as in Llama.
    Saves:   nothing but references to table and positions, which all layers share: the rotation is orthogonal.
    Communication: none.
    Source:  Su et al. 2021 (arXiv:2104.09864)
    """
    return RopeFunction.apply(q, k, *table, positions, interleaved)

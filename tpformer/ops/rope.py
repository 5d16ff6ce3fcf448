"""Rotary position embedding of queries and keys."""

from typing import Any

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
        return _rotate(q, k, ctx)

    @staticmethod
    @first_derivative
    def backward(ctx, dq, dk):
        return *_rotate(dq, dk, ctx, inverse=True), None, None, None, None


def _rotate(q: Tensor, k: Tensor, ctx: Any, inverse: bool = False) -> tuple[Tensor, Tensor]:
    rotate = implementation("rope", q).rope_rotate
    rows = (x.reshape(-1, *x.shape[-2:]) for x in (q, k))
    q_turned, k_turned = rotate(*rows, ctx.table, ctx.positions, ctx.interleaved, inverse)
    return q_turned.view(q.shape), k_turned.view(k.shape)


@uncompiled
def rope(
    q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their tokens' angles; both results contiguous.

    Shapes:  q (..., heads, head_dim), k (..., kv_heads, head_dim) of as many tokens, head_dim even; table: cos and
             sin, each (length, head_dim / 2), from kernels.rope's rope_table; positions (tokens,) int64 or int32, each
             token's row of the table, which starts anywhere and restarts with every packed document.
             interleaved: pairs are neighbours (2i, 2i + 1), as in GPT-J, instead of (i, i + head_dim / 2), as in Llama.
    Saves:   nothing but references to table and positions, which all layers share: the rotation is orthogonal.
    Communication: none.
    Source:  Su et al. 2021 (arXiv:2104.09864)
    """
    return RopeFunction.apply(q, k, *table, positions, interleaved)

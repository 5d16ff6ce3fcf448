"""Rotary position embedding of queries and keys."""

from typing import Any

from torch import Tensor

from tpformer.torch_private import Function

from .first_derivative import first_derivative
from .implementation import implementation
from .uncompiled import uncompiled
from .unsaved import check_unwritten, versions


class RopeFunction(Function):
    """Rotates each pair of features of q (tokens, heads, head_dim) and k by the angle of the token's position.

    forward   y = R(position) x
    backward  dx = R(-position) dy, because the transpose of a rotation is its inverse
    """

    @staticmethod
    def forward(ctx, q, k, cos, sin, positions, interleaved):
        # not saved tensors: all layers share them, and hooks on what a layer saves should not see them
        ctx.table, ctx.positions, ctx.interleaved = (cos, sin), positions, interleaved
        ctx.versions = versions(cos, sin, positions)
        return _rotate(q, k, ctx)

    @staticmethod
    @first_derivative
    def backward(ctx, dq, dk):
        check_unwritten("rope's table or positions", ctx.versions, *ctx.table, ctx.positions)
        return *_rotate(dq, dk, ctx, inverse=True), None, None, None, None


def _rotate(q: Tensor, k: Tensor, ctx: Any, inverse: bool = False) -> tuple[Tensor, Tensor]:
    rotate = implementation("rope", q).rope_rotate
    rows = (x.reshape(x.shape[:-2].numel(), *x.shape[-2:]) for x in (q, k))
    q_turned, k_turned = rotate(*rows, ctx.table, ctx.positions, ctx.interleaved, inverse)
    return q_turned.view(q.shape), k_turned.view(k.shape)


@uncompiled
def rope(
    q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their tokens' positions; both results are contiguous.

    Shapes:  q (..., heads, head_dim), k (..., kv_heads, head_dim) of the same tokens, head_dim even; table: cos and
             sin, each (length, head_dim / 2), from rope_table (kernels/rope/reference.py); positions (tokens,) int64 or
             int32: each token's row of the table. Positions may start anywhere and restart in every packed document.
             interleaved: pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + head_dim / 2), as in Llama.
    Saves:   only references to table and positions, which all layers share.
    Communication: none.
    Errors:  ValueError for positions without a row on a CPU, a table that requires a gradient, and tensors of other
             shapes or dtypes. RuntimeError in the backward if table or positions were written since.
    Source:  Su et al. 2021 (arXiv:2104.09864)
    """
    if table[0].requires_grad or table[1].requires_grad:
        raise ValueError("rope makes no gradient of its table: give detached tensors, or rotate with torch's functions")
    return RopeFunction.apply(q, k, *table, positions, interleaved)

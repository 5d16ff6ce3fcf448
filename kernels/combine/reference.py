"""The sum of each token's rows, which lie in several experts' groups: the specification (torch only), and the cost."""

import torch
from torch import Tensor

from .. import operands
from ..cast import cast
from ..cost import Cost
from ..operands import FLOATS, INTEGERS, require, require_within


def check_operands(rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """ValueError unless these have the shapes and dtypes below; on a CPU also for rows or tokens that do not exist."""
    count, of_tokens = rows.shape[0], positions.shape[0]
    require(
        "combine", rows, ("rows", rows, (count, rows.shape[-1]), FLOATS), ("tokens", tokens, (count,), INTEGERS),
        ("positions", positions, (of_tokens, positions.shape[-1]), (torch.int32,)),
    )  # fmt: skip
    require_within("tokens", tokens, 0, of_tokens)
    require_within("positions", positions, -1, count)
    if operands.readable(positions) and int((positions >= 0).sum()) != count:
        raise ValueError(f"positions of other than {count} rows, of which each has one")


def combine(rows: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """y (T, H) with y[t] the sum of rows[positions[t, j]] over j, without those j whose position is -1.

    Shapes:   rows (R, H), R >= 0; tokens (R,) int32, the token of each row; positions (T, K) int32, in each row of it
              the rows of one token in ascending order; y like rows
    Numerics: from left to right in at least float32, rounded once: in the order of experts, since the rows are
    Traffic:  combine_cost
    """
    check_operands(rows, tokens, positions)
    wide = torch.promote_types(rows.dtype, torch.float32)
    if rows.device.type == "cpu":  # one pass over the rows; on a CPU index_add_ takes them in order
        y = torch.zeros(len(positions), rows.shape[1], dtype=wide)
        return cast(y.index_add_(0, tokens, cast(rows, wide)), rows.dtype)
    y = torch.zeros(len(positions), rows.shape[1], dtype=wide, device=rows.device)
    if len(rows):
        for position in positions.t():
            y += rows[position.clamp(min=0)].to(wide) * (position >= 0)[:, None]
    return y.to(rows.dtype)


def combine_cost(rows: int, tokens: int, k: int, h: int, itemsize: int) -> Cost:
    """Reads each row once and the positions, and writes the sums."""
    return Cost(rows * h, itemsize * (rows + tokens) * h + 4 * tokens * k)

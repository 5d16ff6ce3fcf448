"""GEMMs of groups of rows, each with a matrix of its own: the specification (torch only), and the cost.

Letters: R rows in E groups, N output and K input features. Group e has the rows offsets[e] to offsets[e + 1] - 1.
"""

import torch
from torch import Tensor

from .. import operands
from ..cost import Cost
from ..operands import FLOATS, Operand, require, require_within


def bounds(offsets: Tensor) -> list[int]:
    """The offsets as numbers; none for fake tensors, which have no values: there is nothing to compute."""
    return [] if type(offsets) is not Tensor or offsets.is_meta else offsets.tolist()


def check_operands(a: Tensor, weights: Tensor, offsets: Tensor, index: Tensor | None, transposed: bool) -> None:
    """ValueError unless all have the shapes and dtypes of grouped_matmul; on a CPU also for a row that is not there."""
    k, groups = a.shape[-1], weights.shape[0]
    matrix = (k, weights.shape[-1]) if transposed else (weights.shape[1], k)
    require(
        "grouped_matmul", a, ("a", a, (a.shape[0], k), FLOATS), ("weights", weights, (groups, *matrix), (a.dtype,)),
        *indices(offsets, groups, index),
    )  # fmt: skip
    check_rows(offsets, (a, index))


def check_gradient(dy: Tensor, x: Tensor, offsets: Tensor, dy_index: Tensor | None, x_index: Tensor | None) -> None:
    """As check_operands, for grouped_weight_gradient."""
    require(
        "grouped_weight_gradient", dy, ("dy", dy, (dy.shape[0], dy.shape[-1]), FLOATS),
        ("x", x, (x.shape[0], x.shape[-1]), (dy.dtype,)),
        *indices(offsets, offsets.shape[0] - 1, dy_index, x_index),
    )  # fmt: skip
    check_rows(offsets, (dy, dy_index), (x, x_index))


def indices(offsets: Tensor, groups: int, *some: Tensor | None) -> list[Operand]:
    """What `require` asks of offsets, and of some indices."""
    each = [("index", index, () if index is None else index.shape[:1], (torch.int32,)) for index in some]
    return [("offsets", offsets, (groups + 1,), (torch.int32,)), *each]


def check_rows(offsets: Tensor, *factors: tuple[Tensor, Tensor | None]) -> None:
    """ValueError unless the factors have equally many rows, to which on a CPU the offsets ascend from 0. factors: rows,
    and an index of them or None, which on a CPU may name no others."""
    counts = {len(x if index is None else index) for x, index in factors}
    ends = bounds(offsets) if operands.readable(offsets) else []
    if len(counts) > 1 or (ends and (ends[0], ends[-1], ends) != (0, *counts, sorted(ends))):
        raise ValueError(f"offsets {ends} of factors with {sorted(counts)} rows: let them ascend from 0 to all rows")
    for x, index in factors:
        if index is not None:
            require_within("index", index, 0, len(x))


def grouped_matmul(
    a: Tensor, weights: Tensor, offsets: Tensor, index: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """y (R, N) with y[r] = W_e a[r] for each row r of group e, or W_e^T a[r] if transposed.

    Shapes:   a (R, K), or with an index (R,) int32 any number of rows (T, K), of which row r takes a[index[r]];
              weights (E, N, K), or (E, K, N) if transposed; offsets (E + 1,) int32, from 0 to R. Groups may be empty
    Numerics: as torch.mm for each group
    Traffic:  grouped_matmul_cost
    Source:   MegaBlocks (arXiv:2211.15841), without its padding
    """
    check_operands(a, weights, offsets, index, transposed)
    rows = len(a) if index is None else len(index)
    taken = a if index is None else a[index]
    y = a.new_empty(rows, weights.shape[2 if transposed else 1])
    ends = bounds(offsets)
    for group, (first, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        if first < end:
            torch.mm(taken[first:end], weights[group] if transposed else weights[group].t(), out=y[first:end])
    return y


def grouped_weight_gradient(
    dy: Tensor, x: Tensor, offsets: Tensor, dy_index: Tensor | None = None, x_index: Tensor | None = None
) -> Tensor:
    """dW (E, N, K) with dW_e = sum over the rows r of group e of dy[r] x[r]^T; 0 for an empty group.

    Shapes:   dy (R, N) and x (R, K), or with an index (R,) int32 any number of rows, of which row r takes that one
    Numerics: as torch.mm for each group
    Traffic:  grouped_matmul_cost
    """
    check_gradient(dy, x, offsets, dy_index, x_index)
    left = dy if dy_index is None else dy[dy_index]
    right = x if x_index is None else x[x_index]
    gradient = dy.new_empty(len(offsets) - 1, dy.shape[1], x.shape[1])
    ends = bounds(offsets)
    for group, (first, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        torch.mm(left[first:end].t(), right[first:end], out=gradient[group])
    return gradient


def grouped_matmul_cost(rows: int, n: int, k: int, groups: int, itemsize: int) -> Cost:
    """2 R N K FLOPs; reads rows and all matrices once and writes the result, in the forward and for each gradient."""
    return Cost(2 * rows * n * k, itemsize * (rows * (n + k) + groups * n * k))

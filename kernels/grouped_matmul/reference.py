"""GEMMs of groups of rows, each with a matrix of its own: the specification (torch only), and the cost.

Letters: R rows in E groups, N output and K input features. Group e has the rows offsets[e] to offsets[e + 1] - 1.
"""

import torch
from torch import Tensor

from ..cost import Cost


def bounds(offsets: Tensor) -> list[int]:
    """The offsets as numbers; none for fake tensors, which have no values: there is nothing to compute."""
    return [] if type(offsets) is not Tensor or offsets.is_meta else offsets.tolist()


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

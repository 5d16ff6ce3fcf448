"""LayerNorm and RMSNorm over the last dim: the specification (torch only), forward, backward and cost.

Letters: M rows (tokens), N columns (hidden).
"""

from typing import Any

import torch
from torch import Tensor

from ..cast import cast
from ..cost import Cost
from ..dropout.reference import finish_forward
from ..finish import Finish, Norm
from ..operands import FLOATS, Operand, require, unknown, wide_dtype
from ..pack.format import Packed
from ..pack.reference import unpacked
from ..quantize import reference as quantize
from ..quantize.format import blocks_bytes

NORMS = ("layernorm", "rmsnorm")

Statistics = tuple[Tensor | None, Tensor]  # mean, which is None for rmsnorm, and rstd: (M, 1) each


def check_operands(
    x: Tensor | Packed, norm: Norm, dy: Tensor | None = None, statistics: Statistics = (None, None),
    dresidual: Tensor | None = None, y: Tensor | None = None,
) -> None:  # fmt: skip
    """ValueError unless the norm's kind is known, and all operands have the shapes that are given below."""
    if norm.kind not in NORMS:
        raise unknown("norm", norm.kind, NORMS)
    (kind, weight, bias, _), (mean, rstd), shape, dtype = norm, statistics, x.shape, x.dtype
    shape = (shape[0], shape[-1])
    operands: list[Operand] = [("x", x, shape, FLOATS)]
    if weight is not None or bias is not None:
        operands += ("weight", weight, shape[1:], FLOATS), ("bias", bias, shape[1:], FLOATS)
    if dy is not None:
        operands += ("dy", dy, shape, (dtype,)), ("dresidual", dresidual, shape, FLOATS)
    if y is not None:
        operands.append(("y", y, shape, (dtype,)))
    if rstd is not None:
        of_rows = (shape[0], 1), (wide_dtype(dtype),)
        operands += ("mean", mean, *of_rows), ("rstd", rstd, *of_rows)
    require(kind, x, *operands)


def norm_forward(x: Tensor, norm: Norm, *, blocks: bool = False) -> tuple[Any, Statistics]:
    """Normalise each row of x, then scale (and shift): (y, statistics). blocks: y by quantize_rows.

    Math:     layernorm y = (x - mean) * rstd * weight + bias, rstd = (var + eps)**-0.5 (biased variance);
              rmsnorm   y = x * rstd * weight, rstd = (mean(x**2) + eps)**-0.5
    Shapes:   x (M, N); weight, bias (N,); y like x; statistics (M, 1) in promote_types(x.dtype, float32)
    Numerics: statistics in promote_types(x.dtype, float32), one rounding at the store
    Traffic:  see norm_cost
    Source:   Ba et al. 2016 (arXiv:1607.06450); Zhang & Sennrich 2019 (arXiv:1910.07467), eps inside the root
    """
    check_operands(x, norm)
    y, statistics = _normalised(x, norm)
    return quantize.quantize_rows(y) if blocks else y, statistics


def _normalised(x: Tensor, norm: Norm) -> tuple[Tensor, Statistics]:
    kind, weight, bias, eps = norm
    dtype = torch.promote_types(x.dtype, torch.float32)
    eps = torch.finfo(dtype).eps if eps is None else eps
    wide = cast(x, dtype)  # native_layer_norm on a CPU would keep bfloat16 statistics of bfloat16 rows
    if kind == "layernorm":
        y, mean, rstd = torch.native_layer_norm(wide, (x.shape[-1],), cast(weight, dtype), cast(bias, dtype), eps)
        return cast(y, x.dtype), (mean, rstd)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _rebuilt(x, (None, rstd), norm), (None, rstd)


def finish_norm_forward(x: Tensor, finish: Finish, *, blocks: bool = False) -> tuple[Tensor, Any, Statistics]:
    """(z, norm(z), statistics of z) with z = residual + dropout(x + bias); a part that is None is left out. blocks: as
    in norm_forward.

    Shapes:   as norm_forward and finish_forward, which says who checks them; z may take x's memory, and is x itself if
              nothing is added
    Numerics: z as finish_forward; the norm is of z as rounded to x.dtype
    Traffic:  see norm_cost
    """
    assert finish.norm is not None
    z = finish_forward(x, finish)
    y, statistics = _normalised(z, finish.norm)
    return z, quantize.quantize_rows(y) if blocks else y, statistics


# What is below takes what a forward has checked and saved, and a gradient whose shape autograd has compared. Launchers,
# whose checks cost nothing when they are replayed, check it again.


def norm_rebuilt(x: Tensor | Packed, statistics: Statistics, norm: Norm, blocks: bool = False) -> Any:
    """norm_forward's y again, bit for bit; from the statistics, where that is less work."""
    y = _rebuilt(x, statistics, norm)
    return quantize.quantize_rows(y) if blocks else y


def _rebuilt(x: Tensor | Packed, statistics: Statistics, norm: Norm) -> Tensor:
    x = unpacked(x)
    if norm.kind == "layernorm":  # torch computes statistics and result in one call
        return _normalised(x, norm)[0]
    rstd = statistics[1]
    y = cast(x, rstd.dtype) * rstd
    return cast(y if norm.weight is None else y * norm.weight, x.dtype)


def norm_backward(
    dy: Tensor, x: Tensor | Packed, statistics: Statistics, norm: Norm, dresidual: Tensor | None = None,
    *, blocks: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients (dx, dweight or None, dbias or None) of norm_forward, from its input and statistics. blocks: behind
    them dx by quantize_rows, too.

    Math:     with xhat the normalised row and g = dy * weight:
              dx = rstd * (g - mean(g) - xhat * mean(g * xhat))   (no mean(g) term for rmsnorm)
              dweight = sum_m dy * xhat, dbias = sum_m dy
              dresidual (M, N) is the gradient of x as a residual; it is added to dx before dx is rounded
    Shapes:   dy, x, dx (M, N); dweight, dbias (N,)
    """
    x, (mean, rstd), (kind, weight, bias, _) = unpacked(x), statistics, norm
    dtype = torch.promote_types(x.dtype, torch.float32)
    if kind == "layernorm":
        wanted = [True, weight is not None, bias is not None]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            cast(dy, dtype), cast(x, dtype), (x.shape[-1],), mean, rstd, cast(weight, dtype), cast(bias, dtype), wanted
        )
    else:
        normalised = cast(x, dtype) * rstd
        wide = cast(dy, dtype)
        g = wide if weight is None else wide * weight
        dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
        dweight, bias = None if weight is None else (wide * normalised).sum(0), None
    if dresidual is not None:
        dx += dresidual
    dweight = None if weight is None else cast(dweight, weight.dtype)
    dx = cast(dx, x.dtype)
    gradients = dx, dweight, None if bias is None else cast(dbias, bias.dtype)
    return (*gradients, quantize.quantize_rows(dx)) if blocks else gradients


def norm_cost(
    m: int, n: int, itemsize: int, kind: str = "layernorm", backward: bool = False,
    *, bias: bool = False, dropout: bool = False, residual: bool = False, blocks: bool = False,
) -> Cost:  # fmt: skip
    """Forward reads x and writes y, with `blocks` as blocks of e4m3, and the statistics; backward reads x and dy and
    writes dx, with `blocks` its blocks, too. Each weight is one row.

    With bias, dropout or residual the forward is finish_norm_forward, which also reads them and writes z. In a backward
    `residual` means dresidual, and the other two change nothing.
    """
    statistics = 4 * m * (2 if kind == "layernorm" else 1)
    added = residual if backward else bias + dropout + residual
    operands = 3 + residual if backward else 2 + residual + bool(added)
    flops_per_element = (11 if backward else 7) if kind == "layernorm" else (9 if backward else 4)
    vectors = (2 + (bias and not backward)) * n * itemsize + (8 * m if dropout and not backward else 0)
    written = blocks_bytes(m, n) - (0 if backward else m * n * itemsize) if blocks else 0
    flops = (flops_per_element + added + 2 * blocks) * m * n
    return Cost(flops, operands * m * n * itemsize + statistics + vectors + written)

"""LayerNorm and RMSNorm over the last dim: the specification (torch only), forward, backward and cost.

Letters: M rows (tokens), N columns (hidden).
"""

import torch
from torch import Tensor

from ..cost import Cost

# The second statistic of RMSNorm does not exist, so `mean` is None there; everything else has one shape for both.
Statistics = tuple[Tensor | None, Tensor]


def norm_forward(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> tuple[Tensor, Statistics]:
    """Normalise each row of x, then scale (and shift).

    Math:     layernorm y = (x - mean) * rstd * weight + bias, rstd = (var + eps)**-0.5 (biased variance);
              rmsnorm   y = x * rstd * weight, rstd = (mean(x**2) + eps)**-0.5
    Shapes:   x (M, N); weight, bias (N,); y like x; statistics (M, 1) in promote_types(x.dtype, float32)
    Numerics: statistics in promote_types(x.dtype, float32), one rounding at the store
    Traffic:  see norm_cost
    Source:   Ba et al. 2016 (arXiv:1607.06450); Zhang & Sennrich 2019 (arXiv:1910.07467), eps inside the root
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)  # before native_layer_norm too: on a CPU it would keep bfloat16 statistics for bfloat16 rows
    if kind == "layernorm":
        shift = None if bias is None else bias.to(dtype)
        y, mean, rstd = torch.native_layer_norm(wide, (x.shape[-1],), weight.to(dtype), shift, eps)
        return y.to(x.dtype), (mean, rstd)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight).to(x.dtype), (None, rstd)


def norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, weight: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients (dx, dweight, dbias) of norm_forward from its input and statistics; the output is not needed.

    Math:     with xhat the normalised row and g = dy * weight:
              dx = rstd * (g - mean(g) - xhat * mean(g * xhat))   (no mean(g) term for rmsnorm)
              dweight = sum_m dy * xhat, dbias = sum_m dy
    """
    mean, rstd = statistics
    dtype = torch.promote_types(x.dtype, torch.float32)
    if kind == "layernorm":
        shift, wanted = (None, [True, True, False]) if bias is None else (bias.to(dtype), [True, True, True])
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.to(dtype), x.to(dtype), (x.shape[-1],), mean, rstd, weight.to(dtype), shift, wanted
        )
        return dx.to(x.dtype), dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)
    normalised = x.to(dtype) * rstd
    g = dy.to(dtype) * weight
    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy.to(dtype) * normalised).sum(0).to(weight.dtype), None


def norm_cost(m: int, n: int, itemsize: int, kind: str = "layernorm", backward: bool = False) -> Cost:
    """Forward reads x, writes y and the statistics; backward reads x, dy and writes dx (weights: one row each)."""
    statistics = 4 * m * (2 if kind == "layernorm" else 1)
    rows = (3 if backward else 2) * m * n * itemsize
    flops_per_element = (11 if backward else 7) if kind == "layernorm" else (9 if backward else 4)
    return Cost(flops_per_element * m * n, rows + statistics + 2 * n * itemsize)

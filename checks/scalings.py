"""Which share of the quantised numbers a layout changes, by what has one scale: a table of `bench layouts --fp8`.

Belongs here: other ways to scale than the library's, each on a matrix and on its shards. Nothing trains by them.
"""

from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor

from harness.runner import columns
from tpformer.kernels.quantize.format import BLOCK, LARGEST, VALUES
from tpformer.kernels.quantize.reference import dequantize, dequantize_weight, quantize_rows, quantize_weight

TOKENS, FEATURES, RANKS = 2048, 1024, 8
Scaling = Callable[[Tensor], Tensor]  # the numbers that are multiplied in place of a matrix's


def by_float_scale(m: int | None, k: int | None) -> Scaling:
    """Blocks of m x k (None: all), whose scale is amax / 448 in float32."""

    def scaling(x: Tensor) -> Tensor:
        rows, columns_ = m or len(x), k or x.shape[1]
        blocks = x.unflatten(1, (-1, columns_)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
        return ((blocks / scale).to(VALUES).float() * scale).flatten(2).flatten(0, 1)

    return scaling


ACTIVATIONS: dict[str, Scaling] = {
    "one scale a matrix": by_float_scale(None, None),
    "one scale a row": by_float_scale(1, None),
    "1 x 128, float scales": by_float_scale(1, BLOCK),
    "1 x 128, powers of two: this library": lambda x: dequantize(quantize_rows(x), x.dtype),
}
WEIGHTS: dict[str, Scaling] = {
    "one scale a matrix": by_float_scale(None, None),
    "one scale a row": by_float_scale(1, None),
    "128 x 128, float scales": by_float_scale(BLOCK, BLOCK),
    "128 x 128, powers of two: this library": lambda x: dequantize_weight(quantize_weight(x), x.dtype),
}


def differing(scaling: Scaling, x: Tensor, dim: int) -> float:
    """The share of numbers that another value stands for if RANKS ranks quantise shards of x along dim."""
    of_ranks = torch.cat([scaling(shard.contiguous()) for shard in x.chunk(RANKS, dim)], dim)
    return (of_ranks != scaling(x)).float().mean().item()


def matrices() -> tuple[Tensor, Tensor]:
    """(activations, weight): normal numbers of features and rows that differ in size."""
    drawn = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    x = normal(TOKENS, FEATURES) * normal(FEATURES).exp() * (0.5 * normal(TOKENS, 1)).exp()
    w = 0.02 * normal(FEATURES, FEATURES) * (0.3 * normal(FEATURES, 1)).exp() * (0.3 * normal(FEATURES)).exp()
    return x, w


def scalings_table() -> Table:
    """The share of numbers that differ from one process, of activations and weights cut along either dim."""
    table = columns(["numbers that differ from one process"], (f"rows / {RANKS}", f"columns / {RANKS}"))
    for name, x, scalings in zip(("activations", "weight"), matrices(), (ACTIVATIONS, WEIGHTS), strict=True):
        for kind, scaling in scalings.items():
            table.add_row(f"{name}, {kind}", *(f"{differing(scaling, x, dim):.3f}" for dim in (0, 1)))
    return table

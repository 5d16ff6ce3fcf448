"""GEMMs of quantised numbers (FP8): which matrices are quantised, by whom, and how their blocks travel.

Belongs here: the Products of blocks. What blocks are: kernels/quantize/format.py. How the ranks talk: the transports.

    matrix                                   quantised by                     and used in
    normed x of a column linear              the rank that has the rows       forward, weight gradient
    act(x) of a row linear                   the rank that has the features   forward, weight gradient
    dy of a column linear                    the rank that has the features   gradients of input and weight
    dy of a row linear, after dropout        the rank that has the rows       gradients of input and weight
    weight                                   the rank that has the shard      forward, gradient of the input

Experts are alike: rows are quantised before they are dispatched, and each expert has blocks of its own. Each block lies
within one rank's shard, and its scale follows from itself: so every layout multiplies the same numbers. Biases,
residuals, norms, routers, sums and weight gradients have the dtype of x.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, VALUES, Blocks

from ..implementation import implementation
from ..quantized_product import quantized_product
from .interface import REGISTRY
from .products import Factor, Products


class Right(NamedTuple):
    """A weight in blocks, as quantized_product takes it."""

    blocks: Blocks
    weight: Tensor  # of the dtype that products have


class Quantized(Products):
    """GEMMs of blocks: of CPU tensors of any dtype but float16, and of bfloat16 on GPUs that have e4m3.

    Rows travel as a byte a value and a byte a block of 128: 129 / 256 of the bytes in 16 bits.
    """

    name = "quantized"
    in_blocks = True

    def factor(self, x: Factor) -> Blocks:
        """Products.factor: the blocks of x, which a norm or an activation may have written."""
        return _told(x if isinstance(x, Blocks) else implementation("quantize", x).quantize_rows(x))

    def sent(self, x: Factor) -> Tensor:
        """Products.sent: the bytes of the blocks of x."""
        return packed_rows(self.factor(x))

    def received(self, rows: Tensor) -> Blocks:
        """Products.received: the blocks of these bytes."""
        return unpacked_rows(rows)

    def right(self, weight: Tensor, transposed: bool) -> Right:
        """Products.right: the weight in blocks, or its transposed copy: matrix units multiply e4m3 along rows only."""
        if transposed:
            return Right(_told(implementation("quantize", weight).quantize_weight(weight)), weight)
        blocks, turned = implementation("quantize", weight).quantize_weight_twice(weight)
        _told(blocks)
        return Right(turned, weight)

    def product(self, x: Blocks, right: Right, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Products.product."""
        adds = added is not None and added is out
        y = quantized_product(x, right.blocks, None if adds else added, right.weight)
        if out is None:
            return y
        return out.add_(y) if adds else out.copy_(y)

    def matrix(self, factor: Blocks, dtype: torch.dtype) -> Tensor:
        """Products.matrix: what the blocks stand for, which bfloat16 has exactly."""
        return implementation("quantize", factor.values.new_empty(0, dtype=dtype)).dequantize(factor, dtype)

    def expert_right(self, weights: Tensor, transposed: bool) -> tuple[Right, bool]:
        """Products.expert_right: each expert's matrix in blocks of its own; widths are multiples of 128."""
        return self.right(weights.flatten(0, 1), not transposed), transposed

    def expert_product(
        self, x: Blocks, right: tuple[Right, bool], offsets: Tensor, index: Tensor | None = None
    ) -> Tensor:
        """Products.expert_product."""
        (blocks, weight), transposed = right
        grouped = implementation("quantized_grouped_matmul", weight).quantized_grouped_matmul
        return grouped(x, blocks, offsets, index, transposed=transposed, dtype=weight.dtype)


BLOCKS = Quantized()


def packed_rows(blocks: Blocks) -> Tensor:
    """Blocks of rows (M, K) as the bytes that are sent, (M, K + K / 128) uint8: each row's values, then its exponents.

    A row's exponents travel with it, and no receiver computes one. No backend sends e4m3.
    """
    values, exponents = blocks
    return torch.cat([values.view(torch.uint8), exponents.t().view(torch.uint8)], 1)


def unpacked_rows(rows: Tensor) -> Blocks:
    """The blocks of bytes that `packed_rows` made, (M, K + K / 128), of any number of rows."""
    columns = rows.shape[1] // (BLOCK + 1) * BLOCK
    values, exponents = rows[:, :columns].contiguous(), rows[:, columns:].t().contiguous()
    return Blocks(values.view(VALUES), exponents.view(EXPONENTS))


def _told(blocks: Blocks) -> Blocks:
    REGISTRY.quantized.tell(blocks)
    return blocks


def record_blocks() -> AbstractContextManager[list[Blocks]]:
    """A context that gives a list. The blocks of every matrix that this process quantises for a linear are appended,
    in order; those of a weight have exponents (N / 128, K / 128), those of rows (K / 128, M)."""
    return REGISTRY.quantized.listen()

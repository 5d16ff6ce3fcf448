"""Linears of quantised numbers (FP8): the collective of the blocks, then the GEMM of what they stand for.

Belongs here: which matrices of a linear are quantised, where, and how their blocks travel. What blocks are:
kernels/quantize/format.py.

    matrix                                   quantised by                     and used in
    normed x of a column linear              the rank that has the rows       forward, weight gradient
    act(x) of a row linear                   the rank that has the features   forward, weight gradient
    dy of a column linear                    the rank that has the features   gradients of input and weight
    dy of a row linear, after dropout        the rank that has the rows       gradients of input and weight
    weight                                   the rank that has the shard      forward, gradient of the input

Each block lies within one rank's shard, and its scale follows from itself: so every layout multiplies the same numbers.
Biases, residuals, norms, sums and weight gradients have the dtype of x.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import reduce

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather
from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, VALUES, Blocks

from ..implementation import implementation
from ..quantized_product import quantized_product
from .interface import REGISTRY, Factor
from .sequential import Sequential


class Quantized(Sequential):
    """Serves CPU tensors of any dtype but float16, and bfloat16 on GPUs that have e4m3. Without a group it quantises
    alike and communicates nothing.

    A gather sends a byte a value and a byte a block of 128: 129 / 256 of the bytes in 16 bits. Reductions send what
    Sequential sends.
    """

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.name = "quantized"
        self.gathering = self if sequence_parallel else Quantized(None)

    def factor(self, x: Tensor) -> Blocks:
        """Transport.factor: the blocks of x."""
        return _told(implementation("quantize", x).quantize_rows(x))

    def weight_gradient(self, dy: Factor, x: Factor, dtype: torch.dtype) -> Tensor:
        """Transport.weight_gradient: a GEMM in this dtype of what both stand for, which bfloat16 has exactly."""
        assert isinstance(dy, Blocks) and isinstance(x, Blocks)
        dequantize = implementation("quantize", x.values.new_empty(0, dtype=dtype)).dequantize
        return dequantize(dy, dtype).t() @ dequantize(x, dtype)

    def _gathered(self, x_shard: Tensor) -> Blocks:
        """The blocks of all ranks' rows."""
        blocks = self.factor(x_shard)
        return blocks if self.group is None else unpacked_rows(all_gather(packed_rows(blocks), self.group))

    def _linear(self, x: Blocks, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return quantized_product(x, _told(implementation("quantize", weight).quantize_weight(weight)), bias, weight)

    def _sum_of_products(self, inputs: Sequence[Blocks], weights: Sequence[Tensor], transposed: bool) -> Tensor:
        return reduce(Tensor.add_, map(self._linear if transposed else self._by_columns, inputs, weights))

    def _by_columns(self, x: Blocks, weight: Tensor) -> Tensor:
        """x W, by the weight's transposed copy: matrix units multiply e4m3 along rows only."""
        blocks, turned = implementation("quantize", weight).quantize_weight_twice(weight)
        _told(blocks)
        return quantized_product(x, turned, None, weight)


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

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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather
from tpformer.kernels.finish import NOTHING, Finish
from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, VALUES, Blocks
from tpformer.kernels.quantize.reference import dequantize, dequantize_weight, quantize_rows, quantize_weight

from ..implementation import implementation
from ..norm import Normed
from .interface import GATHER, REGISTRY, Kept
from .sequential import Sequential


class Quantized(Sequential):
    """Serves CPU tensors of any dtype but float16. Without a group it quantises alike and communicates nothing.

    A gather sends a byte a value and a byte a block of 128: 129 / 256 of the bytes in 16 bits. Reductions send what
    Sequential sends.
    """

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.name = "quantized"
        self.gathering = self if sequence_parallel else Quantized(None)

    def factor(self, x: Tensor) -> Tensor:
        """Transport.factor: x rounded to its blocks."""
        return dequantize(_told(quantize_rows(x)), x.dtype)

    def gather_matmul(
        self, x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: all-gather of blocks, then F.linear for each weight."""
        self._record(GATHER)
        x_gathered = self._gathered(x_shard)
        return [F.linear(x_gathered, _factor_of(weight), bias) for weight, bias in zip(weights, biases, strict=True)]

    def gather_matmul_derivative(
        self, dy_shard: Tensor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Transport.gather_matmul_derivative: all-gather of blocks, GEMM, then the activation's derivative."""
        self._record(GATHER)
        dy_gathered = self._gathered(dy_shard)
        backward = implementation("activation", x).activation_backward
        dx, dgate, a = backward(dy_gathered @ _factor_of(weight), x, activation, gate)
        return dx, dgate, self.factor(a), dy_gathered

    def matmul_reduce(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: that of Sequential, by quantised weights."""
        return super().matmul_reduce(inputs, list(map(_factor_of, weights)), transposed=transposed, finish=finish)

    def start_gather(self, x_shard: Tensor) -> Callable[[], Tensor]:
        """Transport.start_gather: gathers blocks when it is waited for."""
        return lambda: self._gathered(x_shard)

    def _gathered(self, x_shard: Tensor) -> Tensor:
        """The factor of all ranks' rows, from one gather of their blocks."""
        blocks = _told(quantize_rows(x_shard))
        if self.group is not None:
            blocks = unpacked_rows(all_gather(packed_rows(blocks), self.group))
        return dequantize(blocks, x_shard.dtype)


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


def _factor_of(weight: Tensor) -> Tensor:
    return dequantize_weight(_told(quantize_weight(weight)), weight.dtype)


def _told(blocks: Blocks) -> Blocks:
    REGISTRY.quantized.tell(blocks)
    return blocks


def record_blocks() -> AbstractContextManager[list[Blocks]]:
    """A context that gives a list. The blocks of every matrix that this process quantises for a linear are appended,
    in order; those of a weight have exponents (N / 128, K / 128), those of rows (K / 128, M)."""
    return REGISTRY.quantized.listen()

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

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tpformer.kernels.finish import Dropout, Norm
from tpformer.kernels.norm.reference import Statistics
from tpformer.kernels.quantize.format import BLOCK, EXPONENTS, VALUES, Blocks

from ..implementation import implementation
from ..quantized_product import quantized_product
from ..unsaved import versions
from .interface import REGISTRY
from .products import Factor, Kept, Products

BESIDE = "tpformer_blocks"
"""The attribute of a gradient on its way from one linear to another, through autograd, which hands on the very tensor:
how often it had been written when its blocks were made, and these. Only gradients that nobody else sees have it."""


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
        """Products.factor: the blocks of x, which a norm or an activation may have written, in its place or beside."""
        if not isinstance(x, Blocks):
            x = _beside(x) or implementation("quantize", x).quantize_rows(x)
        return _told(x)

    def derivative(
        self, da: Tensor, x: Kept, activation: str | None, gate: Kept | None
    ) -> tuple[Tensor, Tensor | None, Blocks]:
        """Products.derivative. dx and dgate have their blocks beside them, for the linear that takes them."""
        backward = implementation("activation", x).activation_backward
        dx, dgate, a, blocks = backward(da, x, activation, gate, blocks=True)
        for gradient, of_gradient in zip((dx, dgate), blocks, strict=True):
            if of_gradient is not None:
                _lay_beside(gradient, of_gradient)
        return dx, dgate, _told(a)

    def norm_gradients(
        self, dy: Tensor, x: Kept, statistics: Statistics, norm: Norm, dresidual: Tensor | None, private: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Products.norm_gradients. A private dx has its blocks beside it."""
        if not private:
            return super().norm_gradients(dy, x, statistics, norm, dresidual, private)
        backward = implementation("norm", x).norm_backward
        *gradients, blocks = backward(dy, x, statistics, norm, dresidual, blocks=True)
        _lay_beside(gradients[0], blocks)
        return tuple(gradients)

    def show(self, *gradients: Tensor | None) -> None:
        """Products.show. They lose their blocks: autograd does not count every write, such as those of an all-reduce,
        through .data or by a kernel."""
        for gradient in gradients:
            if gradient is not None:
                vars(gradient).pop(BESIDE, None)

    def finish_gradient(self, dy: Tensor, dropout: Dropout | None, bias: bool) -> tuple[Factor, Tensor | None]:
        """Products.finish_gradient. A pass that reads dy writes the blocks; dy itself may have them beside, and loses
        them, because it may be the gradient of a residual, too, which others see."""
        beside = _beside(dy)
        self.show(dy)
        if dropout is None and not bias:
            return dy if beside is None else beside, None
        return implementation("dropout", dy).finish_backward(dy, dropout, bias, blocks=True)

    def sent(self, x: Factor) -> Tensor:
        """Products.sent: the bytes of the blocks of x."""
        return packed_rows(self.factor(x))

    def received(self, rows: Tensor) -> Blocks:
        """Products.received: the blocks of these bytes."""
        return unpacked_rows(rows)

    def right(self, weight: Tensor, transposed: bool) -> Right:
        """Products.right: the weight in blocks, or its transposed copy: matrix units multiply e4m3 along rows only.

        Of experts' matrices (E, N, K) those of all, one below the other. Within keep_blocks both are made at once.
        """
        if REGISTRY.blocks is not None:
            return Right(_kept(REGISTRY.blocks, weight)[not transposed], weight)
        if transposed:
            quantize_weight = implementation("quantize", weight).quantize_weight
            return Right(_told(quantize_weight(weight.flatten(0, -2))), weight)
        return Right(_both(weight)[1], weight)

    def product(self, x: Blocks, right: Right, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Products.product."""
        adds = added is not None and added is out
        y = quantized_product(x, right.blocks, None if adds else added, right.weight)
        if out is None:
            return y
        return out.add_(y) if adds else out.copy_(y)

    def linear(self, x: Blocks, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Products.linear."""
        return self.product(x, self.right(weight, True), bias)

    def matrix(self, factor: Blocks, dtype: torch.dtype) -> Tensor:
        """Products.matrix: what the blocks stand for, which bfloat16 has exactly."""
        return implementation("quantize", factor.values.new_empty(0, dtype=dtype)).dequantize(factor, dtype)

    def expert_right(self, weights: Tensor, transposed: bool) -> tuple[Right, bool]:
        """Products.expert_right: each expert's matrix in blocks of its own; widths are multiples of 128."""
        return self.right(weights, not transposed), transposed

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


def _lay_beside(x: Tensor, blocks: Blocks) -> None:
    setattr(x, BESIDE, (versions(x), blocks))


def _beside(x: Tensor) -> Blocks | None:
    """The blocks of x that were made with it. None without such, or where x was written since, as autograd does that
    adds another gradient to it."""
    before, blocks = getattr(x, BESIDE, (None, None))
    return blocks if before == versions(x) else None


def _told(blocks: Blocks) -> Blocks:
    REGISTRY.quantized.tell(blocks)
    return blocks


def _both(weight: Tensor) -> tuple[Blocks, Blocks]:
    """The weight in blocks, and its transposed copy, from one reading."""
    both = implementation("quantize", weight).quantize_weight_twice(weight.flatten(0, -2))
    _told(both[0])
    return both


class _Kept(NamedTuple):
    """A weight's blocks, and the weight when they were made."""

    weight: Tensor
    version: list[int]
    both: tuple[Blocks, Blocks]


def _kept(blocks: dict[int, _Kept], weight: Tensor) -> tuple[Blocks, Blocks]:
    """The blocks of a weight that are kept, which are made if it has none, or has been written since."""
    found, version = blocks.get(address := weight.data_ptr()), versions(weight)
    # at an address there may be another weight: a part of the same memory, or memory that was freed and given away
    if found is None or found.version != version or not found.weight.is_set_to(weight):
        found = blocks[address] = _Kept(weight.detach(), version, _both(weight))
    return found.both


@contextmanager
def keep_blocks() -> Iterator[None]:
    """Within, a weight's blocks are made at its first use, and kept for all others: for a step, whose weights stay.

    A weight that is written in place, or lies in other memory, is quantised again. So nobody within may write one
    without that autograd counts it, as an optimizer's kernels do, and FSDP2 where it gathers a weight again.
    Memory: 2 bytes for each element of a weight, and the weight itself, until the context is left. As one ends, others
    of this process, such as another thread's, begin anew.
    """
    REGISTRY.keeping, REGISTRY.blocks = REGISTRY.keeping + 1, REGISTRY.blocks or {}
    try:
        yield
    finally:
        REGISTRY.keeping -= 1
        REGISTRY.blocks = {} if REGISTRY.keeping else None


def record_blocks() -> AbstractContextManager[list[Blocks]]:
    """A context that gives a list. The blocks of every matrix that this process quantises for a linear are appended,
    in order; those of a weight have exponents (N / 128, K / 128), those of rows (K / 128, M)."""
    return REGISTRY.quantized.listen()

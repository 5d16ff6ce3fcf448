"""GEMMs of blocks of e4m3 fused with their communication in one Triton kernel over symmetric memory; imports triton.

Belongs here: what products of blocks do otherwise than those of 16 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.kernel_workspace import KernelWorkspace
from tpformer.kernels.all_gather_grouped_matmul.kernel import OPERATION as EXPERTS
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_quantized_grouped_matmul
from tpformer.kernels.all_gather_matmul.kernel import await_gathered
from tpformer.kernels.all_gather_quantized_matmul.kernel import (
    all_gather_quantized_matmul,
    all_gather_quantized_matmul_derivative,
)
from tpformer.kernels.all_gather_quantized_matmul.reference import packed_shard, unpacked_shards
from tpformer.kernels.arguments import MAXIMUM_WEIGHTS
from tpformer.kernels.finish import NOTHING, Finish
from tpformer.kernels.launch import require_matrices
from tpformer.kernels.matmul_all_reduce.kernel import quantized_matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import quantized_matmul_reduce_scatter
from tpformer.kernels.protocol import Channel
from tpformer.kernels.quantize.format import VALUES, Blocks

from ..dispatch import Dispatch
from ..norm import Normed
from .fused import Fused, dense_columns, for_all
from .interface import GATHER, finish_rows, record_transport
from .products import Factor, Kept
from .quantized import BLOCKS
from .sequential import local

OPERATION = "all_gather_quantized_matmul"


class FusedBlocks(Fused):
    """Fused for products of blocks. A rank sends one piece of memory, its rows' values and then their exponents. What
    it has gathered is copied out of the slot, so no later operation overwrites it. Sums travel in the weights' dtype.
    """

    def __init__(self, group: ProcessGroup, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.products = BLOCKS
        if not sequence_parallel:
            self.gathering = local(BLOCKS)

    def _begin_blocks(
        self, operation: str, blocks: Blocks, columns: int | None, keep: bool
    ) -> tuple[Tensor, Channel, KernelWorkspace, bool]:
        """(the rank's rows as they travel, channel, workspace, whether the kernel has to push), as _begin_gather. Keep
        the rows until the copies are joined."""
        shard = packed_shard(blocks)
        channel, workspace, sent = self._begin_gather(operation, shard, columns, keep, blocks)
        return shard if sent is None else sent, channel, workspace, sent is None

    def gather_matmul(
        self, x_shard: Factor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: own rows first; a fourth weight and later ones get a product of their own."""
        blocks, biases = BLOCKS.factor(x_shard), for_all(weights, biases)
        first, rest = slice(MAXIMUM_WEIGHTS), slice(MAXIMUM_WEIGHTS, None)
        require_matrices(blocks.values, *weights)
        rights = [BLOCKS.right(weight, True) for weight in weights]
        record_transport(GATHER, self.name)
        columns, more = sum([len(w) for w in weights[first]]), len(weights) > MAXIMUM_WEIGHTS
        shard, channel, workspace, push = self._begin_blocks(OPERATION, blocks, columns, keep=more)
        outputs = all_gather_quantized_matmul(
            shard, [right.blocks for right in rights[first]], channel, biases[first], dtype=weights[0].dtype,
            push=push, keep=push and more, spare=self.spare,
        )  # fmt: skip
        workspace.end()
        if more:
            x = unpacked_shards(self._gathered(channel, workspace, shard), blocks.values.shape[1])
            outputs += [BLOCKS.product(x, *pair) for pair in zip(rights[rest], biases[rest], strict=True)]
        return outputs

    def gather_matmul_derivative(
        self, dy_shard: Factor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Blocks, Blocks]:
        """Transport.gather_matmul_derivative, with the activation's derivative in the GEMM's epilogue."""
        blocks = BLOCKS.factor(dy_shard)
        require_matrices(blocks.values, weight)
        right = BLOCKS.right(weight, False).blocks
        record_transport(GATHER, self.name)
        shard, channel, workspace, push = self._begin_blocks(OPERATION, blocks, weight.shape[1], keep=True)
        options: dict = {"push": push, "keep": push, "spare": self.spare}
        if activation is None:
            (dx,) = all_gather_quantized_matmul(shard, [right], channel, dtype=weight.dtype, **options)
            dgate, a = None, x
        else:
            dx, dgate, a = all_gather_quantized_matmul_derivative(shard, right, channel, x, activation, gate, **options)
        workspace.end()
        dy_gathered = unpacked_shards(self._gathered(channel, workspace, shard), blocks.values.shape[1])
        return dx, dgate, BLOCKS.factor(a), dy_gathered

    def gather_grouped(
        self, x_shard: Factor, dispatch: Dispatch, weights: Tensor, *, transposed: bool, keep: bool
    ) -> tuple[Tensor, Factor]:
        """What experts.gather_experts returns. Every rank calls it, also one whose experts have no row."""
        blocks, (right, _) = BLOCKS.factor(x_shard), BLOCKS.expert_right(weights, transposed)
        record_transport(GATHER, self.name)
        columns = dense_columns(dispatch, weights, transposed, self.group)
        shard, channel, workspace, push = self._begin_blocks(EXPERTS, blocks, columns, keep=True)
        y = all_gather_quantized_grouped_matmul(
            shard, right.blocks, channel, dispatch.counts, dispatch.tokens, transposed=transposed, dtype=weights.dtype,
            push=push, keep=push, spare=self.spare,
        )  # fmt: skip
        workspace.end()
        return y, unpacked_shards(self._gathered(channel, workspace, shard), blocks.values.shape[1])

    def matmul_reduce(
        self,
        inputs: Sequence[Any],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: each tile goes to its owner as it is computed; the norm has its own pass."""
        require_matrices(*(x.values for x in inputs), *weights)
        lefts = joined(inputs, 0)
        rights = joined([BLOCKS.right(weight, transposed).blocks for weight in weights], 1)
        like, sizes = weights[0], (len(lefts[0].values), len(rights[0].values))
        reduce = quantized_matmul_reduce_scatter if self.sequence_parallel else quantized_matmul_all_reduce
        channel, workspace, tile, end = self._begin_reduction(sizes, like, VALUES, finish)
        y = reduce(lefts, rights, channel, end, dtype=like.dtype, tile=tile, spare=self.spare)
        workspace.end()
        return (y, None) if finish.norm is None else finish_rows(y, Finish(norm=finish.norm))

    def start_gather(self, x_shard: Factor) -> Callable[[], Factor]:
        """Transport.start_gather: copy engines begin at once; shards that they would be slow with, the wait pushes."""
        blocks = BLOCKS.factor(x_shard)
        shard, channel, workspace, push = self._begin_blocks("all_gather", blocks, None, keep=True)

        def wait() -> Blocks:
            await_gathered(channel, shard, push=push)
            workspace.end()
            return unpacked_shards(self._gathered(channel, workspace, shard), blocks.values.shape[1])

        return wait


def joined(factors: Sequence[Blocks], dim: int) -> Sequence[Blocks]:
    """At most the three factors that kernels take: later ones are joined to the third, along K. dim: that of exponents
    that K is."""
    last = MAXIMUM_WEIGHTS - 1
    if len(factors) <= MAXIMUM_WEIGHTS:
        return factors
    values, exponents = zip(*factors[last:], strict=True)
    bytes_of_all = torch.cat([each.view(torch.uint8) for each in values], 1)
    return [*factors[:last], Blocks(bytes_of_all.view(VALUES), torch.cat(exponents, dim))]

"""GEMMs fused with their communication in one Triton kernel over symmetric memory; imports triton."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import check_divisible, record
from tpformer.distributed.groups import kernel_workspace
from tpformer.distributed.kernel_workspace import KernelWorkspace
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul
from tpformer.kernels.all_gather_matmul.kernel import (
    all_gather_matmul,
    all_gather_matmul_derivative,
    all_gather_matmul_space,
    await_gathered,
    gathered_copy,
)
from tpformer.kernels.arguments import MAXIMUM_WEIGHTS
from tpformer.kernels.configurations import select_tile
from tpformer.kernels.cost import is_one_shot
from tpformer.kernels.finish import NOTHING, Finish
from tpformer.kernels.launch import Tile, packed, require_matrices
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce, matmul_all_reduce_space, select_all_reduce_tile
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter, matmul_reduce_scatter_space
from tpformer.kernels.protocol import Channel
from tpformer.kernels.quantize.format import VALUES, Blocks, blocks_bytes

from ..choice.prediction import send_by_copies
from ..choice.spare import spare_processors
from ..dispatch import Dispatch
from ..dropout import told
from ..norm import Normed
from .interface import ALL_REDUCE, GATHER, SCATTER, Transport, finish_rows, record_transport
from .products import Kept
from .sequential import LOCAL


class Fused(Transport):
    """One kernel for each method, over the group's `gather` or `reduce` workspace.

    Numerics: partial sums travel in the inputs' dtype and are added in rank order in float32. Bias, dropout and
    residual are applied in float32, too, before the one rounding.
    """

    name = "fused"
    group: ProcessGroup

    def __init__(self, group: ProcessGroup, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.untold = None
        self.gathering = self if sequence_parallel else LOCAL
        self.spare = spare_processors(group)

    def _begin_gather(
        self, operation: str, shard: Tensor, columns: int | None, keep: bool, blocks: Blocks | None = None
    ) -> tuple[Channel, KernelWorkspace, Tensor | None]:
        """(channel, workspace, rows that copies send). Keep the rows until the copies are joined. If they are None, the
        kernel has to push. KernelWorkspace.end ends it.

        shard: as it travels. columns: of the GEMM's result; None if the gather runs under another kernel. keep:
        somebody reads all gathered rows from the slot, so the own ones, which no copy engine sends, have to be put
        there. blocks: what the GEMM multiplies, if the shard is packed blocks, whose padding counts as no traffic.
        """
        world, (rows, k), nbytes, dtype = self.group.size(), shard.shape, shard.nbytes, shard.dtype
        space = all_gather_matmul_space(rows, k, world, shard.element_size())
        if blocks is not None:
            (rows, k), dtype = blocks.values.shape, VALUES
            nbytes = blocks_bytes(rows, k)
        record("all_gather", world * nbytes)
        workspace = kernel_workspace(self.group, "gather", shard.device)
        channel = workspace.begin(operation, *space, shard.shape, shard.dtype)
        sizes = rows * world, columns, k
        if not workspace.copies_allowed or not send_by_copies(sizes, world, dtype, shard.device):
            return channel, workspace, None
        sent = packed(shard)
        workspace.copy_gather(sent, keep)
        return channel, workspace, sent

    def _gathered(self, channel: Channel, workspace: KernelWorkspace, x_shard: Tensor) -> Tensor:
        """The gathered rows, valid until the next gather. They are the slot itself, or a copy once a CUDA graph was
        captured: then only the device knows which slot it is."""
        if workspace.captured:
            return gathered_copy(channel, x_shard)
        return channel.gathered(workspace.epoch & 1, x_shard)

    def gather_matmul(
        self, x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: own rows first; a fourth weight and later ones get a GEMM of their own."""
        require_matrices(x_shard, *weights)
        biases, first, rest = for_all(weights, biases), weights[:MAXIMUM_WEIGHTS], weights[MAXIMUM_WEIGHTS:]
        record_transport(GATHER, self.name)
        columns, more = sum([w.shape[0] for w in first]), bool(rest)
        channel, workspace, sent = self._begin_gather("all_gather_matmul", x_shard, columns, keep=more)
        push = sent is None
        outputs = all_gather_matmul(
            x_shard, first, channel, biases[:MAXIMUM_WEIGHTS], push=push, keep=push and more, spare=self.spare
        )
        workspace.end()
        if more:
            x_gathered = self._gathered(channel, workspace, x_shard)
            outputs += [F.linear(x_gathered, *pair) for pair in zip(rest, biases[MAXIMUM_WEIGHTS:], strict=True)]
        return outputs

    def gather_matmul_derivative(
        self, dy_shard: Tensor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Transport.gather_matmul_derivative, with the activation's derivative in the GEMM's epilogue."""
        dy_shard = dy_shard.contiguous()
        require_matrices(dy_shard, weight)
        record_transport(GATHER, self.name)
        channel, workspace, sent = self._begin_gather("all_gather_matmul", dy_shard, weight.shape[1], keep=True)
        push = sent is None
        options: dict = {"push": push, "keep": push, "spare": self.spare}
        if activation is None:
            (dx,) = all_gather_matmul(dy_shard, [weight], channel, b_transposed=True, **options)
            dgate, a = None, x
        else:
            dx, dgate, a = all_gather_matmul_derivative(dy_shard, weight, channel, x, activation, gate, **options)
        workspace.end()
        dy_gathered = gathered_copy(channel, dy_shard) if keep else self._gathered(channel, workspace, dy_shard)
        return dx, dgate, a, dy_gathered

    def gather_grouped(
        self, x_shard: Tensor, dispatch: Dispatch, weights: Tensor, *, transposed: bool, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """What experts.gather_experts returns. Every rank calls it, also one whose experts have no row."""
        record_transport(GATHER, self.name)
        columns = dense_columns(dispatch, weights, transposed, self.group)
        channel, workspace, sent = self._begin_gather("all_gather_grouped_matmul", x_shard, columns, keep=True)
        push = sent is None
        y = all_gather_grouped_matmul(
            x_shard, weights, channel, dispatch.counts, dispatch.tokens, transposed=transposed, push=push, keep=push,
            spare=self.spare,
        )  # fmt: skip
        workspace.end()
        return y, gathered_copy(channel, x_shard) if keep else self._gathered(channel, workspace, x_shard)

    def matmul_reduce(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: each tile goes to its owner as it is computed; the norm has its own pass."""
        require_matrices(*inputs, *weights)
        if len(inputs) > MAXIMUM_WEIGHTS:
            inputs, weights = _join_to_three(inputs, weights, transposed)
        x, reduce = inputs[0], matmul_reduce_scatter if self.sequence_parallel else matmul_all_reduce
        sizes = x.shape[0], weights[0].shape[0 if transposed else 1]
        channel, workspace, tile, end = self._begin_reduction(sizes, x, x.dtype, finish)
        y = reduce(inputs, weights, channel, end, b_transposed=not transposed, tile=tile, spare=self.spare)
        workspace.end()
        return (y, None) if finish.norm is None else finish_rows(y, Finish(norm=finish.norm))

    def _begin_reduction(
        self, sizes: tuple[int, int], like: Tensor, operands: torch.dtype, finish: Finish
    ) -> tuple[Channel, KernelWorkspace, Tile, Finish]:
        """(channel, workspace, tile, the finish without its norm). KernelWorkspace.end ends it.

        sizes: rows of all ranks, and columns. like: the result has its dtype and device. operands: the dtype of what
        the GEMM multiplies.
        """
        (m, n), scatter, world, dtype = sizes, self.sequence_parallel, self.group.size(), like.dtype
        op = SCATTER if scatter else ALL_REDUCE
        record_transport(op, self.name)
        if scatter:
            check_divisible(m, world)
        record("reduce_scatter" if scatter else "all_reduce", m * n * dtype.itemsize)
        workspace = kernel_workspace(self.group, "reduce", like.device)
        tile, space = _reduction(scatter, m, n, world, dtype, operands, like.device)
        if finish is not NOTHING:
            residual = None if finish.residual is None else finish.residual.contiguous()
            finish = Finish(finish.bias, finish.dropout, residual)
        called = op if operands == dtype else f"quantized_{op}"
        channel = workspace.begin(called, *space, sizes, dtype, told(finish.dropout))
        return channel, workspace, tile, finish

    def start_gather(self, x_shard: Tensor) -> Callable[[], Tensor]:
        """Transport.start_gather: copy engines begin at once; shards that they would be slow with, the wait pushes."""
        channel, workspace, sent = self._begin_gather("all_gather", x_shard, None, keep=True)

        def wait() -> Tensor:
            await_gathered(channel, x_shard, push=sent is None)
            workspace.end()
            return self._gathered(channel, workspace, x_shard)

        return wait


def dense_columns(dispatch: Dispatch, weights: Tensor, transposed: bool, group: ProcessGroup) -> int:
    """Columns of a dense GEMM with as much work as the experts', if all ranks have as many rows."""
    return max(1, dispatch.k * weights.shape[2 if transposed else 1] // group.size())


def for_all(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The biases, with zeros for missing ones if there are others: a launch has one for each weight, or none."""
    present = [bias for bias in biases if bias is not None]
    if not present or len(present) == len(biases):
        return biases
    return [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]


@functools.lru_cache(maxsize=1024)
def _reduction(
    scatter: bool, m: int, n: int, world: int, dtype: torch.dtype, operands: torch.dtype, device: torch.device
) -> tuple[Tile, tuple[int, int]]:
    """(tile, what the channel must offer) of a reduction of (m, n) in this dtype, of products of such operands."""
    if scatter:
        tile = select_tile(device, operands, m // world, n, chunks=world)
        return tile, matmul_reduce_scatter_space(m // world, n, world, dtype, tile)
    tile = select_all_reduce_tile(device, operands, m, n, world, is_one_shot(m, n, dtype.itemsize))
    return tile, matmul_all_reduce_space(m, n, world, dtype, dtype, tile)


def _join_to_three(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], transposed: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """(inputs, weights) as the three pairs that kernels take: later ones are joined to the third."""
    last = MAXIMUM_WEIGHTS - 1
    return (
        [*inputs[:last], torch.cat(list(inputs[last:]), 1)],
        [*weights[:last], torch.cat(list(weights[last:]), 1 if transposed else 0)],
    )

"""GEMMs in chunks, one for each rank, while other chunks travel: plain torch, any backend and device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.chunked import all_reduce_chunks, gather_chunks, reduce_scatter_chunks, start_all_gather
from tpformer.kernels.finish import NOTHING, Finish

from ..implementation import implementation
from ..norm import Normed
from .interface import ALL_REDUCE, GATHER, SCATTER, Kept, Transport, finish_rows, record_transport
from .sequential import LOCAL


class Pipelined(Transport):
    """The GEMM after a gather takes this rank's rows first, then each peer's as they arrive. The GEMM before a
    reduction makes this rank's rows last.

    A reduce-scatter adds in rank order in at least float32 and rounds once; an all-reduce adds as the backend does.
    """

    name = "pipelined"
    group: ProcessGroup

    def __init__(self, group: ProcessGroup, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.gathering = self if sequence_parallel else LOCAL

    def _rows(self, shard: Tensor) -> int:
        return len(shard) * self.group.size()

    def gather_matmul(
        self, x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: a GEMM for each weight and each rank's rows."""
        record_transport(GATHER, self.name)
        x_gathered = x_shard.new_empty(self._rows(x_shard), x_shard.shape[1])
        outputs = [x_shard.new_empty(len(x_gathered), len(weight)) for weight in weights]
        for rows in gather_chunks(x_shard, x_gathered, self.group):
            for y, weight, bias in zip(outputs, weights, biases, strict=True):
                if bias is None:
                    torch.mm(x_gathered[rows], weight.t(), out=y[rows])
                else:
                    torch.addmm(bias, x_gathered[rows], weight.t(), out=y[rows])
        return outputs

    def gather_matmul_derivative(
        self, dy_shard: Tensor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Transport.gather_matmul_derivative; the activation's derivative is a pass of its own."""
        record_transport(GATHER, self.name)
        dy_gathered = dy_shard.new_empty(self._rows(dy_shard), dy_shard.shape[1])
        da = dy_shard.new_empty(x.shape)
        for rows in gather_chunks(dy_shard, dy_gathered, self.group):
            torch.mm(dy_gathered[rows], weight, out=da[rows])
        return *implementation("activation", x).activation_backward(da, x, activation, gate), dy_gathered

    def matmul_reduce(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: each chunk is on its way while the next one is multiplied."""
        record_transport(SCATTER if self.sequence_parallel else ALL_REDUCE, self.name)
        factors = [weight.t() if transposed else weight for weight in weights]
        shape = (len(inputs[0]), factors[0].shape[1])

        def fill(rows: slice, out: Tensor) -> None:
            torch.mm(inputs[0][rows], factors[0], out=out)
            for x, factor in zip(inputs[1:], factors[1:], strict=True):
                torch.addmm(out, x[rows], factor, out=out)

        reduce = reduce_scatter_chunks if self.sequence_parallel else all_reduce_chunks
        y = reduce(fill, shape, inputs[0], self.group)
        return finish_rows(y, finish)

    def start_gather(self, x_shard: Tensor) -> Callable[[], Tensor]:
        """Transport.start_gather: an asynchronous all-gather."""
        return start_all_gather(x_shard, self.group)

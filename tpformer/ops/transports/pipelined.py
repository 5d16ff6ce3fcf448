"""GEMMs in chunks, one for each rank, while other chunks travel: plain torch, any backend and device."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.chunked import all_reduce_chunks, gather_chunks, reduce_scatter_chunks, start_all_gather
from tpformer.kernels.finish import NOTHING, Finish

from ..norm import Normed
from .interface import ALL_REDUCE, GATHER, SCATTER, Transport, finish_rows, record_transport
from .products import PLAIN, Factor, Kept, Products, rows_of, tensors_of
from .sequential import local


class Pipelined(Transport):
    """The GEMM after a gather takes this rank's rows first, then each peer's as they arrive. The GEMM before a
    reduction makes this rank's rows last.

    A reduce-scatter adds in rank order in at least float32 and rounds once; an all-reduce adds as the backend does.
    """

    name = "pipelined"
    group: ProcessGroup

    def __init__(self, group: ProcessGroup, sequence_parallel: bool = True, products: Products = PLAIN) -> None:
        super().__init__(group, sequence_parallel, products)
        self.gathering = self if sequence_parallel else local(products)

    def arriving(self, x_shard: Factor) -> tuple[Tensor, Iterator[tuple[slice, Factor]]]:
        """(all ranks' rows as they travel, each rank's place among them and its factor, once it is there)."""
        sent = self.products.sent(x_shard)
        gathered = sent.new_empty(len(sent) * self.group.size(), sent.shape[1])
        chunks = gather_chunks(sent, gathered, self.group)
        return gathered, ((rows, self.products.received(gathered[rows])) for rows in chunks)

    def gather_matmul(
        self, x_shard: Factor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: a GEMM for each weight and each rank's rows."""
        record_transport(GATHER, self.name)
        rights = [self.products.right(weight, True) for weight in weights]
        gathered, chunks = self.arriving(x_shard)
        outputs = [weight.new_empty(len(gathered), len(weight)) for weight in weights]
        for rows, x in chunks:
            for y, right, bias in zip(outputs, rights, biases, strict=True):
                self.products.product(x, right, bias, y[rows])
        return outputs

    def gather_matmul_derivative(
        self, dy_shard: Factor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Factor, Factor]:
        """Transport.gather_matmul_derivative; the activation's derivative is a pass of its own."""
        record_transport(GATHER, self.name)
        right = self.products.right(weight, False)
        gathered, chunks = self.arriving(dy_shard)
        da = weight.new_empty(x.shape)
        for rows, dy in chunks:
            self.products.product(dy, right, out=da[rows])
        return *self.products.derivative(da, x, activation, gate), self.products.received(gathered)

    def matmul_reduce(
        self,
        inputs: Sequence[Factor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: each chunk is on its way while the next one is multiplied."""
        record_transport(SCATTER if self.sequence_parallel else ALL_REDUCE, self.name)
        rights = [self.products.right(weight, transposed) for weight in weights]
        shape = (len(tensors_of(inputs[0])[0]), weights[0].shape[0 if transposed else 1])

        def fill(rows: slice, out: Tensor) -> None:
            added = None
            for x, right in zip(inputs, rights, strict=True):
                added = self.products.product(rows_of(x, rows), right, added, out)

        reduce = reduce_scatter_chunks if self.sequence_parallel else all_reduce_chunks
        y = reduce(fill, shape, weights[0], self.group)
        return finish_rows(y, finish)

    def start_gather(self, x_shard: Factor) -> Callable[[], Factor]:
        """Transport.start_gather: an asynchronous all-gather."""
        wait = start_all_gather(self.products.sent(x_shard), self.group)
        return lambda: self.products.received(wait())

"""The collective and the GEMM, one after the other. Every other transport must give the same results."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.finish import NOTHING, Finish

from ..norm import Normed
from .interface import ALL_REDUCE, GATHER, SCATTER, Transport, finish_rows, record_transport
from .products import PLAIN, Factor, Kept, Products


class Sequential(Transport):
    """Serves any backend, dtype and device. Without a group ("local") it is F.linear and communicates nothing."""

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool = True, products: Products = PLAIN) -> None:
        super().__init__(group, sequence_parallel, products)
        self.name = "local" if group is None else "sequential"
        self.gathering = self if sequence_parallel else local(products)

    def _record(self, op: str) -> None:
        if self.group is not None:
            record_transport(op, self.name)

    def _gathered(self, x_shard: Factor) -> Factor:
        """The factor of all ranks' rows."""
        if self.group is None:
            return self.products.factor(x_shard)
        return self.products.received(all_gather(self.products.sent(x_shard), self.group))

    def gather_matmul(
        self, x_shard: Factor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: all-gather, then a GEMM for each weight."""
        self._record(GATHER)
        x, linear = self._gathered(x_shard), self.products.linear
        return [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def gather_matmul_derivative(
        self, dy_shard: Factor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Factor, Factor]:
        """Transport.gather_matmul_derivative: all-gather, GEMM, then the activation's derivative."""
        self._record(GATHER)
        products, dy_gathered = self.products, self._gathered(dy_shard)
        da = products.product(dy_gathered, products.right(weight, False))
        return *products.derivative(da, x, activation, gate), dy_gathered

    def matmul_reduce(
        self,
        inputs: Sequence[Factor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: GEMMs, the collective, then a pass for what follows."""
        products = self.products
        if self.group is None and transposed and len(inputs) == 1:
            # bias inside the GEMM: bit-identical to nn.Linear
            y = products.linear(inputs[0], weights[0], finish.bias)
            return finish_rows(y, Finish(None, *finish[1:]))
        self._record(SCATTER if self.sequence_parallel else ALL_REDUCE)
        y = products.product(inputs[0], products.right(weights[0], transposed))
        for x, weight in zip(inputs[1:], weights[1:], strict=True):
            products.product(x, products.right(weight, transposed), y, y)
        return finish_rows((reduce_scatter if self.sequence_parallel else all_reduce)(y, self.group), finish)

    def start_gather(self, x_shard: Factor) -> Callable[[], Factor]:
        """Transport.start_gather: gathers when it is waited for, so that one collective is under way at a time."""
        return lambda: self._gathered(x_shard)


def local(products: Products) -> Sequential:
    """The transport of one rank."""
    return LOCAL if products is PLAIN else Sequential(None, products=products)


LOCAL = Sequential(None)
"""The transport of one rank, and of matrices as they are."""

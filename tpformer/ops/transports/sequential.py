"""The collective and the GEMM, one after the other. Every other transport must give the same results."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_gather, all_reduce, reduce_scatter
from tpformer.kernels.finish import NOTHING, Finish

from ..implementation import implementation
from ..norm import Normed
from .interface import ALL_REDUCE, GATHER, SCATTER, Factor, Kept, Transport, finish_rows, record_transport


class Sequential(Transport):
    """Serves any backend, dtype and device. Without a group ("local") it is F.linear and communicates nothing."""

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool = True) -> None:
        super().__init__(group, sequence_parallel)
        self.name = "local" if group is None else "sequential"
        self.gathering = self if sequence_parallel else LOCAL

    def _record(self, op: str) -> None:
        if self.group is not None:
            record_transport(op, self.name)

    def gather_matmul(
        self, x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Transport.gather_matmul: all-gather, then a GEMM for each weight."""
        self._record(GATHER)
        return list(map(self._linear, repeat(self._gathered(x_shard)), weights, biases))

    def gather_matmul_derivative(
        self, dy_shard: Tensor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Factor, Factor]:
        """Transport.gather_matmul_derivative: all-gather, GEMM, then the activation's derivative."""
        self._record(GATHER)
        dy_gathered = self._gathered(dy_shard)
        backward = implementation("activation", x).activation_backward
        dx, dgate, a = backward(self._sum_of_products([dy_gathered], [weight], False), x, activation, gate)
        return dx, dgate, self.factor(a), dy_gathered

    def matmul_reduce(
        self,
        inputs: Sequence[Factor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """Transport.matmul_reduce: GEMMs, the collective, then a pass for what follows."""
        if self.group is None and transposed and len(inputs) == 1:
            # bias inside the GEMM: bit-identical to nn.Linear
            return finish_rows(self._linear(inputs[0], weights[0], finish.bias), Finish(None, *finish[1:]))
        self._record(SCATTER if self.sequence_parallel else ALL_REDUCE)
        y = self._sum_of_products(inputs, weights, transposed)
        return finish_rows((reduce_scatter if self.sequence_parallel else all_reduce)(y, self.group), finish)

    # what a transport of other factors does in another way

    def _gathered(self, x_shard: Tensor) -> Any:
        """The factor of all ranks' rows."""
        return all_gather(x_shard, self.group)

    def _linear(self, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias of a factor."""
        return F.linear(x, weight, bias)

    def _sum_of_products(self, inputs: Sequence[Any], weights: Sequence[Tensor], transposed: bool) -> Tensor:
        """The sum of inputs_i W_i, or W_i^T if transposed, of this rank's factors."""
        first, *rest = (weight.t() if transposed else weight for weight in weights)
        y = inputs[0] @ first
        for x, weight in zip(inputs[1:], rest, strict=True):
            y.addmm_(x, weight)
        return y

    def start_gather(self, x_shard: Tensor) -> Callable[[], Factor]:
        """Transport.start_gather: gathers when it is waited for, so that one collective is under way at a time."""
        return lambda: self._gathered(x_shard)


LOCAL = Sequential(None)  # one rank

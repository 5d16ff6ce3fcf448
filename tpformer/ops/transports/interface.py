"""The interface of transports: four methods that column_linear and row_linear call, and the record of their calls.

Letters: M rows (tokens) in total, t ranks; K and N are those of this rank's GEMM. x_shard has this rank's rows,
x_gathered those of all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config.transport_table import OPERATIONS, TransportTable
from tpformer.distributed.listeners import Listeners
from tpformer.kernels.finish import NOTHING, Finish

from ..implementation import implementation
from ..norm import Normed
from .products import PLAIN, Factor, Kept, Products

GATHER, SCATTER, ALL_REDUCE = OPERATIONS


def finish_rows(y: Tensor, finish: Finish) -> tuple[Tensor, Normed | None]:
    """(rows, norm): bias, dropout, residual and norm applied to reduced rows y in a separate pass. May overwrite y."""
    if finish.norm is not None:
        y, normed, statistics = implementation("norm", y).finish_norm_forward(y, finish)
        return y, Normed(normed, *statistics)
    if not finish.adds:
        return y, None
    return implementation("dropout", y).finish_forward(y, finish), None


class Transport(ABC):
    """Linears over one group, opened once by whoever builds a layer (TensorParallel.column_transport, row_transport).

    Grad mode is off; tensors have any strides, one dtype, and equal shapes on all ranks.
    group: None is one rank. sequence_parallel: between linears each rank has rows of its own (a sequence shard), so
    there are gathers, and reductions scatter; otherwise every rank has all rows, and reductions give all rows to all.
    products: what its GEMMs multiply. `matmul_reduce` takes factors; the gathers take rows and make them.

    Each method that communicates records its operation (`record_transport`), and its collective with the bytes of the
    full tensor (`distributed.collectives.record`).
    """

    name: str
    gathering: Transport
    """The transport of the gathers: this one with sequence parallelism, else LOCAL, because no row is elsewhere."""

    def __init__(self, group: ProcessGroup | None, sequence_parallel: bool, products: Products = PLAIN) -> None:
        self.group, self.sequence_parallel, self.products = group, sequence_parallel, products
        self.sharing = group.size() if group is not None and sequence_parallel else 1
        """The ranks that divide the rows."""
        self.untold = group
        """The group whose ranks a linear has to tell of its call. Fused operations tell them as they begin."""

    @property
    def agreed(self) -> tuple[str, str]:
        """What must be equal on all ranks: how they talk, and what they multiply."""
        return self.name, self.products.name

    @abstractmethod
    def gather_matmul(
        self, x_shard: Factor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        """gather(x_shard) @ W_i^T + b_i for every weight, from one gather.

        Shapes: x_shard (M / t, K); weights (N_i, K); biases (N_i,) or None; results (M, N_i), each in its own memory.
        Communication: one all-gather of M * K * itemsize bytes.
        """

    @abstractmethod
    def gather_matmul_derivative(
        self, dy_shard: Factor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Factor, Factor]:
        """(dx, dgate, a, dy_gathered): the backward of a @ W^T, a = act(x) or act(gate) * x.

        Shapes: dy_shard (M / t, N); weight (N, K); x, gate, dx, dgate and the rebuilt a (M, K); dy_gathered (M, N).
        a and dy_gathered are factors.
        With an activation x and gate may be packed.
        The group's next operation may overwrite dy_gathered, unless `keep`.
        Communication: one all-gather of M * N * itemsize bytes.
        """

    @abstractmethod
    def matmul_reduce(
        self,
        inputs: Sequence[Factor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """(y, its norm or None): the sum over ranks and i of inputs_i @ W_i, or @ W_i^T if transposed, then `finish`.

        Shapes: inputs (M, K_i), which are factors; weights (K_i, N), or (N, K_i) if transposed; y, with sequence
        parallelism, this rank's rows (M / t, N), else (M, N), equal on all ranks. y has memory of its own.
        Communication: one reduce-scatter, or without sequence parallelism one all-reduce, of M * N * itemsize bytes.
        Errors: ValueError with sequence parallelism if t does not divide M.
        """

    @abstractmethod
    def start_gather(self, x_shard: Factor) -> Callable[[], Factor]:
        """Begin to gather x_shard (M / t, K); the function returned waits for x_gathered (M, K), a factor.

        A matmul_reduce of the same group may come between. The group's next gather may overwrite the rows.
        Communication: one all-gather of M * K * itemsize bytes.
        """


@dataclass
class Registry:
    """The only module-level state of tpformer.ops: who listens to transports, routers, regions and blocks; measured
    times; the blocks that are kept of weights.
    """

    recorded: Listeners[tuple[str, str]] = field(default_factory=Listeners)
    routed: Listeners[Any] = field(default_factory=Listeners)
    kept: Listeners[Any] = field(default_factory=Listeners)
    quantized: Listeners[Any] = field(default_factory=Listeners)
    table: TransportTable | None = None
    blocks: dict[int, Any] | None = None
    keeping: int = 0  # contexts that keep blocks


REGISTRY = Registry()


def record_transports() -> AbstractContextManager[list[tuple[str, str]]]:
    """A context that gives a list. (operation, transport) is appended whenever a transport runs in this process.

    Operations: "all_gather_matmul" (a row-parallel backward, too), "matmul_reduce_scatter", "matmul_all_reduce",
    "linear_cross_entropy". One rank runs no transport and records nothing.
    """
    return REGISTRY.recorded.listen()


def record_transport(op: str, transport: str) -> None:
    """Tell whoever records transports that one carries an operation now."""
    REGISTRY.recorded.tell((op, transport))

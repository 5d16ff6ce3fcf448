"""The interface of transports: four methods that column_linear and row_linear call, and the record of their calls.

Letters: M rows (tokens) in total, t ranks; K and N are those of this rank's GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config.transport_table import OPERATIONS, TransportTable
from tpformer.distributed.listeners import Listeners
from tpformer.kernels.finish import NOTHING, Finish
from tpformer.kernels.pack.format import Packed

from ..implementation import implementation
from ..norm import Normed

GATHER, SCATTER, ALL_REDUCE = OPERATIONS


class Grouped(NamedTuple):
    """The grouped GEMM that a layer of experts has in place of a column-parallel linear."""

    chosen: int
    """Experts of a token."""
    groups: int
    """Experts of a rank."""
    n: int
    """Output features of each."""

    def width(self, ranks: int) -> int:
        """Output features of one rank's column-parallel linear with as much work."""
        return -(-self.chosen * self.n // ranks)


class Request(NamedTuple):
    """A linear that needs a transport: its operation (one of OPERATIONS) and one rank's GEMM, (m, k) @ (k, n).

    m counts the rows of all ranks; n and k are this rank's. transport: the user's choice, or "auto". grouped: of
    experts, for which n is the width of a linear with as much work.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    group: ProcessGroup | None
    transport: str = "auto"
    grouped: Grouped | None = None

    @property
    def ranks(self) -> int:
        """The group's ranks; 1 without a group."""
        return 1 if self.group is None else self.group.size()

    @property
    def width(self) -> int:
        """The sharded size of the GEMM: the wider it is, the more communication the GEMM hides."""
        return self.n if self.op == GATHER else self.k


def untold(transport: Transport) -> ProcessGroup | None:
    """The group whose ranks a linear has to tell. Fused operations tell them as they begin: each call is told once."""
    return None if transport.name == "fused" else transport.group


def finish_rows(y: Tensor, finish: Finish) -> tuple[Tensor, Normed | None]:
    """(rows, norm): bias, dropout, residual and norm applied to reduced rows y in a separate pass. May overwrite y."""
    if finish.norm is not None:
        y, normed, statistics = implementation("norm", y).finish_norm_forward(y, finish)
        return y, Normed(normed, *statistics)
    if all(part is None for part in finish):
        return y, None
    return implementation("dropout", y).finish_forward(y, finish), None


Kept: TypeAlias = Tensor | Packed  # what a forward has kept


class Transport(Protocol):
    """Linears over one group. Grad mode is off; tensors have any strides, one dtype, and equal shapes on all ranks.

    Each method that communicates records its operation (`record_transport`), and its collective with the bytes of the
    full tensor (`distributed.collectives.record`).
    """

    name: str
    group: ProcessGroup | None

    def gather_matmul(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """gather(x) @ W_i^T + b_i for every weight, from one gather.

        Shapes: x (M / t, K); weights (N_i, K); biases (N_i,) or None; results (M, N_i), each in memory of its own.
        Communication: one all-gather of M * K * itemsize bytes.
        """

    def gather_matmul_derivative(
        self, dy: Tensor, weight: Tensor, x: Kept, gate: Kept | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(dx, dgate, a, gathered): the backward of a @ W^T, a = act(x) or act(gate) * x, from each rank's rows of dy.

        Shapes: dy (M / t, N); weight (N, K); x, gate, dx, dgate and the rebuilt a (M, K); gathered = gather(dy) (M, N).
        With an activation x and gate may be packed.
        The group's next operation may overwrite gathered, unless `keep`.
        Communication: one all-gather of M * N * itemsize bytes.
        """

    def matmul_reduce(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        transposed: bool,
        scatter: bool,
        finish: Finish = NOTHING,
    ) -> tuple[Tensor, Normed | None]:
        """(y, its norm or None): the sum over ranks and i of inputs_i @ W_i, or @ W_i^T if transposed, then `finish`.

        Shapes: inputs (M, K_i); weights (K_i, N), or (N, K_i) if transposed; y, with scatter, this rank's rows
        (M / t, N), else (M, N), equal on all ranks. y has memory of its own.
        Communication: one reduce-scatter or all-reduce of M * N * itemsize bytes.
        Errors: ValueError if scatter and t does not divide M.
        """

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather x (M / t, K); the function returned waits for the rows (M, K).

        A matmul_reduce of the same group may come between. The group's next gather may overwrite the rows.
        Communication: one all-gather of M * K * itemsize bytes.
        """


@dataclass
class Registry:
    """The only module-level state of tpformer.ops: who listens to transports, routers and regions; measured times."""

    recorded: Listeners[tuple[str, str]] = field(default_factory=Listeners)
    routed: Listeners[Any] = field(default_factory=Listeners)
    kept: Listeners[Any] = field(default_factory=Listeners)
    table: TransportTable | None = None


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

"""What every transport does: the four methods over which column_linear and row_linear are written, and its record.

Letters: M rows (tokens) of the whole, t ranks, K and N as this rank's GEMM has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.config.transport_table import OPERATIONS, TransportTable
from tpformer.distributed.listeners import Listeners
from tpformer.kernels.finish import NOTHING, Finish

from ..implementation import implementation
from ..norm import Normed

GATHER, SCATTER, ALL = OPERATIONS


class Request(NamedTuple):
    """One linear that needs a transport: its operation (one of OPERATIONS) and the GEMM of one rank.

    m counts all rows; n and k are this rank's: (m, k) @ (k, n). transport: the user's choice, or "auto".
    """

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: torch.device
    group: ProcessGroup | None
    transport: str = "auto"

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def width(self) -> int:
        """What the break-even is about: the sharded size of the GEMM."""
        return self.n if self.op == GATHER else self.k


def finish_rows(y: Tensor, finish: Finish) -> tuple[Tensor, Normed | None]:
    """What follows a reduction, in a pass of its own: finished rows (they may take y's memory) and their norm."""
    if finish.norm is not None:
        y, normed, statistics = implementation("norm", y).finish_norm_forward(y, finish)
        return y, Normed(normed, *statistics)
    if all(part is None for part in finish):
        return y, None
    return implementation("dropout", y).finish_forward(y, finish), None


class Transport(Protocol):
    """Linears over one group. Called with grad mode off, tensors of any strides and one dtype, equal shapes on ranks.

    Each method that communicates records its operation (`record_transport`) and its collective with full bytes
    (`distributed.collectives.record`).
    """

    name: str
    group: ProcessGroup | None

    def gather_matmul(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """gather(x) @ W_i^T + b_i for every weight, from one gather.

        x (M / t, K); weights (N_i, K); biases (N_i,) or None; results (M, N_i), each in memory of its own.
        Communication: one all-gather of M * K * itemsize bytes.
        """

    def gather_matmul_derivative(
        self, dy: Tensor, weight: Tensor, x: Tensor, gate: Tensor | None, activation: str | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(dx, dgate, a, gathered): the backward of act(x) [* gate] @ W^T from its scattered output gradient.

        dy (M / t, N); weight (N, K); x, gate, dx, dgate, a (M, K), a being the rebuilt activation; gathered (M, N) is
        gather(dy), which may lie in communication memory that the next operation on the group overwrites, unless
        `keep`. Communication: one all-gather of M * N * itemsize bytes.
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
        """The sum over ranks and pairs of inputs_i @ W_i, or @ W_i^T if transposed; then `finish`, once, with its norm.

        inputs (M, K_i); weights (K_i, N), transposed (N, K_i); result this rank's rows (M / t, N) with scatter, else
        (M, N), equal on all ranks, in memory of its own.
        Communication: one reduce-scatter or all-reduce of M * N * itemsize bytes.
        Errors: ValueError if scatter and t does not divide M.
        """

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to gather x (M / t, K) under the matmul_reduce that comes next; the function returned waits for it.

        The gathered rows (M, K) may be overwritten by the next gather on the group.
        Communication: one all-gather of M * K * itemsize bytes.
        """


@dataclass
class Registry:
    """The only module-level state of tpformer.ops: who listens to the transports, and the table of measured times."""

    recorded: Listeners[tuple[str, str]] = field(default_factory=Listeners)
    table: TransportTable | None = None


REGISTRY = Registry()


def record_transports() -> AbstractContextManager[list[tuple[str, str]]]:
    """A context that gives a list, which gets (operation, transport) whenever one runs in this process.

    Operations: "all_gather_matmul" (a row-parallel backward is one too), "matmul_reduce_scatter", "matmul_all_reduce",
    "linear_cross_entropy". One rank runs no transport and records nothing.
    """
    return REGISTRY.recorded.listen()


def record_transport(op: str, transport: str) -> None:
    """Tell whoever records transports that one carries an operation now."""
    REGISTRY.recorded.tell((op, transport))

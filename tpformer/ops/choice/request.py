"""What a linear asks of a transport: its operation, its sizes, and the ranks that share it.

Belongs here: what is known of a linear before it runs. choose.py answers a request; TensorParallel of the layers makes
them, and `python -m bench all_gather_grouped_matmul`.
"""

from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from ..transports.interface import ALL_REDUCE, GATHER, SCATTER


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
    experts, for which n is the width of a linear with as much work. precision: that of the GEMM, one of PRECISIONS.
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
    precision: str = "16"

    @property
    def ranks(self) -> int:
        """The group's ranks; 1 without a group."""
        return 1 if self.group is None else self.group.size()

    @property
    def width(self) -> int:
        """The sharded size of the GEMM: the wider it is, the more communication the GEMM hides."""
        return self.n if self.op == GATHER else self.k

    @property
    def sequence_parallel(self) -> bool:
        """Whether each rank has rows of its own before a gather and after a reduction."""
        return self.op != ALL_REDUCE


def column_request(
    rows: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
    sequence_parallel: bool,
    transport: str,
    grouped: Grouped | None = None,
) -> Request:
    """The request of a column_linear for x (rows, k). n: this rank's output features, of all weights together.
    grouped: as in Request.

    Without sequence parallelism only the backward communicates: dx = all_reduce(dy W).
    """
    if sequence_parallel:
        ranks = 1 if group is None else group.size()
        return Request(GATHER, rows * ranks, n, k, dtype, device, group, transport, grouped)
    return Request(ALL_REDUCE, rows, k, n, dtype, device, group, transport)


def row_request(
    rows: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None,
    sequence_parallel: bool,
    transport: str,
) -> Request:
    """The request of a row_linear for x (rows, k). k: this rank's input features; n: output features."""
    return Request(SCATTER if sequence_parallel else ALL_REDUCE, rows, n, k, dtype, device, group, transport)

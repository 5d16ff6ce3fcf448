"""What work costs: the type that every `<op>_cost` returns, and a model of GEMMs that overlap with communication.

Letters: M rows of all ranks together, N and K of one rank's GEMM, t ranks, s bytes per element, F FLOP/s of a GPU,
B bytes/s of its links.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """Work of one call."""

    flops: int
    """Floating-point operations."""
    bytes: int
    """Bytes to and from main memory, each operand once."""


# Up to so many bytes an all-reduce sends each partial sum to every rank in one hop. Its time is then mostly latency,
# and the fused kernel has the least. Above, two hops with a share of the bytes each take less time.
ONE_SHOT_BYTES = 256 * 1024


class Machine(NamedTuple):
    """One GPU of an NVLink node."""

    name: str
    peak_flops: float
    """Dense 16-bit FLOP/s by the data sheet."""
    flops: float
    """16-bit FLOP/s that a good GEMM sustains."""
    link: float
    """Bytes/s that a good kernel sends to all peers together."""
    memory: float
    """Bytes/s that a good kernel reads and writes."""


# H200 and H100 have published figures of large GEMMs and copies, which runs on an H100 confirmed (docs/LOG.md). Their
# links are not measured. A100 and B200 are scaled by their data sheets.
MACHINES = (
    Machine("H200", 989e12, 700e12, 380e9, 4.3e12),
    Machine("H100", 989e12, 700e12, 380e9, 3.0e12),
    Machine("A100", 312e12, 250e12, 250e9, 1.7e12),
    Machine("B200", 2250e12, 1600e12, 760e9, 7.0e12),
)


def machine_for(device_name: str) -> Machine | None:
    """The machine whose name occurs in torch's name of a device ("NVIDIA H100 80GB HBM3"); None if none does."""
    return next((machine for machine in MACHINES if machine.name in device_name), None)


def communication_bytes(op: str, m: int, n: int, k: int, ranks: int, itemsize: int) -> int:
    """Bytes that one rank receives.

    all_gather_matmul: (t - 1) / t * M K s; matmul_reduce_scatter: (t - 1) / t * M N s; matmul_all_reduce: twice that.
    """
    width = {"all_gather_matmul": k, "matmul_reduce_scatter": n, "matmul_all_reduce": 2 * n}[op]
    return (ranks - 1) * m * width * itemsize // ranks


def gemm_seconds(m: int, n: int, k: int, itemsize: int, machine: Machine) -> float:
    """Seconds of a GEMM on one GPU: max(2 M N K / F, s (M K + K N + M N) / memory bandwidth)."""
    return max(2 * m * n * k / machine.flops, itemsize * (m * k + k * n + m * n) / machine.memory)


def break_even_width(ranks: int, machine: Machine, itemsize: int, moves: int = 1) -> float:
    """The width per rank from which on the GEMM takes as long as its communication: moves (t - 1) / t s F / (2 B).

    The width is N for a gather and K for a reduction. It does not depend on M, as both times are proportional to M.
    moves: 2 for an all-reduce, which scatters and gathers, else 1.
    """
    return moves * (ranks - 1) / ranks * itemsize * machine.flops / (2 * machine.link)


def overlapped_seconds(compute: float, communication: float, chunks: int, tail: float = 0.0) -> float:
    """Seconds of a GEMM and its communication, chunk by chunk: max(compute, communication + compute / chunks) + tail.

    The GEMM of one chunk overlaps with no communication: of the last chunk that arrives, or of the first that is
    reduced. tail: seconds of what starts after both, such as the sum over the received partial sums.
    """
    return max(compute, communication + compute / chunks) + tail

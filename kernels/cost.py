"""What work costs: the type every `<op>_cost` returns, and the model of GEMMs overlapped with their communication.

Letters: M rows of the whole, N and K as one rank's GEMM has them, t ranks, s bytes an element, F FLOP/s, B bytes/s.
"""

from typing import NamedTuple


class Cost(NamedTuple):
    """Work of one call: floating-point operations, and bytes that must cross main memory (each operand once)."""

    flops: int
    bytes: int


# Bytes of a partial sum up to which an all-reduce sends it to everybody in one hop: it is mostly latency then, of which
# the fused kernel has less than any other transport. Beyond, two hops of a share each take less time
ONE_SHOT_BYTES = 256 * 1024


class Machine(NamedTuple):
    """One GPU of an NVLink node: dense 16-bit FLOP/s by data sheet, and what a good kernel sustains of its parts."""

    name: str
    peak_flops: float
    flops: float
    link: float  # bytes/s to all peers together, one direction
    memory: float  # bytes/s


# H100, H200: figures of large GEMMs and copies from research, the H100's confirmed by one (docs/LOG.md); nobody has
# measured their links. The others are scaled from their data sheets
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
    """Bytes into one rank: (t-1)/t * M*K*s gathering, (t-1)/t * M*N*s reduce-scattering, twice that all-reducing."""
    width = {"all_gather_matmul": k, "matmul_reduce_scatter": n, "matmul_all_reduce": 2 * n}[op]
    return (ranks - 1) * m * width * itemsize // ranks


def gemm_seconds(m: int, n: int, k: int, itemsize: int, machine: Machine) -> float:
    """max(2 M N K / F, s (M K + K N + M N) / memory bandwidth)."""
    return max(2 * m * n * k / machine.flops, itemsize * (m * k + k * n + m * n) / machine.memory)


def break_even_width(ranks: int, machine: Machine, itemsize: int, moves: int = 1) -> float:
    """The width per rank from which communication hides completely under the GEMM: moves * (t-1)/t * s F / (2 B).

    Width: N of a rank for a gather, K of a rank for a reduction. It does not depend on M: both times are linear in it.
    moves: 2 for an all-reduce, which scatters and gathers, else 1.
    """
    return moves * (ranks - 1) / ranks * itemsize * machine.flops / (2 * machine.link)


def overlapped_seconds(compute: float, communication: float, chunks: int, tail: float = 0.0) -> float:
    """GEMM and communication in equal chunks side by side: max(compute, communication + compute / chunks) + tail.

    One chunk's GEMM has nothing to hide under: the last gathered one, or the first to be reduced. chunks: t, rank by
    rank. tail: what starts after both, such as the reduction's pass over memory. Ideal: chunks infinite, tail 0.
    """
    return max(compute, communication + compute / chunks) + tail

"""What work costs: the type that every `<op>_cost` returns, and the parts of a model of GEMMs that overlap with
communication, with all its constants. tpformer/ops/choice/prediction.py puts them together.

Letters: M rows of all ranks together, N and K of one rank's GEMM, t ranks, s bytes per element, F FLOP/s of a GPU,
B bytes/s of its links.
"""

from typing import NamedTuple

from .quantize.format import BLOCK, NUMBER_BYTES


class Cost(NamedTuple):
    """Work of one call."""

    flops: int
    """Floating-point operations."""
    bytes: int
    """Bytes to and from main memory, each operand once."""


# Up to so many bytes an all-reduce sends each partial sum to every rank in one hop. Its time is then mostly latency,
# and the fused kernel has the least. Above, two hops with a share of the bytes each take less time.
ONE_SHOT_BYTES = 256 * 1024
# Up to so many rows it does as well: a tile has at least as many, and for two hops each rank's share of the rows would
# take tiles of its own, which are as long under way.
ONE_SHOT_ROWS = 64


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
    load_latency: float = 1e-6
    """Seconds from a program's first load of a piece that it pushes until it has stored the piece. An estimate: others
    measure 0.6 to 0.8 us for a load that misses L2, and the stores come after it."""
    copy_start: float = 6.4e-6
    """Seconds that a copy to a peer takes beside its bytes / link. Fitted to copies of 4 and 16 MB that others measured
    on B300 (335 and 560 GB/s), it gives 672 GB/s at 64 MB, where they measured 695."""
    reduces_in_switch: bool = True
    """Whether NCCL's all-reduces let the switch add, as it can from H100 on."""
    fp8_flops: float | None = None
    """FLOP/s that a good GEMM of blocks of e4m3 sustains, of rows by 1 x 128 and a weight by 128 x 128. None: there is
    no such GEMM, or nobody has published its rate."""

    @property
    def of_blocks(self) -> "Machine | None":
        """The same GPU where its GEMMs multiply blocks of e4m3; None where their rate is not known."""
        if self.fp8_flops is None:
            return None
        return self._replace(flops=self.fp8_flops, peak_flops=PEAK_OF_BLOCKS * self.peak_flops)


# The peak of blocks of e4m3 in our kernels, beside that of 16 bits. Data sheets have 2, but a block's sum is added in
# float32, under no other product. With this one tile_seconds gives rates that the research behind docs/fp8.md predicts
# for an H100, where nobody has measured them: 770 TFLOP/s at K = 2048, 864 at 4096 and 920 at 8192.
PEAK_OF_BLOCKS = 1.365
# Seconds of one acquire of a flag in the GPU's own memory when nobody is late: measured on an H200
# (docs/log/2026-11-27.md).
POLL_SECONDS = 0.21e-6
# Seconds of one release or fence at system scope, which waits until the program's earlier stores have arrived at a
# peer: the lower end of the 2 to 4 us that published one-hop kernels on 8 H100 take beyond their bytes. Nobody has
# measured it here; in an H200's own memory it takes 0.9 us, and 0.4 us beyond the stores of 32 KiB
# (docs/log/2026-11-27.md).
RELEASE_SECONDS = 2e-6

# H200 and H100 have published figures of large GEMMs and copies, which runs on an H100 confirmed
# (docs/log/2026-11-22.md). Their links are not measured. A100 and B200 are scaled by their data sheets. Blocks of e4m3:
# others measured 1009 and 1002 TFLOP/s of cuBLASLt on an H100, for 16640 x 5120 x 8192 and 16640 x 8192 x 5120
# (pytorch/ao#2784). On a B200 a Triton kernel multiplies them, which nobody has measured.
MACHINES = (
    Machine("H200", 989e12, 700e12, 380e9, 4.3e12, fp8_flops=1000e12),
    Machine("H100", 989e12, 700e12, 380e9, 3.0e12, fp8_flops=1000e12),
    Machine("A100", 312e12, 250e12, 250e9, 1.7e12, reduces_in_switch=False),
    Machine("B200", 2250e12, 1600e12, 760e9, 7.0e12),
)


class TileSpeed(NamedTuple):
    """How fast a program multiplies one tile after the other."""

    begin: float
    """Seconds of a tile that do not depend on K: the first loads, and the epilogue."""
    shares: tuple[float, ...]
    """The share of an SM's peak that 1, 2, ... programs on it reach together."""


# By rows and columns of a tile. Fitted to `bench matmul` on one H100 (bench/results): over 80 products of two matrices
# with each tile, in all its waves, times are off by 4, 5 and 11 % in the mean. What is not listed is a guess.
TILE_SPEEDS = {
    (128, 256): TileSpeed(4.0e-6, (0.875,)),
    (128, 128): TileSpeed(2.5e-6, (0.73,)),
    (64, 128): TileSpeed(1.0e-6, (0.36, 0.56)),
}
OTHER_TILES = TileSpeed(1.0e-6, (0.3, 0.5))

# What NCCL takes on 8 H100: by operation, latency and bytes/s as a share of Machine.link, each once for the protocol of
# small messages and once for that of large ones. Fitted to others' measurements, by which they are off by at most 16 %:
# gathers of 2 to 128 MiB 20, 43, 119 and 385 us, scatters 19, 47 and 113 us (NVIDIA/Megatron-LM#5596), a scatter of
# 128 MiB 377 us (NVIDIA/nccl#1047); all-reduces of 0.5 to 128 MiB 24, 25, 37, 50, 76, 121, 195, 316 and 561 us
# (vllm-project/vllm#42324), to which the switch contributes.
MOVED = ((13e-6, 0.59), (25e-6, 0.874))
COLLECTIVES = {
    "all_gather_matmul": MOVED,
    "matmul_reduce_scatter": MOVED,
    "matmul_all_reduce": ((22e-6, 0.69), (42e-6, 1.126)),
}

# Seconds until the host has launched an operation, by transport. Measured beside an H200 (docs/log/2026-11-27.md): the
# kernel that begins it and a fused one of ours 24 to 28 us, torch.matmul 12.5. A collective takes about 30 (an
# estimate). In a CUDA graph it is 0.
HOST_SECONDS = {"fused": 28e-6, "sequential": 43e-6}


def is_one_shot(m: int, n: int, itemsize: int) -> bool:
    """Whether an all-reduce of (m, n) partial sums has one hop."""
    return m <= ONE_SHOT_ROWS or m * n * itemsize <= ONE_SHOT_BYTES


def machine_for(device_name: str) -> Machine | None:
    """The machine whose name occurs in torch's name of a device ("NVIDIA H100 80GB HBM3"); None if none does."""
    return next((machine for machine in MACHINES if machine.name in device_name), None)


def as_sent(op: str, sizes: tuple[int, int, int], itemsize: int, blocks: bool) -> tuple[tuple[int, int, int], int]:
    """(sizes, itemsize) of what an operation's collective sends. sizes: M of all ranks, N and K of this rank's GEMM.

    blocks: whether the GEMM multiplies blocks of e4m3. Then a gather sends a byte for each number and one for the
    exponent of each 128, so rows are as long as so many bytes. Reductions send sums.
    """
    m, n, k = sizes
    return ((m, n, k + k // BLOCK), 1) if blocks and op == "all_gather_matmul" else (sizes, itemsize)


def communication_bytes(op: str, m: int, n: int, k: int, ranks: int, itemsize: int) -> int:
    """Bytes that one rank receives.

    all_gather_matmul: (t - 1) / t * M K s; matmul_reduce_scatter: (t - 1) / t * M N s; matmul_all_reduce: twice that.
    """
    width = {"all_gather_matmul": k, "matmul_reduce_scatter": n, "matmul_all_reduce": 2 * n}[op]
    return (ranks - 1) * m * width * itemsize // ranks


def gemm_seconds(m: int, n: int, k: int, itemsize: int, machine: Machine, operand: float | None = None) -> float:
    """Seconds of a GEMM on one GPU: max(2 M N K / F, s (M K + K N + M N) / memory bandwidth).

    operand: bytes of a number of its operands, if they are not s.
    """
    read = itemsize if operand is None else operand
    return max(2 * m * n * k / machine.flops, (read * (m * k + k * n) + itemsize * m * n) / machine.memory)


def tile_seconds(tile: tuple[int, int], k: int, programs: int, machine: Machine, processors: int) -> float:
    """Seconds in which a program computes a tile of (rows, columns), beside the others of `programs` on its SM."""
    begin, shares = TILE_SPEEDS.get(tile, OTHER_TILES)
    share = shares[min(programs, len(shares)) - 1] * machine.peak_flops / processors
    return begin + 2 * tile[0] * tile[1] * k * programs / share


def collective_seconds(op: str, m: int, n: int, k: int, ranks: int, itemsize: int, machine: Machine) -> float:
    """Seconds of an operation's collective by a library, in the protocol that is the faster one for its bytes.

    An all-reduce that no switch adds up moves its bytes as fast as a gather.
    """
    moved = communication_bytes(op, m, n, k, ranks, itemsize)
    protocols = COLLECTIVES[op] if machine.reduces_in_switch else MOVED
    return min(latency + moved / (share * machine.link) for latency, share in protocols)


def break_even_width(ranks: int, machine: Machine, itemsize: float, moves: int = 1) -> float:
    """The width per rank from which on the GEMM takes as long as its communication: moves (t - 1) / t s F / (2 B).

    The width is N for a gather and K for a reduction. It does not depend on M, as both times are proportional to M.
    moves: 2 for an all-reduce, which scatters and gathers, else 1.
    """
    return moves * (ranks - 1) / ranks * itemsize * machine.flops / (2 * machine.link)


def break_evens_in_blocks(ranks: int, machine: Machine, itemsize: int) -> tuple[float, float] | None:
    """break_even_width of GEMMs that multiply blocks of e4m3: beside a gather, which sends blocks, and beside a
    reduce-scatter of sums of itemsize bytes, each of which takes a faster GEMM to hide. None without a rate."""
    if (of_blocks := machine.of_blocks) is None:
        return None
    gather, scatter = (break_even_width(ranks, of_blocks, size) for size in (NUMBER_BYTES, itemsize))
    return gather, scatter


def overlapped_seconds(compute: float, communication: float, chunks: int) -> float:
    """Seconds of a GEMM and its gather, chunk by chunk: max(compute, communication + compute / chunks).

    The GEMM of the chunk that arrives last overlaps with no communication.
    """
    return max(compute, communication + compute / chunks)


def staged_seconds(first: float, second: float, begin: float, end: float) -> float:
    """Seconds of two kinds of work on the same pieces, where the second begins with a piece when the first has ended
    with it. begin, end: the shares of the first and of the last pieces, by which both do not overlap."""
    return max(first + end * second, begin * first + second)

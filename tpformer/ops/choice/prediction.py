"""How long a tensor-parallel linear takes by each transport, predicted: what "auto" compares and explain() prints.

Belongs here: the model, which "auto", `python -m bench protocol` and the predictions of the benches share. Its
constants stand in kernels/cost.py; what a launch does is counted by traffic.py. Nobody has run the fused kernels on
several GPUs; tests/ops/test_prediction.py compares the model with what others have measured of theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tpformer.config.transport_table import WAYS
from tpformer.kernels.cost import (
    HOST_SECONDS,
    POLL_SECONDS,
    RELEASE_SECONDS,
    Machine,
    as_sent,
    collective_seconds,
    gemm_seconds,
    staged_seconds,
    tile_seconds,
)
from tpformer.kernels.quantize.format import NUMBER_BYTES, VALUES

from ..transports.interface import GATHER, REGISTRY
from .request import Grouped
from .traffic import Launch, Sums, Traffic, planned_launch, share, tile_count


class Times(NamedTuple):
    """Seconds of one operation on one rank, and of its parts."""

    gemm: float
    links: float
    """Seconds that the links are busy."""
    device: float
    """Seconds on the device, overlap included."""
    host: float
    """Seconds until the host has launched it."""

    @property
    def seconds(self) -> float:
        """The device waits for the host if that takes longer."""
        return max(self.device, self.host)

    def __str__(self) -> str:
        parts = f"GEMM {1e6 * self.gemm:.0f}, links {1e6 * self.links:.0f}"
        if self.host > self.device:
            parts += f", host {1e6 * self.host:.0f}"
        return f"{1e6 * self.seconds:.0f} us ({parts})"


def sequential_times(
    op: str, sizes: tuple[int, int, int], t: int, itemsize: int, machine: Machine, gemm: float | None = None
) -> Times:
    """A library's GEMM and its collective, one after the other. sizes: M of all ranks, N and K of this rank's GEMM.

    gemm: measured seconds of the GEMM, where there are any.
    """
    gemm = gemm or gemm_seconds(*sizes, itemsize, machine)
    links = collective_seconds(op, *sizes, t, itemsize, machine)
    return Times(gemm, links, gemm + links, HOST_SECONDS["sequential"])


def fused_times(
    op: str,
    sizes: tuple[int, int, int],
    t: int,
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine,
    spare: int = 0,
    gemm: float | None = None,
) -> Times:
    """The fused kernel that a CUDA device would launch, and which leaves `spare` SMs free. Otherwise as above.

    Chunks of a gather arrive while others are multiplied (multiplied_seconds). Tiles of a reduction travel while others
    are multiplied, but the first are computed and the last travel alone. While those travel, a reduce-scatter adds what
    came before, and the rest behind them. Nothing hides the flags.
    """
    launch = chosen_launch(op, sizes, t, dtype, device, spare)
    found = launch.traffic
    gemm = gemm or kernel_gemm_seconds(launch, sizes, dtype.itemsize, device, machine, spare)
    if op == GATHER:
        arrivals = gather_arrivals(launch, t, machine)
        total = multiplied_seconds(launch, arrivals, sizes, gemm)
        return Times(gemm, arrivals[-1], total, HOST_SECONDS["fused"])
    links = found.sent / machine.link
    if found.sums is not None:
        total = all_reduce_seconds(found, found.sums, gemm, links, machine)
        return Times(gemm, links, total, HOST_SECONDS["fused"])
    adding = min(launch.programs, found.units) * found.in_flight  # bytes
    early, late = (
        memory_seconds(nbytes, found.in_flight, adding, machine) for nbytes in (found.meanwhile, found.behind)
    )
    arrived = staged_seconds(gemm, links, 1 / found.tiles, found.last)
    total = max(arrived, arrived - found.last * links + early) + late + found.seconds
    return Times(gemm, links, total, HOST_SECONDS["fused"])


def times_of_blocks(
    op: str, sizes: tuple[int, int, int], t: int, device: torch.device, machine: Machine, spare: int = 0,
    gemms: tuple[float | None, float | None] = (None, None),
) -> dict[str, Times]:  # fmt: skip
    """By transport, an operation whose GEMM multiplies blocks of e4m3 into 16 bits, at `machine`'s rate of blocks.
    sizes: as above. gemms: seconds of the GEMM by transport, of experts."""
    fused, alone = gemms
    sent, itemsize = as_sent(op, sizes, 2, True)
    return {
        "fused": fused_times(op, sizes, t, VALUES, device, machine, spare, fused),
        "sequential": sequential_times(
            op, sent, t, itemsize, machine, alone or gemm_seconds(*sizes, 2, machine, NUMBER_BYTES)
        ),
    }


def all_reduce_seconds(found: Traffic, sums: Sums, gemm: float, links: float, machine: Machine) -> float:
    """Seconds of a fused all-reduce, by the programs that take longest.

    A program computes tiles, or a tile less and adds early units between them. Behind that the last tiles travel, then
    late units are added and sent piece by piece, while other sums are copied, and those of late units are copied
    behind. All links' work takes no less than it would alone behind the first tile, with one flag's turn between the
    hops.
    """
    hops, in_flight = 2 if sums.copiers else 1, found.in_flight

    def memory(nbytes: int, own: int, together: int) -> float:
        return memory_seconds(nbytes, own, together, machine)

    flags = POLL_SECONDS + (RELEASE_SECONDS if hops == 2 else 0.0)  # of a unit
    early = memory(sums.adding, in_flight, sums.adders * in_flight) + flags
    tile = gemm / found.tiles + RELEASE_SECONDS
    computed = max(tile * found.tiles, tile * (found.tiles - sums.idle) + sums.early * early)
    together = sums.late_adders * in_flight + sums.copiers * sums.copy_in_flight
    late = sums.late * memory(sums.adding, in_flight, together)
    if hops == 1:
        return staged_seconds(computed, links, 1 / found.tiles, found.last) + late + sums.late * flags
    piece = 1 / (sums.late * sums.pieces)
    behind = found.last * links / 2 + staged_seconds(late, sums.late_share * links / 2, piece, piece)
    arrived = max(computed + behind, computed / found.tiles + links + piece * late) + sums.late * flags
    copy, last_copy = (
        memory(sums.copying, sums.copy_in_flight, busy) + POLL_SECONDS
        for busy in (together, sums.programs * sums.copy_in_flight)
    )
    return max(arrived, computed + sums.copied * copy) + sums.behind * last_copy


def grouped_seconds(
    grouped: Grouped,
    m: int,
    k: int,
    t: int,
    sources: int,
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine,
    spare: int = 0,
) -> float:
    """The grouped GEMM of one of t ranks for m tokens of all ranks, if all experts get equally many.

    sources: from so many ranks rows come apart. Each has row blocks of its own, of which the last one of a group is
    half empty in the mean, and every matrix is read for each. So it takes the waves of its tiles, or the memory's time.
    dtype: of the operands; of blocks of e4m3, at `machine`'s rate of blocks, results have 16 bits.
    """
    from tpformer.kernels.all_gather_grouped_matmul.reference import (
        all_gather_grouped_matmul_cost,
        all_gather_quantized_grouped_matmul_cost,
    )
    from tpformer.kernels.configurations import select_grouped_tile
    from tpformer.kernels.launch import persistent_programs

    rows, groups = share(m * grouped.chosen, t), grouped.groups * sources
    tile = select_grouped_tile(device, dtype, rows, groups, grouped.n)
    tiles = share(2 * rows + groups * tile.m, 2 * tile.m) * share(grouped.n, tile.n)
    itemsize, processors = dtype.itemsize, processors_of(device)
    programs = persistent_programs(device, tiles, tile, spare=spare, itemsize=itemsize)
    waves = share(tiles, programs) * tile_seconds(tile[:2], k, share(programs, processors), machine, processors)
    cost_of = all_gather_quantized_grouped_matmul_cost if itemsize == 1 else all_gather_grouped_matmul_cost
    cost = cost_of(rows, grouped.n, k, grouped.groups, m, sources, max(itemsize, 2))
    return max(waves, cost.flops / machine.flops, cost.bytes / machine.memory)


def kernel_gemm_seconds(
    launch: Launch, sizes: tuple[int, int, int], itemsize: int, device: torch.device, machine: Machine, spare: int
) -> float:
    """The waves of the launch's tiles, but at least what a good GEMM takes on the SMs that it has.

    An SM is not taken to be faster where others are idle: a cautious assumption for a GPU that is limited by power.
    """
    from tpformer.kernels.launch import resident_programs

    m, n, k = sizes
    processors = processors_of(device)
    resident = resident_programs(device, launch.tile, itemsize=itemsize)
    programs = min(-(-launch.programs // processors), resident // processors)
    waves = launch.traffic.tiles * tile_seconds(launch.tile[:2], k, programs, machine, processors)
    usable = machine._replace(flops=machine.flops * (processors - spare) / processors)
    return max(waves, gemm_seconds(m, n, k, max(itemsize, 2), usable, itemsize))  # of blocks, results have 16 bits


@functools.lru_cache(maxsize=1024)  # "auto" asks before each operation, and each gather
def chosen_launch(
    op: str, sizes: tuple[int, int, int], t: int, dtype: torch.dtype, device: torch.device, spare: int = 0
) -> Launch:
    """What a CUDA device launches for an operation. The shards of a gather are sent by copy engines, or pushed by the
    kernel's own programs: as the table of `use_measured_table` says, if both are measured for a shape near this one,
    else as is predicted to take less time.
    """
    from tpformer.kernels.all_gather_matmul.plan import machine_of

    def launch(copies: bool) -> Launch:
        return planned_launch(op, sizes, t, dtype, device, spare, copies)

    if op != GATHER or t == 1:
        return launch(False)
    row = REGISTRY.table and REGISTRY.table.nearest(GATHER, t, str(dtype).removeprefix("torch."), *sizes)
    if row is not None and len(row.ways) == len(WAYS):
        return launch(row.ways["copy"] < row.ways["push"])
    machine = machine_of(device, dtype.itemsize)

    def seconds(launch: Launch) -> float:
        gemm = kernel_gemm_seconds(launch, sizes, dtype.itemsize, device, machine, spare)
        return multiplied_seconds(launch, gather_arrivals(launch, t, machine), sizes, gemm)

    return min(launch(False), launch(True), key=seconds)


def send_by_copies(sizes: tuple[int, int | None, int], t: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether copy engines send the shards of a gather, rather than the kernel's own programs.

    sizes: M of all ranks together, N and K of this rank's GEMM; N None for a gather that runs under another kernel.
    On a CPU, where nobody asks for speed, the answer is no.
    """
    m, n, k = sizes
    if device.type != "cuda" or t == 1 or 0 in sizes:
        return False
    if n is not None:
        return not chosen_launch(GATHER, (m, n, k), t, dtype, device).push.pushers
    from tpformer.kernels.all_gather_matmul.plan import copies_hide_more, machine_of, sent_bytes

    return copies_hide_more(sent_bytes(m // t, k, dtype.itemsize), t, machine_of(device))


def processors_of(device: torch.device) -> int:
    """The SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def gather_arrivals(launch: Launch, t: int, machine: Machine) -> list[float]:
    """Seconds until the chunks of a rank are there, the own one first, by pushers or by copy engines."""
    from tpformer.kernels.all_gather_matmul.plan import copy_seconds, push_arrivals

    if t == 1:
        return [0.0]
    nbytes, pushers = launch.traffic.sent // (t - 1), launch.push.pushers
    if pushers:
        return push_arrivals(nbytes, t, pushers, machine)
    return [copy_seconds(nbytes, step + 1, machine) for step in range(t)]


def multiplied_seconds(launch: Launch, arrivals: Sequence[float], sizes: tuple[int, int, int], gemm: float) -> float:
    """Seconds until the last program of a gather is done, if the GEMM alone takes `gemm` with the launch's tiles.

    By the kernel's walk: a program waits for a chunk, then multiplies its tiles of it. So those of the last chunk are
    late where their programs are still busy with the chunk before. Pushers begin when they have pushed.
    """
    from tpformer.kernels.all_gather_matmul.kernel import walk

    programs, (pushers, joins) = launch.programs, launch.push
    tiles, seconds = tile_count(sizes[0] // len(arrivals), sizes[1], launch.tile), gemm / launch.traffic.tiles
    ends = [arrivals[-1] if program < pushers else 0.0 for program in range(programs)]
    for step, arrival in enumerate(arrivals):
        for program in range(pushers if step < joins else 0, programs):
            first, distance = walk.fn(program, programs, pushers, joins, step, tiles)
            begin = max(ends[program], arrival) + (POLL_SECONDS if step else 0)
            ends[program] = begin + len(range(first, tiles, distance)) * seconds
    return max(ends)


def memory_seconds(nbytes: int, in_flight: int, together: int, machine: Machine) -> float:
    """Seconds in which a program loads and stores `nbytes`, by Little's law: the bytes that it has in flight come once
    in a latency, or in the time that the memory needs for the bytes of all programs in flight."""
    return nbytes / in_flight * max(machine.load_latency, together / machine.memory) if nbytes else 0.0

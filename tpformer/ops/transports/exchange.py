"""What the flags of a fused GEMM cost: how often a program waits and publishes, and how long that takes.

Belongs here: closed forms of the kernels' loops, which `python -m bench protocol` compares with what compiled code
does, the times of their parts, and the choice who sends a gather's shards. "auto" (ops/transport.py) chooses with
them. No tensors; triton where it is asked for the tile that ships.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpformer.config.transport_table import WAYS
from tpformer.kernels.cost import POLL_SECONDS, RELEASE_SECONDS, gemm_seconds, is_one_shot

from .interface import ALL_REDUCE, GATHER, REGISTRY, SCATTER

if TYPE_CHECKING:
    from tpformer.kernels.all_gather_matmul.plan import Push
    from tpformer.kernels.launch import Tile


class Exchange(NamedTuple):
    """What the program with the most to do does one after another, and what its rank sends."""

    tiles: int
    """Tiles that it multiplies."""
    waits: int
    """How often it waits for flags, for those of all ranks at the same time where it adds."""
    releases: int
    """How often it waits until its stores have arrived: flags that it releases, and fences. The relaxed flags that it
    sets behind a fence take no time, because nobody waits for them to arrive."""
    sent: int
    """Bytes that all programs of the rank store into other ranks' memory. If ranks differ, the first's: the most."""
    units: int = 0
    """Pieces of work in which the rank's programs add what the ranks sent."""
    between: int = 0
    """Bytes that a program loads and stores to add sums between its tiles."""
    meanwhile: int = 0
    """While its last tile travels: to add sums, or to copy sums that others have added."""
    behind: int = 0
    """And behind that: the rest of it."""
    in_flight: int = 0
    """Bytes that a program has asked for before it uses any of them, while it adds or pushes."""

    @property
    def seconds(self) -> float:
        """The time that its flags take if nobody is late; no other work of that program hides it."""
        return self.waits * POLL_SECONDS + self.releases * RELEASE_SECONDS


def share(work: int, programs: int) -> int:
    """How many pieces of work the first of some programs has."""
    return -(-work // programs)


def tile_count(rows: int, n: int, tile: Tile) -> int:
    """The tiles of a matrix."""
    return share(rows, tile.m) * share(n, tile.n)


def gather_exchange(
    rows: int, n: int, nbytes: int, t: int, tile: Tile, programs: int, pushers: int, joins: int
) -> Exchange:
    """all_gather_matmul for shards of `rows` rows and `nbytes` bytes, of a program that only multiplies.

    programs: with the pushers, who take tiles from chunk number `joins` on; 0 pushers with a copy engine.
    """
    from tpformer.kernels.all_gather_matmul.plan import IN_FLIGHT

    tiles, computing = tile_count(rows, n, tile), programs - pushers
    own, rest = divmod(joins * tiles, computing) if joins else (0, 0)
    # programs without one of the rest's tiles, pushers among them, come first in the rounds from chunk `joins` on
    most = own + share(rest + (t - joins) * tiles, programs)
    return Exchange(most, t - 1, 0, (t - 1) * nbytes, in_flight=IN_FLIGHT if pushers else 0)


def scatter_exchange(rows: int, n: int, itemsize: int, t: int, tile: Tile, programs: int) -> Exchange:
    """matmul_reduce_scatter with `rows` rows of the result for each rank.

    The program that completes a row block sets its flag. Which one that is, the run decides: releases are the mean.
    """
    from tpformer.kernels.matmul_reduce_scatter.kernel import plan_finishing, unit_rows

    tiles, blocks, step = tile_count(rows, n, tile), share(rows, tile.m), unit_rows(tile, itemsize, t)
    plan = plan_finishing(rows, n, tile, step, t, programs)
    early, late = plan.early_blocks * plan.early_runs, (blocks - plan.early_blocks) * plan.late_runs
    loaded, units = t * step * tile.n * itemsize, share(min(rows, tile.m), step) * share(n, tile.n)
    added = [
        share(count, programs) * share(units, runs) * (loaded + loaded // t)
        for count, runs in ((early, plan.early_runs), (late, plan.late_runs))
    ]
    return Exchange(
        share(t * tiles, programs),
        share(early + late, programs),
        share(t * blocks, programs),
        (t - 1) * tiles * tile.m * tile.n * itemsize,
        share(rows, step) * share(n, tile.n),
        0,
        added[0],
        added[1],
        loaded,
    )


def all_reduce_exchange(
    m: int, n: int, itemsize: int, t: int, tile: Tile, band: int, programs: int, one_shot: bool
) -> Exchange:
    """matmul_all_reduce of (m, n), partial sums and result of one dtype. band: rows of a tile that it adds at once."""
    from tpformer.kernels.matmul_reduce_scatter.kernel import unit_rows

    rows = m if one_shot else share(m, t)
    tiles, row_bytes = tile_count(rows, n, tile), share(n, tile.n) * tile.n * itemsize
    units = tiles * share(min(rows, tile.m), band)
    added, unit = share(units, programs), min(rows, band) * tile.n * itemsize
    between, in_flight = added * (t + 1) * unit, t * min(band, unit_rows(tile, itemsize, t)) * tile.n * itemsize
    if one_shot:
        own = share(tiles, programs)
        return Exchange(own, added, own, (t - 1) * m * row_bytes, units, between, in_flight=in_flight)
    own, copied = share(t * tiles, programs), share((t - 1) * units, programs)
    last = share(copied, own)  # copies of what is added in the last turn
    # partial sums of the others' rows to their owners, then the own rows' sums to all others
    sent = (m - rows + (t - 1) * rows) * row_bytes
    early, late = (2 * count * unit for count in (copied - last, last))
    return Exchange(own, added + copied, own + added, sent, units, between, early, late, in_flight)


def tiled_exchange(
    op: str, sizes: tuple[int, int, int], t: int, itemsize: int, tile: Tile, programs: int, push: Push,
    band: int | None = None,
) -> Exchange:  # fmt: skip
    """The closed form of an operation; sizes: M of all ranks, N and K of this rank's GEMM. push: of a gather. band: of
    an all-reduce; None: what is best for these programs."""
    from tpformer.kernels.launch import packed_width
    from tpformer.kernels.matmul_all_reduce.kernel import band_rows

    m, n, k = sizes
    if op == ALL_REDUCE:
        one_shot = is_one_shot(m, n, itemsize)
        band = band or band_rows(m if one_shot else share(m, t), n, t, tile, itemsize, programs)
        return all_reduce_exchange(m, n, itemsize, t, tile, band, programs, one_shot)
    if op == SCATTER:
        return scatter_exchange(m // t, n, itemsize, t, tile, programs)
    return gather_exchange(m // t, n, m // t * packed_width(k, itemsize) * itemsize, t, tile, programs, *push)


class Launch(NamedTuple):
    """What a CUDA device would launch for an operation with one weight."""

    tile: Tile
    programs: int
    push: Push
    """Of a gather: who sends the shards."""
    exchange: Exchange


@functools.lru_cache(maxsize=1024)  # "auto" asks before each operation
def planned_launch(
    op: str, sizes: tuple[int, int, int], t: int, dtype: torch.dtype, device: torch.device, spare: int = 0
) -> Launch:
    """The tile and programs with which a CUDA device would run an operation, and the closed form for them."""
    from tpformer.kernels.all_gather_matmul.plan import NO_PUSH, Work, machine_of, plan_launch, select_gather_tile
    from tpformer.kernels.configurations import select_tile
    from tpformer.kernels.launch import packed_width, persistent_programs
    from tpformer.kernels.matmul_all_reduce.kernel import band_rows, select_all_reduce_tile

    m, n, k = sizes
    if op == ALL_REDUCE:
        tile = select_all_reduce_tile(device, dtype, m, n, t)
    elif op == GATHER:
        tile = select_gather_tile(device, dtype, m // t, [n], k, t)
    else:
        tile = select_tile(device, dtype, m // t, n, chunks=t)
    one_shot = op == ALL_REDUCE and is_one_shot(m, n, dtype.itemsize)
    chunks, band = 1 if one_shot else t, None
    tiles = chunks * tile_count(share(m, chunks), n, tile)
    if op == GATHER:
        seconds = gemm_seconds(m, n, k, dtype.itemsize, machine_of(device))
        work = Work(m // t * packed_width(k, dtype.itemsize) * dtype.itemsize, t, tiles, seconds)
        by_copies = send_by_copies(sizes, t, dtype, device)
        programs, push = plan_launch(work, device, tile, not by_copies, None, 1, spare)
    else:
        programs, push = persistent_programs(device, tiles, tile, spare=spare), NO_PUSH
    if op == ALL_REDUCE:
        every = persistent_programs(device, tiles, tile)
        band = band_rows(share(m, chunks), n, t, tile, dtype.itemsize, every)
    found = tiled_exchange(op, sizes, t, dtype.itemsize, tile, programs, push, band)
    return Launch(tile, programs, push, found)


def send_by_copies(sizes: tuple[int, int | None, int], t: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether copy engines should send the shards of a gather, rather than the kernel's own programs.

    sizes: M of all ranks together, N and K of this rank's GEMM; N None for a gather that runs under another kernel.
    The table that `use_measured_table` gave decides where it has measured both for a shape near this one, else the
    model (kernels/all_gather_matmul/plan.py). On a CPU, where nobody asks for speed, the answer is no.
    """
    if device.type != "cuda":
        return False
    from tpformer.kernels.all_gather_matmul.plan import copies_are_faster, machine_of
    from tpformer.kernels.launch import packed_width

    m, n, k = sizes
    if n is not None and REGISTRY.table is not None:
        row = REGISTRY.table.nearest(GATHER, t, str(dtype).removeprefix("torch."), m, n, k)
        if row is not None and len(row.ways) == len(WAYS):
            return row.ways["copy"] < row.ways["push"]
    machine, processors = machine_of(device), torch.cuda.get_device_properties(device).multi_processor_count
    seconds = None if n is None else gemm_seconds(m, n, k, dtype.itemsize, machine)
    nbytes = m // t * packed_width(k, dtype.itemsize) * dtype.itemsize
    return copies_are_faster(nbytes, t, seconds, processors, machine)

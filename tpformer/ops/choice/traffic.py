"""What the flags of a fused GEMM cost: how often a program waits and publishes, and how long that takes.

Belongs here: closed forms of the kernels' loops, which `python -m bench protocol` compares with what compiled code
does. prediction.py makes times of them. No tensors; triton where it is asked for the tile that ships.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tpformer.kernels.cost import MACHINES, POLL_SECONDS, RELEASE_SECONDS, Machine, gemm_seconds, is_one_shot

from ..transports.interface import ALL_REDUCE, GATHER, SCATTER

if TYPE_CHECKING:
    from tpformer.kernels.all_gather_matmul.plan import Push
    from tpformer.kernels.launch import Tile


class Sums(NamedTuple):
    """Who adds an all-reduce's units, who copies sums that have arrived, and when. Late units need the last tiles."""

    idle: int
    """Tiles that a program that adds has less than others."""
    adders: int
    """Programs that add the early units, and perhaps late ones."""
    early: int
    """Units that such a program adds before the last tiles arrive."""
    late_adders: int
    """Programs that add late units."""
    late: int
    """Units that such a program adds behind the last tiles."""
    late_share: float
    """The share of late units among all units, and so of the second hop's bytes."""
    copiers: int
    """Programs that copy the sums of early units; all copy those of late ones. One-shot: 0."""
    copied: int
    """Units that such a program copies while the last tiles and sums travel."""
    programs: int
    """All programs; each copies sums of late units."""
    behind: int
    """Late units whose sums such a program copies after that."""
    pieces: int
    """Pieces in which a unit is added."""
    adding: int
    """Bytes that a program loads and stores to add a unit."""
    copying: int
    """Bytes that a program loads and stores to copy a unit."""
    copy_in_flight: int
    """Bytes that a program has asked for before it uses any of them, while it copies."""


class Traffic(NamedTuple):
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
    last: float = 1.0
    """The share of a reduction's tiles that programs compute as their last ones."""
    meanwhile: int = 0
    """Bytes that a program of a reduce-scatter loads and stores to add sums while the last tiles travel."""
    behind: int = 0
    """Bytes that it loads and stores to add the other sums, behind the last tiles."""
    in_flight: int = 0
    """Bytes that a program has asked for before it uses any of them, while it adds or pushes."""
    sums: Sums | None = None
    """Who adds and copies, in an all-reduce; else None."""

    @property
    def seconds(self) -> float:
        """The time that its flags take if nobody is late; no other work of that program hides it."""
        return self.waits * POLL_SECONDS + self.releases * RELEASE_SECONDS


def share(work: int, programs: int) -> int:
    """How many pieces of work the first of some programs has."""
    return -(-work // programs)


def last_share(tiles: int, programs: int) -> float:
    """The share of some tiles that programs compute in their last turn."""
    return ((tiles - 1) % programs + 1) / tiles


def most_of(pieces: int, first: int, programs: int) -> int:
    """How many of the pieces `first`, `first` + programs, ... there are."""
    return max(0, share(pieces - first, programs))


def tile_count(rows: int, n: int, tile: Tile) -> int:
    """The tiles of a matrix."""
    return share(rows, tile.m) * share(n, tile.n)


def gather_traffic(
    rows: int, n: int, nbytes: int, t: int, tile: Tile, programs: int, pushers: int, joins: int
) -> Traffic:
    """all_gather_matmul for shards of `rows` rows and `nbytes` bytes, of a program that only multiplies.

    programs: with the pushers, who take tiles from chunk number `joins` on; 0 pushers with a copy engine.
    """
    from tpformer.kernels.all_gather_matmul.plan import IN_FLIGHT

    tiles, computing = tile_count(rows, n, tile), programs - pushers
    own, rest = divmod(joins * tiles, computing) if joins else (0, 0)
    # programs without one of the rest's tiles, pushers among them, come first in the rounds from chunk `joins` on
    most = own + share(rest + (t - joins) * tiles, programs)
    return Traffic(most, t - 1, 0, (t - 1) * nbytes, in_flight=IN_FLIGHT if pushers else 0)


def scatter_traffic(rows: int, n: int, itemsize: int, t: int, tile: Tile, programs: int) -> Traffic:
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
    return Traffic(
        share(t * tiles, programs),
        share(early + late, programs),
        share(t * blocks, programs),
        (t - 1) * tiles * tile.m * tile.n * itemsize,
        share(rows, step) * share(n, tile.n),
        last_share(t * tiles, programs),
        added[0],
        added[1],
        loaded,
    )


def all_reduce_traffic(
    sizes: tuple[int, int, int], itemsize: int, t: int, tile: Tile, band: int, programs: int, one_shot: bool,
    machine: Machine,
) -> Traffic:  # fmt: skip
    """matmul_all_reduce, partial sums and result of one dtype. sizes: M, N, K. band: rows of a tile that it adds at
    once."""
    from tpformer.kernels.matmul_all_reduce.kernel import added_rows, plan_sums
    from tpformer.kernels.matmul_reduce_scatter.kernel import unit_rows

    m, n, k = sizes
    chunks, rows = (1, m) if one_shot else (t, share(m, t))
    tiles, row_bytes, present = tile_count(rows, n, tile), share(n, tile.n) * tile.n * itemsize, min(rows, tile.m)
    units, own = tiles * share(present, band), share(chunks * tiles, programs)
    found = plan_sums((rows, n, k), chunks, t, tile, itemsize, band, programs, machine)
    peers = 0 if one_shot else t - 1
    early_copies, late_copies = peers * (units - found.late), peers * found.late
    waits, releases = 0, 0
    for program in range(programs):
        adder = program - (programs - found.adders)
        added = most_of(units, (adder + units) % found.adders, found.adders) if adder >= 0 else 0
        copied = most_of(early_copies, program, found.copiers) if program < found.copiers else 0
        # where that ends, the copiers go on; the others take turns behind them
        behind = program + copied * found.copiers - early_copies if program < found.copiers else program
        waits = max(waits, added + copied + most_of(late_copies, behind, programs))
        multiplied = most_of(chunks * tiles, program, programs)
        releases = max(releases, multiplied + (0 if one_shot else added))
    late_adders, unit = min(found.late, found.adders), min(present, band) * tile.n * itemsize
    step = min(band, added_rows(tile, itemsize, t))
    copied_step = min(band, unit_rows(tile, itemsize, 1))
    sums = Sums(
        idle=own - chunks * tiles // programs if found.adders < programs else 0,
        adders=min(found.adders, share(programs * share(present, band), chunks)),
        early=share(units - found.late, found.adders),
        late_adders=late_adders,
        late=share(found.late, late_adders),
        late_share=found.late / units,
        copiers=0 if one_shot else found.copiers,
        copied=share(early_copies, found.copiers),
        programs=programs,
        behind=share(late_copies, programs),
        pieces=share(min(present, band), step),
        adding=(t + 1) * unit,
        copying=2 * unit,
        copy_in_flight=copied_step * tile.n * itemsize,
    )
    # partial sums of the others' rows to their owners, then the own rows' sums to all others
    sent = ((t - 1) * m if one_shot else m - rows + (t - 1) * rows) * row_bytes
    return Traffic(
        own, waits, releases, sent, units, last_share(chunks * tiles, programs),
        in_flight=t * step * tile.n * itemsize, sums=sums,
    )  # fmt: skip


def tiled_traffic(
    op: str, sizes: tuple[int, int, int], t: int, itemsize: int, tile: Tile, programs: int, push: Push,
    band: int | None = None, machine: Machine = MACHINES[0],
) -> Traffic:  # fmt: skip
    """The closed form of an operation; sizes: M of all ranks, N and K of this rank's GEMM. itemsize: of what travels,
    of blocks 1. push: of a gather. band: of an all-reduce; None: what is best for these programs."""
    from tpformer.kernels.all_gather_matmul.plan import sent_bytes
    from tpformer.kernels.matmul_all_reduce.kernel import band_rows

    m, n, k = sizes
    if op == ALL_REDUCE:
        one_shot = is_one_shot(m, n, itemsize)
        band = band or band_rows(m if one_shot else share(m, t), n, t, tile, itemsize, programs)
        return all_reduce_traffic(sizes, itemsize, t, tile, band, programs, one_shot, machine)
    if op == SCATTER:
        return scatter_traffic(m // t, n, itemsize, t, tile, programs)
    return gather_traffic(m // t, n, sent_bytes(m // t, k, itemsize), t, tile, programs, *push)


class Launch(NamedTuple):
    """What a CUDA device would launch for an operation with one weight."""

    tile: Tile
    programs: int
    push: Push
    """Who sends the shards of a gather."""
    traffic: Traffic


def planned_launch(
    op: str, sizes: tuple[int, int, int], t: int, dtype: torch.dtype, device: torch.device, spare: int, copies: bool
) -> Launch:
    """The tile and programs with which a CUDA device would run an operation, and the closed form for them.

    spare: SMs that stay free. copies: copy engines send the shards of a gather.
    """
    from tpformer.kernels.all_gather_matmul.plan import (
        NO_PUSH,
        Work,
        machine_of,
        plan_launch,
        select_gather_tile,
        sent_bytes,
    )
    from tpformer.kernels.configurations import select_tile
    from tpformer.kernels.launch import persistent_programs
    from tpformer.kernels.matmul_all_reduce.kernel import band_rows, select_all_reduce_tile

    (m, n, k), itemsize = sizes, dtype.itemsize
    sums = max(itemsize, 2)  # of blocks, results have 16 bits
    one_shot = op == ALL_REDUCE and is_one_shot(m, n, sums)
    if op == ALL_REDUCE:
        tile = select_all_reduce_tile(device, dtype, m, n, t, one_shot)
    elif op == GATHER:
        tile = select_gather_tile(device, dtype, m // t, [n], k, t)
    else:
        tile = select_tile(device, dtype, m // t, n, chunks=t)
    chunks, band = 1 if one_shot else t, None
    tiles = chunks * tile_count(share(m, chunks), n, tile)
    if op == GATHER:
        seconds = gemm_seconds(m, n, k, sums, machine_of(device, itemsize), itemsize)
        work = Work(sent_bytes(m // t, k, itemsize), t, tiles, seconds, itemsize)
        programs, push = plan_launch(work, device, tile, not copies, None, 1, spare)
    else:
        programs, push = persistent_programs(device, tiles, tile, spare=spare, itemsize=itemsize), NO_PUSH
    if op == ALL_REDUCE:
        every = persistent_programs(device, tiles, tile, itemsize=itemsize)
        band = band_rows(share(m, chunks), n, t, tile, sums, every)
    machine = machine_of(device, itemsize)
    found = tiled_traffic(op, sizes, t, itemsize if op == GATHER else sums, tile, programs, push, band, machine)
    return Launch(tile, programs, push, found)

"""What the flags of a fused GEMM cost: how often a program waits and publishes, and how long that takes.

Belongs here: closed forms of the kernels' loops, which `python -m bench protocol` compares with what compiled code
does, and the times of their parts. "auto" (ops/transport.py) chooses with them. No tensors; triton where it is asked
for the tile that ships.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpformer.kernels.cost import ONE_SHOT_BYTES

from .interface import ALL_REDUCE, GATHER, SCATTER

if TYPE_CHECKING:
    from tpformer.kernels.launch import Tile

# Copy engines send shards of at least this size. They leave all SMs to the GEMM, but need large pieces: others report
# half of a link's bandwidth at about 4 MB. That is a prediction for NVLink, which this project has not measured.
COPY_ENGINE_BYTES = 4 << 20

# Seconds of one acquire of a flag in the GPU's own memory when nobody is late: 1.5 to 2 million polls a second
# (an estimate from the compiled loop: a load that passes the L1 cache, a comparison, a branch).
POLL_SECONDS = 0.6e-6
# Seconds of one release at system scope, which waits until the program's earlier stores have arrived at a peer: the
# lower end of the 2 to 4 us that published one-hop kernels on 8 H100 take beyond their bytes. Neither is measured here.
RELEASE_SECONDS = 2e-6


class Exchange(NamedTuple):
    """What the program with the most to do does one after another, and what its rank sends."""

    tiles: int
    """Tiles that it multiplies."""
    waits: int
    """Flags that it acquires."""
    releases: int
    """Flags that it sets."""
    sent: int
    """Bytes that all programs of the rank store into other ranks' memory."""

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


def gather_exchange(rows: int, n: int, nbytes: int, t: int, tile: Tile, programs: int, signals: int) -> Exchange:
    """all_gather_matmul for shards of `rows` rows and `nbytes` bytes, of a program that computes.

    signals: flags of a shard, one for each program that pushes, or 1 with a copy engine.
    """
    return Exchange(share(t * tile_count(rows, n, tile), programs), (t - 1) * signals, 0, (t - 1) * nbytes)


def scatter_exchange(rows: int, n: int, itemsize: int, t: int, tile: Tile, step: int, programs: int) -> Exchange:
    """matmul_reduce_scatter with `rows` rows of the result for each rank. step: rows that are added at a time.

    The program that completes a row block sets its flag. Which one that is, the run decides: releases are the mean.
    """
    tiles, blocks = tile_count(rows, n, tile), share(rows, tile.m)
    return Exchange(
        share(t * tiles, programs),
        t * share(share(rows, step), programs),
        share(t * blocks, programs),
        (t - 1) * tiles * tile.m * tile.n * itemsize,
    )


def all_reduce_exchange(
    m: int, n: int, itemsize: int, t: int, tile: Tile, step: int, programs: int, one_shot: bool
) -> Exchange:
    """matmul_all_reduce of (m, n), partial sums and result of one dtype. step: rows that are added at a time."""
    rows = m if one_shot else share(m, t)
    tiles = tile_count(rows, n, tile)
    added = share(tiles * tile.m // step, programs)  # units that the program adds
    waits, packed = t * added, (t - 1) * tiles * tile.m * tile.n * itemsize
    if one_shot:
        own = share(tiles, programs)
        return Exchange(own, waits, t * own, packed)
    own = share(t * tiles, programs)
    copied = share((t - 1) * tiles * tile.m // step, programs)
    return Exchange(own, waits + copied, own + (t - 1) * added, 2 * packed)


def is_one_shot(op: str, m: int, n: int, itemsize: int) -> bool:
    """Whether an operation is an all-reduce so small that it has one hop."""
    return op == ALL_REDUCE and m * n * itemsize <= ONE_SHOT_BYTES


def tiled_exchange(
    op: str, sizes: tuple[int, int, int], t: int, itemsize: int, tile: Tile, programs: int, signals: int
) -> Exchange:
    """The closed form of an operation; sizes: M of all ranks together, N and K of this rank's GEMM."""
    from tpformer.kernels.launch import packed_width, step_rows

    (m, n, k), step = sizes, step_rows(tile, itemsize)
    if op == ALL_REDUCE:
        return all_reduce_exchange(m, n, itemsize, t, tile, step, programs, is_one_shot(op, m, n, itemsize))
    if op == SCATTER:
        return scatter_exchange(m // t, n, itemsize, t, tile, step, programs)
    return gather_exchange(m // t, n, m // t * packed_width(k, itemsize) * itemsize, t, tile, programs, signals)


@functools.lru_cache(maxsize=1024)  # "auto" asks before each operation
def shipped_exchange(
    op: str, sizes: tuple[int, int, int], t: int, dtype: torch.dtype, device: torch.device, spare: int = 0
) -> tuple[Tile, Exchange]:
    """The tile that a CUDA device would have for an operation (one weight), and the closed form with its programs."""
    from tpformer.kernels.all_gather_matmul.kernel import PUSHERS
    from tpformer.kernels.configurations import select_tile
    from tpformer.kernels.launch import persistent_programs

    (m, n, k), reduced = sizes, op == ALL_REDUCE
    tile = select_tile(device, dtype, m if reduced else m // t, n, chunks=1 if reduced else t)
    chunks = 1 if is_one_shot(op, m, n, dtype.itemsize) else t
    pushed = op == GATHER and m // t * k * dtype.itemsize < COPY_ENGINE_BYTES
    pushers = PUSHERS if pushed else 0
    programs = persistent_programs(
        device, chunks * tile_count(share(m, chunks), n, tile), tile, reserved=pushers, spare=spare
    )
    return tile, tiled_exchange(op, sizes, t, dtype.itemsize, tile, programs, pushers or 1)

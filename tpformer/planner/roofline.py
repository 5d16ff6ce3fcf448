"""Seconds of one kernel on one GPU: GEMMs by tiles and waves, attention, and kernels that only move memory.

Belongs here: models of single library kernels. kernels/cost.py has the machine's rates; layer_time.py says which
kernels a layer runs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .devices import Device


class LibraryTile(NamedTuple):
    """A tile of a library's GEMM, and the share of the best tile's rate that it reaches."""

    rows: int
    columns: int
    share: float


# cuBLAS's common shapes. The shares of the smaller ones are guesses from what they load for each product.
TILES = (LibraryTile(256, 128, 1.0), LibraryTile(128, 256, 1.0), LibraryTile(128, 128, 0.93), LibraryTile(128, 64, 0.8))
BEGIN = 1e-6  # seconds until a tile's first loads have arrived: as TileSpeed.begin of kernels/cost.py without stores
GAP = 1.5e-6  # seconds between two kernels of a stream: 1 to 2 us, as profilers show


@functools.lru_cache(maxsize=65536)
def gemm_seconds(
    m: int,
    n: int,
    k: int,
    device: Device,
    *,
    batch: int = 1,
    added: float = 0.0,
    speed: float = 1.0,
    operand: float | None = None,
) -> float:
    """Seconds of `batch` products (m, k) x (k, n) by a library, in the tile that is best.

    Waves of tiles fill the GPU; a wave that is not full takes as long as a full one. A tile computes, loads its first
    operands and stores its result. A processor without CUDA has no tiles: FLOPs over their rate. The operands take at
    least their bytes / memory bandwidth.
    added: bytes of an element of the result beside its own, such as those of a float32 sum that it is added to.
    speed: FLOP/s over those of the device's dtype. operand: bytes of a number of its operands, if they are not those of
    this dtype.
    """
    machine, processors, size = device.machine, device.processors, device.itemsize
    best = float("inf")
    if device.capability is None:
        best = 2 * m * n * k * batch / (machine.flops * speed)
    for tile in TILES if device.capability else ():
        tiles = -(-m // tile.rows) * -(-n // tile.columns) * batch
        waves = -(-tiles // processors)
        compute = 2 * tile.rows * tile.columns * k * processors / (machine.flops * speed * tile.share)
        stores = tile.rows * tile.columns * (size + added) * processors / machine.memory
        best = min(best, waves * (BEGIN + compute + stores))
    read = size if operand is None else operand
    moved = batch * (read * (m * k + k * n) + (size + added) * m * n)
    return max(best, moved / machine.memory) + GAP


def attention_seconds(tokens: int, keys: int, features: int, device: Device, backward: bool) -> float:
    """Seconds of a causal flash attention: 2 products forward, 5 backward, of the half that is not masked.

    keys: tokens that each of `tokens` would see without the mask. features: of a token's queries on this rank.
    """
    flops, rate = (5, device.attention_backward) if backward else (2, device.attention_forward)
    return flops * tokens * keys * features / rate + GAP


def stream_seconds(nbytes: float, device: Device) -> float:
    """Seconds of kernels that read and write so many bytes, and compute little."""
    return nbytes / device.machine.memory


def activation_seconds(nbytes: float, device: Device) -> float:
    """stream_seconds of activations that are `nbytes` large in 16 bits, in the device's dtype."""
    return stream_seconds(nbytes * device.itemsize / 2, device)

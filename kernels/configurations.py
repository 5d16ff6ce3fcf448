"""The shipped tile configurations, all of them, and the rule that picks one.

Belongs here: the table (at most 24 rows) and `select_tile`. Each row is compiled for its architectures by the compile
check, for every kernel and dtype; a configuration that is not here does not run.
"""

import torch
import triton

from .launch import Tile, is_interpreted

# Speed statements here are predictions until a GPU has timed them: docs/LOG.md.
TILES = {
    # sm_90 and sm_100, 16-bit: TMA for both operands; one tile's shared memory is (m + n) * k * 2 * stages bytes
    "large": Tile(128, 256, 64, 3, 8, True),  # 144 KiB, 1 program per SM
    "medium": Tile(128, 128, 64, 4, 8, True),  # 128 KiB; also for epilogues with several outputs
    "small": Tile(64, 128, 64, 4, 4, True),  # 96 KiB, 2 per SM: few rows
    # sm_80, 16-bit: pointer loads through cp.async
    "ampere": Tile(128, 128, 32, 4, 8, False),
    "ampere_small": Tile(64, 64, 64, 3, 4, False),
    # float32: exact products on the CUDA cores, any architecture
    "exact": Tile(64, 32, 16, 2, 8, False),
    # the interpreter: about 10 ms a program whatever the tile, so one program for most test shapes
    "interpreted": Tile(32, 32, 32, 1, 1, False),
}

MANY_OPERANDS_ELEMENTS = 128 * 128  # of a tile: an epilogue of several operands fills the registers beyond it


def tile_names(capability: int, itemsize: int) -> tuple[str, ...]:
    """Names of the configurations that run on an architecture (80, 90, 100) for operands of that size."""
    if itemsize == 4:
        return ("exact",)
    datacenter = 90 <= capability < 120  # sm_120 has TMA but not the shared memory that these tiles take
    return ("large", "medium", "small") if datacenter else ("ampere", "ampere_small")


def select_tile(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, *, chunks: int = 1, operands: int = 1
) -> Tile:
    """The configuration for `chunks` outputs of rows x columns; operands: what the epilogue reads or writes per tile.

    The largest that fills every SM and does not pad more than it computes; else the smallest.
    """
    if is_interpreted():
        return TILES["interpreted"]
    major, minor = torch.cuda.get_device_capability(device)
    *larger, smallest = tile_names(10 * major + minor, dtype.itemsize)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    for name in larger:
        tile = TILES[name]
        if (operands > 1 and tile.m * tile.n > MANY_OPERANDS_ELEMENTS) or 2 * rows <= tile.m:
            continue
        if chunks * triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n) >= processors:
            return tile
    return TILES[smallest]

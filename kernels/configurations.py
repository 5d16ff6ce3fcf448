"""The shipped tile configurations, all of them, and the rule that picks one.

Belongs here: the table (at most 24 rows) and `select_tile`. Each row is compiled for its architectures by the compile
check, for every kernel and dtype; a configuration that is not here does not run.
"""

import torch
import triton

from .launch import Tile, is_interpreted

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

# The time of a wave of tiles, in a unit of its own, with 1, 2, ... programs on every SM. Those of sm_90 are fitted to
# `bench matmul` on an H100 (bench/results): the tiles that they pick reach 0.871 of cuBLAS in its rows, the fastest
# tile of every shape 0.872. Other GPUs' are predictions. For float32 there is one tile.
WAVES = {
    "large": (33,),
    "medium": (20,),
    "small": (18, 23),
    "ampere": (20,),
    "ampere_small": (9,),
    "exact": (1,),
}
FEW_ROWS = 128  # up to as many a GEMM reads its weights once and waits for them: the most loads in flight win
MANY_OPERANDS_ELEMENTS = 128 * 128  # of a tile: an epilogue of several operands fills the registers beyond it


def tile_names(capability: int, itemsize: int) -> tuple[str, ...]:
    """Names of the configurations that run on an architecture (80, 90, 100) for operands of that size."""
    if itemsize == 4:
        return ("exact",)
    datacenter = 90 <= capability < 120  # sm_120 has TMA but not the shared memory that these tiles take
    return ("large", "medium", "small") if datacenter else ("ampere", "ampere_small")


def select_tile(
    device: torch.device, dtype: torch.dtype, rows: int, *columns: int, chunks: int = 1, operands: int = 1
) -> Tile:
    """The configuration for `chunks` times outputs of rows x columns, one for each weight of a launch; operands: what
    the epilogue reads or writes per tile.

    The one whose waves take the least time together; for few rows the smallest.
    """
    if is_interpreted():
        return TILES["interpreted"]
    major, minor = torch.cuda.get_device_capability(device)
    names = tile_names(10 * major + minor, dtype.itemsize)
    if chunks * rows <= FEW_ROWS:
        return TILES[names[-1]]
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def time(name: str) -> float:
        tiles = chunks * triton.cdiv(rows, TILES[name].m) * sum(triton.cdiv(n, TILES[name].n) for n in columns)
        whole, rest = divmod(tiles, processors * len(WAVES[name]))
        return whole * WAVES[name][-1] + (WAVES[name][triton.cdiv(rest, processors) - 1] if rest else 0)

    few = [name for name in names if operands == 1 or TILES[name].m * TILES[name].n <= MANY_OPERANDS_ELEMENTS]
    return TILES[min(few, key=time)]

"""All tile configurations that ship, and the rule that picks one.

Belongs here: the table (at most 24 rows) and `select_tile`. The compile check compiles every GEMM with each row, for
the row's architectures and dtypes.
"""

from collections.abc import Callable

import torch
import triton

from .launch import Tile, is_interpreted

TILES = {
    # sm_90 and sm_100, 16-bit: TMA loads both operands; a program's shared memory is (m + n) * k * 2 * stages bytes
    "large": Tile(128, 256, 64, 3, 8, True),  # 144 KiB, 1 program per SM
    "medium": Tile(128, 128, 64, 4, 8, True),  # 128 KiB; also for epilogues with several outputs
    "small": Tile(64, 128, 64, 4, 4, True),  # 96 KiB, 2 programs per SM: for few rows
    # the same, for few rows without a gather or a scatter: see select_narrow_tile
    "narrow": Tile(64, 64, 64, 6, 4, True),  # 96 KiB, 2 programs per SM
    "narrowest": Tile(64, 32, 64, 8, 4, True),  # 96 KiB, 2 programs per SM; on sm_100 the epilogue takes 8 KiB more
    # sm_90 and sm_100, 8-bit blocks: a step of K is a block of 128, and bytes are m + n times k times stages
    "quantized": Tile(128, 128, 128, 4, 8, True),  # 128 KiB; two sums in float32, which larger tiles would spill
    "quantized_small": Tile(64, 128, 128, 4, 4, True),  # 96 KiB, 2 programs per SM: for few rows
    # sm_80, 16-bit: pointer loads through cp.async
    "ampere": Tile(128, 128, 32, 4, 8, False),
    "ampere_small": Tile(64, 64, 64, 3, 4, False),
    "ampere_narrow": Tile(64, 32, 64, 6, 4, False),  # as "narrowest"
    # float32: exact products on the CUDA cores, any architecture
    "exact": Tile(64, 32, 16, 2, 8, False),
    # the interpreter: a program takes about 10 ms with any tile, so this tile is as large as most shapes of the tests
    "interpreted": Tile(32, 32, 32, 1, 1, False),
}

# How long a wave of tiles takes with 1, 2, ... programs on every SM; only ratios count. The numbers of sm_90 are fitted
# to `bench matmul` on an H100 (bench/results): over its rows, the tiles that they pick reach 0.871 of cuBLAS, and the
# fastest tile of each shape would reach 0.872. The others are predictions. float32 has one tile.
WAVES = {
    "large": (33,),
    "medium": (20,),
    "small": (18, 23),
    "ampere": (20,),
    "ampere_small": (9,),
    "exact": (1,),
    "quantized": (20,),
    "quantized_small": (18, 23),
}
FEW_ROWS = 128  # a GEMM of so few rows waits for its weights, so the tile with the most loads in flight is the fastest
BUSY = 0.9  # the share of the SMs that a narrow tile must give a program to
MANY_OPERANDS_ELEMENTS = 128 * 128  # an epilogue with several operands spills in tiles of more elements


def tile_names(capability: int, itemsize: int, operands: int = 1) -> tuple[str, ...]:
    """Names of the tiles that an architecture (80, 90, 100) has for inputs of that size; the last is the smallest.

    operands: matrices of the output's size that the epilogue reads or writes.
    """
    if itemsize == 4:
        return ("exact",)
    if itemsize == 1:
        return ("quantized", "quantized_small")
    datacenter = 90 <= capability < 120  # sm_120 has TMA, but too little shared memory for these tiles
    names = ("large", "medium", "small") if datacenter else ("ampere", "ampere_small")
    return names if operands == 1 else tuple(n for n in names if TILES[n].m * TILES[n].n <= MANY_OPERANDS_ELEMENTS)


def select_tile(
    device: torch.device, dtype: torch.dtype, rows: int, *columns: int, chunks: int = 1, operands: int = 1
) -> Tile:
    """The configuration whose tiles take the least time by WAVES; up to FEW_ROWS rows the smallest one.

    rows, columns: of an output, with one number of columns for each weight of the launch. chunks: how many times these
    outputs are computed. operands: as in tile_names.
    """

    def tiles(tile: Tile) -> int:
        return chunks * triton.cdiv(rows, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns)

    return _fastest(device, dtype, tiles, few=chunks * rows <= FEW_ROWS, operands=operands)


def select_grouped_tile(device: torch.device, dtype: torch.dtype, rows: int, groups: int, columns: int) -> Tile:
    """As select_tile, for rows in groups of any sizes: the last row block of each group is half empty in the mean."""

    def tiles(tile: Tile) -> int:
        return triton.cdiv(2 * rows + groups * tile.m, 2 * tile.m) * triton.cdiv(columns, tile.n)

    return _fastest(device, dtype, tiles, few=rows <= FEW_ROWS)


def _fastest(
    device: torch.device, dtype: torch.dtype, tiles: Callable[[Tile], int], few: bool, operands: int = 1
) -> Tile:
    """The configuration whose tiles, so many of each, take the least time by WAVES; the smallest if rows are few."""
    if is_interpreted():
        return TILES["interpreted"]
    major, minor = torch.cuda.get_device_capability(device)
    names = tile_names(10 * major + minor, dtype.itemsize, operands)
    if few:
        return TILES[names[-1]]
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def time(name: str) -> float:
        whole, rest = divmod(tiles(TILES[name]), processors * len(WAVES[name]))
        return whole * WAVES[name][-1] + (WAVES[name][triton.cdiv(rest, processors) - 1] if rest else 0)

    return TILES[min(names, key=time)]


def narrow_tile_names(capability: int, itemsize: int) -> tuple[str, ...]:
    """Names of the tiles for few rows, from the widest to the narrowest."""
    names = tile_names(capability, itemsize)
    return {"small": ("small", "narrow", "narrowest"), "ampere_small": ("ampere_small", "ampere_narrow")}.get(
        names[-1], names
    )


def select_local_tile(device: torch.device, dtype: torch.dtype, rows: int, *columns: int) -> Tile:
    """The configuration of a GEMM that does not communicate: select_narrow_tile's up to FEW_ROWS rows, else
    select_tile's."""
    select = select_narrow_tile if rows <= FEW_ROWS else select_tile
    return select(device, dtype, rows, *columns)


def select_narrow_tile(device: torch.device, dtype: torch.dtype, rows: int, *columns: int) -> Tile:
    """The widest tile of narrow_tile_names with which BUSY of the SMs have a program, or the narrowest.

    A GEMM of few rows takes as long as its weights take to arrive. Every SM must ask for some of them, and have about
    32 KiB under way (by the memory's latency times its bandwidth, a prediction): of the weights a program has
    n * k * 2 * (stages - 1) bytes, which are 28 or more KiB on sm_90. To split K instead would take a sum more.
    """
    if is_interpreted():
        return TILES["interpreted"]
    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = [TILES[name] for name in narrow_tile_names(10 * major + minor, dtype.itemsize)]

    def programs(tile: Tile) -> int:
        return triton.cdiv(rows, tile.m) * sum(triton.cdiv(n, tile.n) for n in columns)

    busy = (tile for tile in tiles if programs(tile) >= BUSY * processors)
    return next(busy, tiles[-1])

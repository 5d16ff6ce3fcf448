"""Which block of a tensor each rank of its mesh holds, by the placements alone.

Belongs here: ranges of indices. Nothing that reads a value or communicates. For the own rank alone torch has it
(torch_private.own_slices).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Block = tuple[range, ...]
"""The indices that a rank holds along each dim of a tensor: one range, maybe empty, for each."""


def held_block(shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Any], at: Sequence[int]) -> Block:
    """The block of a tensor of this shape that the rank at mesh coordinate `at` holds.

    sizes: of the mesh's axes; placements: one for each. An axis cuts what the axes before it left into chunks of equal
    size, the last ones smaller or empty. FSDP2 cuts last, although its axes come first: it says so by strided shards.
    ValueError for a placement by which ranks hold no block.
    """
    order = sorted(range(len(sizes)), key=lambda axis: type(placements[axis]).__name__ == "_StridedShard")
    block, cuts = [range(size) for size in shape], [1] * len(shape)
    for axis in order:
        place = placements[axis]
        if place.is_replicate():
            continue
        strided = type(place).__name__ == "_StridedShard"
        if not (place.is_shard() or strided):
            raise ValueError(f"a tensor of {tuple(shape)} is {place} over ranks: give one that is cut or whole on each")
        dim = place.dim % len(shape)
        if strided and place.split_factor != cuts[dim]:
            raise ValueError(
                f"a tensor of {tuple(shape)} is {place} over ranks, by which they hold rows that are no block: cut it "
                f"by tensor parallelism and FSDP2 alone"
            )
        block[dim] = _chunk(block[dim], sizes[axis], at[axis])
        cuts[dim] *= sizes[axis]
    return tuple(block)


def _chunk(indices: range, ranks: int, rank: int) -> range:
    each = -(-len(indices) // ranks)
    return indices[rank * each : (rank + 1) * each]

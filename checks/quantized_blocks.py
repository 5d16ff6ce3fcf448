"""Every block that a run in FP8 quantises, recorded by step, and compared between layouts.

Belongs here: the digests of blocks, the hash of a whole run, and the share of blocks in which two steps differ.

A step is the set of its blocks' digests: how often a block is quantised (under recompute twice), by which rank and in
which order, depends on the layout, and what it holds must not.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from tpformer.kernels.quantize.format import BLOCK, Blocks, row_exponents
from tpformer.kernels.quantize.reference import dequantize_weight, quantize_weight

Step = frozenset[bytes]
LEAST = -60
"""Blocks with a smaller exponent count for nothing: their numbers, below 2**-51, are zeros but for the rounding of
sums, whose order is the layout's. A sample's first token attends to itself alone, so its query's gradient is such a
one."""


def digests(made: Sequence[Blocks]) -> Step:
    """SHA-256 of each block's values and exponent, of matrices that `record_blocks` gave.

    Weights are quantised once more: where ZeRO gathered blocks, the linear has quantised what blocks stand for. A block
    whose largest magnitude was rounded to 224 scales then has other bytes for the same numbers, and after another time
    everyone's are those.
    """
    found: set[bytes] = set()
    for values, exponents in made:
        m, k = values.shape
        if m == 0:  # experts of this rank have no row
            continue
        cells = values.view(torch.uint8)
        if exponents.shape == row_exponents(m, k):
            cells, scales = cells.view(m, k // BLOCK, BLOCK), exponents.t()
        else:
            values, exponents = quantize_weight(dequantize_weight(Blocks(values, exponents), torch.float32))
            cells = values.view(torch.uint8)
            cells, scales = cells.view(m // BLOCK, BLOCK, k // BLOCK, BLOCK).permute(0, 2, 1, 3), exponents
        blocks, counted = cells.reshape(scales.numel(), -1).numpy(), scales.reshape(-1).numpy()
        for block, scale in zip(blocks[counted >= LEAST], counted[counted >= LEAST], strict=True):
            found.add(hashlib.sha256(block.tobytes() + np.int8(scale).tobytes()).digest())
    return frozenset(found)


def joined_steps(ranks: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps of a run whose ranks recorded these."""
    return [frozenset().union(*of_ranks) for of_ranks in zip(*ranks, strict=True)]


def run_hash_of(steps: Sequence[Step]) -> str:
    """A hash of all blocks of a run, equal if and only if each step has the same ones."""
    whole = hashlib.sha256()
    for index, step in enumerate(steps):
        whole.update(b"".join([index.to_bytes(4, "little"), *sorted(step)]))
    return whole.hexdigest()[:16]


def differing(step: Step, other: Step) -> float:
    """The share of the blocks of two steps that only one of them has."""
    return len(step ^ other) / max(1, len(step | other))

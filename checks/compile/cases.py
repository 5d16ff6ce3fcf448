"""The type of a case of the compile check: one specialisation of one kernel, and what its code must show.

Belongs here: the type, the capabilities and dtypes that kernels are compiled for, and operands without memory.
shipped.py, quantized.py and memory_bound.py list the cases of the kernels that ship, rules.py judges them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tpformer.kernels.launch import Tile
from tpformer.kernels.pack.format import RECORD, Packed, groups_of
from tpformer.kernels.protocol import ERROR_WORDS, Channel

CAPABILITIES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORLD = 8  # ranks of a communicating kernel


@dataclass(frozen=True, kw_only=True)
class Case:
    """One specialisation of one kernel, and what its code must show."""

    name: str
    """Which variant of the kernel it is, by operands, epilogue or virtual ranks."""
    kernel: str
    """The jitted function's name. Other functions that the launcher starts have cases of their own."""
    dtype: torch.dtype
    capability: int
    """80, 90 or 100."""
    launch: Callable[[], object]
    """Calls the launcher that starts the kernel."""
    tile: Tile | None = None
    """A GEMM's configuration; None for a kernel that multiplies no matrices."""
    releases: int = 0
    """Exact number of system-scope releases. Each call of publish is one, and each wait has one for its report; in a
    static loop each round counts."""
    fences: int = 0
    """Exact number of system-scope fences. A fence releases by all flags that are set after it."""
    flags: int = 0
    """Exact number of relaxed atomics of system scope whose answer nobody reads: they set flags behind a fence."""
    acquires: int = 0
    """Exact number of system-scope acquires. Each call of wait has two: before its loop and in it."""
    local_atomics: int = 0
    """Exact number of atomics on memory that only one rank uses, which need no system scope."""
    in_flight: int = 0
    """Bytes that all warps of a program must have asked of global memory before the first use of any."""
    own: frozenset[str] = frozenset()
    """Names of pointer and descriptor arguments that no other rank writes. Loads from them may stand before a wait."""
    waived: frozenset[str] = frozenset()
    """Names of rules (rules.py) that do not apply. A comment beside them gives the reason."""

    @property
    def tile_text(self) -> str:
        """The tile's sizes, m x n x k; empty without a tile."""
        return "" if self.tile is None else f"{self.tile.m}x{self.tile.n}x{self.tile.k}"

    @property
    def key(self) -> str:
        """A text that no other case has. The command's --only selects the cases whose key contains its text."""
        dtype = str(self.dtype).removeprefix("torch.")
        tile = "" if self.tile is None else f" {self.tile_text} s{self.tile.stages} w{self.tile.warps}"
        return f"{self.kernel} {self.name} sm_{self.capability} {dtype}{tile}"


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_packed(*shape: int) -> Packed:
    """A packed tensor without memory."""
    return Packed(meta(groups_of(math.prod(shape)), RECORD, dtype=torch.uint8), shape)


def channel(served: int = 1, world: int = WORLD, piece: int = 1) -> Channel:
    """A workspace without memory, large enough for every case. It serves virtual ranks if `served` is above 1. piece:
    bytes of which a slot holds a whole number."""
    capacity, flags = (1 << 34) // piece * piece, 1 << 16
    tables, words = partial(meta, dtype=torch.int64), partial(meta, dtype=torch.int32)
    slots = (meta(served * capacity, dtype=torch.uint8), meta(served * capacity, dtype=torch.uint8))
    return Channel(
        rank=0,
        served=served,
        world=world,
        data=tables(served, world),
        flags=tables(served, world),
        epoch=words(served),
        error=words(served, ERROR_WORDS.value),
        stopped=words(served, 2),
        slots=slots,
        parity_stride=served * capacity,
        capacity=capacity,
        writer_flags=flags,
        limit=10**6,
        counters=words(served, world * flags),
    )

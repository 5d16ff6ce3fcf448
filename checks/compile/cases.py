"""What a case of the compile check is: one specialisation of one kernel, and what its code must show.

Belongs here: the type, and what every kernel is compiled for. The shipped kernels' cases: shipped.py and
memory_bound.py; how one is judged: rules.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tpformer.kernels.launch import Tile

CAPABILITIES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One specialisation of one kernel, and what its code must show."""

    name: str
    """The variant of the kernel: which operands, real or virtual ranks, which epilogue."""
    kernel: str
    """The jitted function's name. Others that the launcher starts have cases of their own."""
    dtype: torch.dtype
    capability: int
    """80, 90 or 100."""
    launch: Callable[[], object]
    """Calls the launcher."""
    tile: Tile | None = None
    """Of a GEMM; a kernel without one multiplies nothing."""
    releases: int = 0
    """Exact number of system-scope releases: of calls of publish, a static loop's counted as often as it runs."""
    acquires: int = 0
    """Exact number of system-scope acquires: two per call of wait, before its loop and in it."""
    local_atomics: int = 0
    """Exact number of atomics that stay inside of one rank, and so need no system scope."""
    own: frozenset[str] = frozenset()
    """Pointer and descriptor arguments that no other rank writes: loads from them may stand before a wait."""
    waived: frozenset[str] = frozenset()
    """Rules (rules.py) that do not apply, with the reason in a comment beside it."""

    @property
    def tile_text(self) -> str:
        return "" if self.tile is None else f"{self.tile.m}x{self.tile.n}x{self.tile.k}"

    @property
    def key(self) -> str:
        """Unique among the cases; what --only is matched with."""
        dtype = str(self.dtype).removeprefix("torch.")
        tile = "" if self.tile is None else f" {self.tile_text} s{self.tile.stages} w{self.tile.warps}"
        return f"{self.kernel} {self.name} sm_{self.capability} {dtype}{tile}"


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")

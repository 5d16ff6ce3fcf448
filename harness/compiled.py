"""How many kernels a process compiles, and how many it finds in Triton's cache.

Belongs here: the count alone. What a kernel's launcher needs besides is built and found with it.
"""

from collections import Counter
from typing import Any

CACHED, COMPILED = "cached", "compiled"


def counting() -> Counter[str]:
    """The counts of this process, which grow while it runs: CACHED and COMPILED. Empty without triton."""
    counts: Counter[str] = Counter()
    try:
        from triton import knobs
    except ImportError:
        return counts

    def note(*, cache_hit: bool, **others: Any) -> None:
        counts[CACHED if cache_hit else COMPILED] += 1

    knobs.compilation.listener = note
    return counts

"""Memory that holds NaNs, for tests of kernels: what a kernel leaves out of its results then shows.

Belongs here: what allocations of a launcher find.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch fills new floating-point memory with NaNs and integer memory with the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with torch.utils.deterministic.fill_uninitialized_memory, on by default
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)

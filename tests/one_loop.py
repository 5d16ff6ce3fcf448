"""All gloo groups of a process share a device; fork servers import this, so that ranks and commands have it.

gloo gives each group a device of its own, whose thread wakes up a hundred times a second. A test may have 25 meshes on
each of 4 ranks, and their groups go when collections find them: such threads took a tenth of the suite's time.
"""

import functools
from typing import Any

from torch.distributed import ProcessGroupGloo

begin = ProcessGroupGloo.__init__
device = functools.cache(ProcessGroupGloo.create_default_device)  # on first use: threads do not survive a fork


def begin_on_the_device(group: ProcessGroupGloo, store: Any, rank: int, size: int, timeout: Any) -> None:
    """In place of ProcessGroupGloo.__init__."""
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [device()], timeout
    begin(group, store, rank, size, options)


ProcessGroupGloo.__init__ = begin_on_the_device

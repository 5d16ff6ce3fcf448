"""Process groups, the device mesh, symmetric memory and collectives.

Belongs here: the names the rest of tpformer uses, and nothing else.
"""

from .collectives import all_gather, all_reduce, record_collectives, reduce_scatter
from .cpu import keep_freed_memory, share_cores
from .hang import HangError
from .kernel_workspace import check_all, indexed, set_timeout
from .mesh import build_mesh, initialize
from .workspace import close, transport_of, use_backend

__all__ = [
    "HangError",
    "all_gather",
    "all_reduce",
    "build_mesh",
    "check_all",
    "close",
    "indexed",
    "initialize",
    "keep_freed_memory",
    "record_collectives",
    "reduce_scatter",
    "set_timeout",
    "share_cores",
    "transport_of",
    "use_backend",
]

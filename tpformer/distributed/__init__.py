"""Process groups, the device mesh, symmetric memory and collectives.

Belongs here: the names the rest of tpformer uses, and nothing else.
"""

from .collectives import all_gather, all_reduce, all_to_all, record_collectives, reduce_scatter
from .groups import backend_of, check_all, close, set_timeout, use_backend
from .hang import HangError
from .kernel_workspace import indexed
from .mesh import build_mesh, initialize

__all__ = [
    "HangError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backend_of",
    "build_mesh",
    "check_all",
    "close",
    "indexed",
    "initialize",
    "record_collectives",
    "reduce_scatter",
    "set_timeout",
    "use_backend",
]

"""Process groups, the device mesh, symmetric memory and collectives.

Belongs here: the names the rest of tpformer uses, and nothing else.
"""

from .collectives import all_gather, all_reduce, record_collectives, reduce_scatter
from .mesh import build_mesh, initialize
from .workspace import close, transport_of, use_backend

__all__ = [
    "all_gather",
    "all_reduce",
    "build_mesh",
    "close",
    "initialize",
    "record_collectives",
    "reduce_scatter",
    "transport_of",
    "use_backend",
]

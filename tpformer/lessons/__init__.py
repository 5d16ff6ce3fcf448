"""How the gradients of replicas become one in other ways than the library's: lessons, to learn from and to compare.

Belongs here: the names that parallel.exchange has for them. Each lesson is an Exchange (tpformer/exchange.py), and
nothing outside of this folder knows their names, but config/renamed.py, for older files. Their page is
docs/data_parallel.md, their bench bench/data_parallel/.
"""

from tpformer.exchange import NamedExchange

from .all_reduces import AllReduce
from .compressed import Compressed, PowerSGDSums, TopKSums
from .reductions import RUNNABLE
from .servers import StaleServer, SyncServer

LESSONS: dict[str, type[NamedExchange]] = {
    **dict.fromkeys(RUNNABLE, AllReduce),
    **dict.fromkeys(("bfloat16", "int8"), Compressed),
    "topk": TopKSums,
    "powersgd": PowerSGDSums,
    "sync_server": SyncServer,
    "stale_server": StaleServer,
}

__all__ = ["LESSONS"]

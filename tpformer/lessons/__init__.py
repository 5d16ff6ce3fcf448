"""How the gradients of replicas become one in other ways than the library's: lessons, to learn from and to compare.

Belongs here: the names that parallel.exchange may have. Each lesson is an Exchange (tpformer/exchange.py), and nothing
outside of this folder knows their names, but config/renamed.py, for older files. Their page is docs/data_parallel.md,
their bench bench/data_parallel/.
"""

from tpformer.config import Layout, check_choice

from .all_reduces import AllReduce
from .compressed import Compressed, PowerSGDSums, TopKSums
from .lesson import Lesson
from .reductions import RUNNABLE
from .servers import StaleServer, SyncServer

LESSONS: dict[str, type[Lesson]] = {
    **dict.fromkeys(RUNNABLE, AllReduce),
    **dict.fromkeys(("bfloat16", "int8"), Compressed),
    "topk": TopKSums,
    "powersgd": PowerSGDSums,
    "sync_server": SyncServer,
    "stale_server": StaleServer,
}

__all__ = ["LESSONS", "lesson"]


def lesson(text: str) -> Lesson:
    """The lesson of a text such as "ring" or "topk share=0.05". ValueError for an unknown name or option."""
    name, *options = text.split() or [text]
    check_choice("parallel.exchange", name, (Layout.exchange, *LESSONS))
    if name == Layout.exchange:
        raise ValueError(f"parallel.exchange={text!r}: {name} has no options")
    return LESSONS[name].of(name, text, options)

"""The door to Exchanges: one by the text of parallel.exchange.

Belongs here: the library's only import of tpformer/lessons/. What an Exchange is says tpformer/exchange.py.
"""

from tpformer.config import Layout, RunConfig
from tpformer.exchange import Exchange
from tpformer.lessons import lesson


def exchange_named(text: str) -> Exchange:
    """A new Exchange, by the text of parallel.exchange. ValueError, with what there is, for an unknown one."""
    if text == Layout.exchange:
        return Exchange()
    return lesson(text)


def exchange_of(config: RunConfig, exchange: Exchange | None = None) -> Exchange:
    """The Exchange of a run: that given, or a new one of its name. ValueError, with the remedy, for an unknown one, or
    one that cannot serve the run."""
    exchange = exchange or exchange_named(config.parallel.exchange)
    exchange.check(config.parallel, config)
    return exchange

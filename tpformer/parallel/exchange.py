"""The door to Exchanges: one by the text of parallel.exchange.

Belongs here: the library's only import of tpformer/lessons/. What an Exchange is says tpformer/exchange.py.
"""

from tpformer.config import Layout, RunConfig, check_choice
from tpformer.exchange import Exchange, NamedExchange
from tpformer.lessons import LESSONS

from .diloco import DiLoCo

EXCHANGES: dict[str, type[NamedExchange]] = {"diloco": DiLoCo, **LESSONS}


def exchange_named(text: str) -> Exchange:
    """A new Exchange, by the text of parallel.exchange, such as "ring" or "topk share=0.05". ValueError, with what
    there is, for an unknown name or option."""
    if text == Layout.exchange:
        return Exchange()
    name, *options = text.split() or [text]
    check_choice("parallel.exchange", name, (Layout.exchange, *EXCHANGES))
    if name == Layout.exchange:
        raise ValueError(f"parallel.exchange={text!r}: {name} has no options")
    return EXCHANGES[name].of(name, text, options)


def exchange_of(config: RunConfig, exchange: Exchange | None = None) -> Exchange:
    """The Exchange of a run: that given, or a new one of its name. ValueError, with the remedy, for an unknown one, or
    one that cannot serve the run."""
    exchange = exchange or exchange_named(config.parallel.exchange)
    exchange.check(config.parallel, config)
    return exchange

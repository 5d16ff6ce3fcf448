"""Two or more sites that a slow link joins: seconds of a step, synchronous and in rounds of DiLoCo.

Belongs here: formulas of the link, and their table. The step of one site is the planner's; what DiLoCo sends and how
much of it a step waits for is in parallel/diloco.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tpformer.config import RunConfig
from tpformer.distributed.links import Link
from tpformer.parallel.diloco import DiLoCo
from tpformer.parallel.exchange import exchange_named

from .candidates import Question
from .search import Choice, search

UNITS = {"kb/s": 1e3 / 8, "mb/s": 1e6 / 8, "gb/s": 1e9 / 8, "tb/s": 1e12 / 8}
ROUNDS = (
    *("diloco every=10", "diloco every=30", "diloco every=100"),
    *("diloco every=100 send=int8", "diloco every=100 fragments=4 delay=20"),
)
"""What the table shows beside synchronous steps."""


class Sites(NamedTuple):
    """number: of sites, each of which is one replica. link: each site's way to the others; bytes/s in one direction."""

    number: int
    link: Link


def link_of(text: str, latency: float) -> Link:
    """A link from a text such as "1Gb/s", bits by a second. ValueError for another."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([kKmMgGtT]b/s)\s*", text)
    try:
        value = float(found[1]) * UNITS[found[2].lower()] if found else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"--between {text.strip()!r} is no rate of bits: write one such as 1Gb/s, or 100Mb/s")
    return Link(latency, value)


def site_question(question: Question, sites: int) -> Question:
    """The question of one site: its GPUs, and its share of the batch. ValueError if sites do not divide them."""
    samples = question.config.train.global_batch_size
    if question.gpus % sites or samples % sites:
        raise ValueError(
            f"--sites {sites} do not share {question.gpus} GPUs and {samples} samples evenly: choose --gpus and "
            f"--batch that {sites} divides"
        )
    train = dataclasses.replace(question.config.train, global_batch_size=samples // sites)
    return question._replace(gpus=question.gpus // sites, config=dataclasses.replace(question.config, train=train))


def site_choice(question: Question) -> Choice:
    """The fastest layout of one site. ValueError if none works."""
    found = search(question, 1)
    if not found.choices:
        raise ValueError(f"no layout works on a site's {question.gpus} x {question.device.name}: take more of them")
    return found.choices[0]


def synchronous_seconds(config: RunConfig, step: float, sites: Sites, itemsize: int) -> float:
    """Of a step whose gradients, of so many bytes each, are added up over the link behind the backward, by a ring."""
    sent = 2 * (sites.number - 1) / sites.number * itemsize * config.model.n_parameters
    return step + exchange_seconds(sent, sites)


def round_seconds(config: RunConfig, step: float, sites: Sites, text: str) -> float:
    """Of a step by DiLoCo, averaged over its rounds. text: that of parallel.exchange."""
    exchange = exchange_named(text)
    assert isinstance(exchange, DiLoCo)
    sent = exchange.sent_bytes(config.model.n_parameters, sites.number)
    return step + exchange.exposed_seconds(exchange_seconds(sent, sites), step)


def exchange_seconds(sent: float, sites: Sites) -> float:
    """Of an exchange in which each site sends so many bytes, all of its ranks together."""
    return sites.link.seconds(2 * (sites.number - 1), sent)


def sites_table(config: RunConfig, step: float, sites: Sequence[Sites], rounds: Sequence[str] = ROUNDS) -> Table:
    """A row for each link: seconds of a step, and how many times faster than with bfloat16 gradients it is in rounds.
    Predicted.

    step: seconds of a step of one site by itself.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="seconds of a step: predicted", title_justify="left")
    table.add_column("between sites")
    for name in ("one site alone", "float32 gradients", "bfloat16", *(text.removeprefix("diloco ") for text in rounds)):
        table.add_column(name, justify="right")
    for each in sites:
        whole, together = (synchronous_seconds(config, step, each, itemsize) for itemsize in (4, 2))
        found = [round_seconds(config, step, each, text) for text in rounds]
        cells = [f"{seconds:.2f} ({together / seconds:.1f}x)" for seconds in found]
        rate, pause = 8 * each.link.bandwidth / 1e9, 1e3 * each.link.latency
        table.add_row(f"{rate:g} Gb/s, {pause:g} ms", f"{step:.2f}", f"{whole:.2f}", f"{together:.2f}", *cells)
    return table

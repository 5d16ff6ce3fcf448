"""The best layouts of several kinds beside one another, and from where on which kind is the fastest.

Belongs here: what `tpformer plan --within "A; B" --sweep KEY=...` compares. The search itself is in search.py. All
figures are predictions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.table import Table

from .candidates import Question
from .layouts import layout_text, parse_kind
from .plan_report import largest_loss
from .report import size
from .search import Choice, search


class Compared(NamedTuple):
    """One value of a sweep ("" without one), and the best layout of each kind; None where none works."""

    value: str
    best: dict[str, Choice | None]

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens/s of the kinds that have a layout that works."""
        return {kind: choice.tokens for kind, choice in self.best.items() if choice is not None}

    @property
    def winner(self) -> str | None:
        """The kind with the fastest layout; None if no layout works."""
        return max(self.tokens, key=self.tokens.__getitem__, default=None)

    @property
    def lead(self) -> float:
        """The share by which the winner is faster than the next kind; infinity where there is no other."""
        *_, second, first = 0.0, *sorted(self.tokens.values())
        return first / second - 1 if second else math.inf


def within(question: Question, kind: str) -> Question:
    """The question that searches layouts of a kind alone."""
    return question._replace(space=dataclasses.replace(question.space, **parse_kind(kind)))


def compare(question: Question, value: str, kinds: Sequence[str]) -> Compared:
    """The best layout of each kind. ValueError, before anything is searched, for a text that is no kind."""
    asked = {kind: within(question, kind) for kind in kinds}
    found = {kind: search(each, 1).choices for kind, each in asked.items()}
    return Compared(value, {kind: choices[0] if choices else None for kind, choices in found.items()})


def table(key: str, rows: Sequence[Compared], assumed: str) -> Table:
    """A row for each value and kind, with the winner's lead over the others. assumed: the device, and more."""
    found = Table(title=f"the best of each kind, predicted: {assumed}", title_justify="left", box=None)
    for name in (key, "kind", "its best layout"):
        found.add_column(name, overflow="fold")
    for name in ("tokens/s", "of the winner's", "limited by", "memory"):
        found.add_column(name, justify="right")
    for row in rows:
        most = max(row.tokens.values(), default=0.0)
        for kind, choice in row.best.items():
            cells = ["does not work", "", "", "", ""]
            if choice is not None:
                item, share = largest_loss(choice)
                cells = [layout_text(choice.config), f"{choice.tokens:,.0f}", f"{choice.tokens / most:.0%}"]
                cells += [f"{item} {share:.1%}", size(choice.memory.total)]
            found.add_row(row.value, kind, *cells)
    return found


def crossovers(key: str, rows: Sequence[Compared]) -> Iterator[str]:
    """A sentence for each run of values that one kind wins, with its smallest and its largest lead."""
    for winner, several in itertools.groupby(rows, key=lambda row: row.winner):
        group = list(several)
        first, last = group[0].value, group[-1].value
        where = f" at {key} = {first}" + (f" to {last}" if last != first else "") if key else ""
        leads = [f"{lead:.1%}" for lead in sorted(row.lead for row in group if winner) if lead < math.inf]
        by = f", by {' to '.join(dict.fromkeys((leads[0], leads[-1])))}" if leads else ", and no other works"
        yield f"{winner} is the fastest{where}{by}" if winner else f"no layout works{where}"

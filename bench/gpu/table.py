"""The end of a call in at most 40 lines: which machine, its ceilings, and a line for each item.

Belongs here: which lines there are. figures.py has what a result is in some words.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.runner import columns

from .figures import constants
from .items import Item
from .schedule import Session, words
from .state import DONE, Entry

LINES = 40
ROWS = 31  # of items at most; what has not begun is named in two lines more
LETTERS = 52  # of a cell


def ceilings(folder: Path) -> str:
    """A copy's bytes/s and the largest GEMM's FLOP/s, if they were measured."""
    path = folder / "ceilings-quick.json"
    return constants(json.loads(path.read_text())["rows"]) if path.exists() else "not measured"


def outcome(session: Session, item: Item) -> str:
    """What came of an item in this call or before: as the state has it, with what must be known beside."""
    entry = session.state.entries[item.name]
    said = words(session, entry.outcome)
    if entry.outcome in DONE and entry.key != session.key(item):
        return f"{said}, older source"
    return f"{said}, changed tree" if entry.dirty is not False else said


def cells(session: Session, item: Item) -> list[str]:
    entry: Entry = session.state.entries[item.name]
    took = "" if entry.seconds is None else f"{entry.seconds:.0f}"
    said = words(session, entry.outcome) if session.pretends and entry.outcome in DONE else entry.figure
    return [item.name, outcome(session, item), took, said[:LETTERS], item.bar, item.prediction]


def table(session: Session, identity: Mapping[str, Any]) -> list[str | Table]:
    """All lines: the machine, its ceilings, items that have begun, and the names of the others."""
    begun = [item for item in session.items if item.name in session.state.entries]
    begun.sort(key=lambda item: session.state.entries[item.name].outcome in DONE)  # what failed is not left out
    rows = columns(("item", "outcome"), ("s",))
    for name in ("figure", "bar", "prediction"):
        rows.add_column(name, no_wrap=True)
    for item in begun[:ROWS]:
        rows.add_row(*cells(session, item))
    others = [item.name for item in session.items if item not in begun and session.possible(item)]
    impossible = [f"{item.name} ({item.tool[0]})" for item in session.items if item.tool and not session.possible(item)]
    lines = {
        "ceilings": "nothing is measured" if session.pretends else ceilings(session.folder),
        "kernels of this call": ", ".join(f"{number} {what}" for what, number in sorted(session.kernels.items())),
        "not begun": short(others),
        "not shown": short([item.name for item in begun[ROWS:]]),
        "without their tool": short(impossible),
        "results": str(session.folder),
    }
    head = "; ".join(f"{name} {value}" for name, value in identity.items())
    return [
        head,
        f"ceilings: {lines.pop('ceilings')}",
        rows,
        *(f"{name}: {text}" for name, text in lines.items() if text),
    ]


def short(names: list[str]) -> str:
    """Names in one line, as many as fit."""
    line = ", ".join(names)
    return line if len(line) <= 170 else f"{len(names)}: {line[:160]} ..."

"""The bench `families`: every cell of the matrix, its tables, and which of them must be right.

Belongs here: running the cells on ranks that live for all of them, the report. A rank's part: cells.py; the page:
page.py.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import util
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.provenance import RESULTS
from harness.ranks import Ranks
from harness.runner import Bench, Report, WrongCall, columns

from . import cells
from .models import FAMILIES, GROUPS, Family
from .page import COLUMNS, NOTE, PAGE, draw, page

QUICK = ("Llama", "GPT-2", "T5")
REQUIRED = 0.8  # of our cells are right, with parameters that are divided; the rest is refused
Row = dict[str, Any]


def cells_of(families: Sequence[Family], directory: Path, size: int, ways: Sequence[str]) -> dict[tuple[str, str], Row]:
    """Every cell of one world size, by family and way.

    Ranks that disagree may have left one another in a collective, so that other ranks take over behind such a cell.
    """
    wanted = [(family.name, way) for family in families for way in ways]
    preload = sorted({family.model_class.__module__ for family in families})
    found: dict[tuple[str, str], Row] = {}
    while len(found) < len(wanted):
        with Ranks(size, 1, cells.setup, directory, timeout=timedelta(seconds=cells.TIMEOUT), preload=preload) as ranks:
            for name, way in wanted[len(found) :]:
                by_rank = ranks.call(f"{name}, {way}")
                cell = cells.joined(by_rank)
                found[name, way] = cell._asdict()
                print(f"{name}, {way} on {size}: {cell.verdict} {cell.reason} ({cell.seconds:.2f} s)", flush=True)
                if cell.verdict == cells.ERROR and len({each.reason for each in by_rank}) > 1:
                    break
    return found


def rows(families: Sequence[Family]) -> list[Row]:
    """A row for each family, with its cells by the names of COLUMNS."""
    cells.quiet()
    found: dict[str, Row] = {family.name: {} for family in families}
    with tempfile.TemporaryDirectory(prefix="tpformer-bench-") as folder:
        for family in families:
            cells.prepare(family, Path(folder) / family.name)
        for size in sorted({size for _, size in COLUMNS.values()}):
            ways = {way: column for column, (way, ranks) in COLUMNS.items() if ranks == size}
            for (name, way), cell in cells_of(families, Path(folder), size, list(ways)).items():
                found[name][ways[way]] = {key: rounded(value) for key, value in cell.items()}
    group_of = {family.name: group for group, members in GROUPS.items() for family in members}
    return [
        {"family": family.name, "group": group_of[family.name], "model": family.model, "cells": found[family.name]}
        for family in families
    ]


def rounded(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def result_table(found: Sequence[Row]) -> Table:
    """A line for each family: verdicts, and how much of the parameters 2 ranks divide."""
    table = columns(["family"], ["divided", *COLUMNS])
    for row in found:
        share = row["cells"]["tp 2"]["share"]
        table.add_row(row["family"], f"{share:.0%}", *(row["cells"][column]["verdict"] for column in COLUMNS))
    return table


def problems(found: Sequence[Row]) -> list[str]:
    """What must not be: one of our cells wrong or an error, or too few of them right and divided."""
    ours = {
        (row["family"], column): row["cells"][column]
        for row in found
        for column, (way, _) in COLUMNS.items()
        if way != cells.THEIRS
    }
    missed = [
        f"{family}, {column}: {cell['verdict']}: {cell['reason']}"
        for (family, column), cell in ours.items()
        if cell["verdict"] not in (cells.RIGHT, cells.REFUSED)
    ]
    right = sum(cell["verdict"] == cells.RIGHT and cell["share"] > 0 for cell in ours.values())
    few = f"only {right} of {len(ours)} cells are right and divided, fewer than {REQUIRED:.0%}"
    return missed + ([few] if right < REQUIRED * len(ours) else [])


def run(options: argparse.Namespace) -> Report:
    """Run every cell, or those of some families."""
    names = [family.name for family in FAMILIES]
    wanted = options.only or (QUICK if options.quick else names)
    if unknown := sorted(set(wanted) - set(names)):
        raise WrongCall(f"there is no family {unknown[0]!r}; there are {', '.join(names)}")
    found = rows([family for family in FAMILIES if family.name in wanted])
    count = sum(len(row["cells"]) for row in found)
    content = {"transformers": version("transformers"), "rows": found}
    outcome = f"{count} cells: none of ours is wrong"
    return Report([result_table(found)], content, problems(found), outcome, write_page)


def write_page(folder: Path) -> None:
    """Write docs/families.md, when the results are the repository's own."""
    if folder.parent == RESULTS:
        PAGE.write_text(page(folder / "families.json"))


def obstacle() -> str | None:
    return None if util.find_spec("transformers") else "transformers (pip install transformers)"


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--quick": {"action": "store_true", "help": f"only {', '.join(QUICK)}, nothing written"},
    "--only": {"nargs": "+", "metavar": "FAMILY", "help": "only these, nothing written"},
}
BENCH = Bench(
    name="families",
    description="models of transformers, parallelized in place, against one process and transformers' own way",
    run=run,
    draw=draw,
    options=OPTIONS,
    obstacle=obstacle,
    note=NOTE,
)

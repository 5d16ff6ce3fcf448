"""The tables and pictures of docs/data_parallel.md, made from the results file.

Belongs here: which numbers stand in which table. The page says what they mean; each table is between two marks in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.marks import filled, markdown
from harness.provenance import RESULTS, ROOT
from tpformer.lessons.reductions import RUNNABLE

from . import messages, pictures, servers, strategies
from .strategies import write_csv

PAGE, PICTURES = ROOT / "docs" / "data_parallel.md", ROOT / "docs" / "pictures" / "data_parallel"
Row = Mapping[str, Any]


def counts_table(rows: Sequence[Row], name: str) -> str:
    """Counted and by formula, for each number of ranks."""
    cells = [("ranks", "rounds", "messages", "formula", "values / N", "formula", "busiest / N", "formula")]
    for row in (each for each in rows if each["algorithm"] == name):
        n = row["n"]
        pairs = [f"{number:g}" for number in row["messages"]]
        pairs += [f"{number / n:.3g}" for key in ("values", "busiest") for number in row[key]]
        cells.append((str(row["ranks"]), str(row["steps"]), *pairs))
    return markdown(cells)


def tables(result: Row) -> dict[str, str]:
    """The page's tables, by the name in their mark."""
    served = result["servers"]
    found = {name: counts_table(result["rows"], name) for name in RUNNABLE}
    found["parameter_server"] = counts_table(served["counts"], "parameter_server")
    found["turns"] = markdown(servers.time_cells(served["times"]))
    found["depths"] = markdown(strategies.depth_cells(result))
    found["strategies"] = markdown(strategies.strategy_cells(result))
    found["seconds"] = times_table(result)
    machine, torch = result["machine"], result["versions"]["torch"]
    found["machine"] = f"Measured on: {machine['cpu']}, {machine['cores']} cores, torch {torch}, {result['date']}."
    return found


def times_table(result: Row) -> str:
    """Measured microseconds and the fit's, of every other size."""
    wanted = sorted({row["bytes"] for row in result["times"]})[::2]
    cells = {(row["algorithm"], row["bytes"]): f"{row['us']:.0f} ({row['fit']:.0f})" for row in result["times"]}
    rows = [(name, *(cells[name, size] for size in wanted)) for name in RUNNABLE]
    sizes = ("us (fit)", *(f"{size:,} bytes" for size in wanted))
    return f"{markdown([sizes, *rows])}\n\nThe fit: {messages.fit_words(result['fit'])}."


def page(text: str, result: Row) -> str:
    """docs/data_parallel.md with its tables made again."""
    return filled(text, tables(result), "docs/data_parallel.md")


def write_files(folder: Path) -> None:
    """The curves as CSV, and if the results are the repository's own, the page and its pictures."""
    result = json.loads((folder / "data_parallel.json").read_text())
    write_csv(result, folder / "data_parallel.csv")
    if folder.parent != RESULTS:
        return
    shutil.rmtree(PICTURES, ignore_errors=True)
    PICTURES.mkdir(parents=True)
    draw_all(result, PICTURES)
    PAGE.write_text(page(PAGE.read_text(), result))


def draw_all(result: Row, folder: Path) -> None:
    """Every picture of the page."""
    for name in RUNNABLE:
        pictures.draw_messages(name, result["messages"][name], result, folder / f"{name}.svg")
    pictures.draw_server(result, folder / "parameter_server.svg")
    pictures.draw_turns(result, folder / "turns.svg")
    pictures.draw_pipedream(result, folder / "pipedream.svg")
    pictures.draw_depths(result, folder / "depths.svg")
    pictures.draw_curves(result, folder / "curves.svg")

"""The tables and pictures of docs/data_parallel.md, made from the results file.

Belongs here: which numbers stand in which table. The page says what they mean; each table is between two marks in it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tpformer.distributed.reductions import RUNNABLE

from ..provenance import RESULTS, ROOT
from . import pictures
from .strategies import write_csv

PAGE, PICTURES = ROOT / "docs" / "data_parallel.md", ROOT / "docs" / "pictures" / "data_parallel"
Row = Mapping[str, Any]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def counts_table(rows: Sequence[Row], name: str) -> str:
    """Counted and by formula, for each number of ranks."""
    header = ("ranks", "steps", "messages", "formula", "values / N", "formula", "busiest / N", "formula")
    own = [row for row in rows if row["algorithm"] == name]
    found = []
    for row in own:
        n = row["n"]
        pairs = [f"{number:g}" for number in row["messages"]]
        pairs += [f"{number / n:.3g}" for key in ("values", "busiest") for number in row[key]]
        found.append((str(row["ranks"]), str(row["steps"]), *pairs))
    return markdown(header, found)


def tables(result: Row) -> dict[str, str]:
    """The page's tables, by the name in their mark."""
    served, flushed = result["servers"], mean(result["depths"][0]["valid"])
    found = {name: counts_table(result["rows"], name) for name in RUNNABLE}
    found["parameter_server"] = counts_table(served["counts"], "parameter_server")
    times = [
        (f"`{r['server']}`", f"{r['even']:.2f}", f"{r['slow']:.2f}", f"{r['slow'] / r['even']:.2f}")
        for r in served["times"]
    ]
    found["turns"] = markdown(("server", "all as fast, s", "one slow, s", "ratio"), times)
    depths = [
        (row["strategy"], ", ".join(map(str, row["versions"])), f"{sum(row['nbytes']) / 1e6:.2f}",
         f"{mean(row['valid']):.3f}", f"{mean(row['valid']) - flushed:+.3f}")
        for row in result["depths"]
    ]  # fmt: skip
    found["depths"] = markdown(
        ("pipeline", "versions of each stage", "MB of weights", "loss", "more than flushed"), depths
    )
    first = result["strategies"][0]["bytes"]
    rows = [
        (row["strategy"], f"{row['bytes'] / 1e6:.3f}", f"{row['bytes'] / first:.3f}", f"{mean(row['valid']):.3f}",
         ", ".join(f"{loss:.3f}" for loss in row["valid"]))
        for row in result["strategies"]
    ]  # fmt: skip
    header = ("strategy", "MB sent in a step", "share", "loss, nats/byte", "of the seeds")
    found["strategies"] = markdown(header, rows)
    found["seconds"] = times_table(result)
    machine, torch = result["machine"], result["versions"]["torch"]
    found["machine"] = f"Measured on: {machine['cpu']}, {machine['cores']} cores, torch {torch}, {result['date']}."
    return found


def times_table(result: Row) -> str:
    """Measured microseconds and the fit's, of every other size."""
    wanted = sorted({row["bytes"] for row in result["times"]})[::2]
    cells = {(row["algorithm"], row["bytes"]): f"{row['us']:.0f} ({row['fit']:.0f})" for row in result["times"]}
    rows = [(name, *(cells[name, size] for size in wanted)) for name in RUNNABLE]
    fit = result["fit"]
    words = (
        f"The fit: {fit['latency_us']:.0f} us for each step, {fit['gigabytes_per_second']:.2f} GB/s, mean error "
        f"{100 * fit['mean_error']:.0f} %."
    )
    return f"{markdown(('us (fit)', *(f'{size:,} bytes' for size in wanted)), rows)}\n\n{words}"


def page(text: str, result: Row) -> str:
    """docs/data_parallel.md with its tables made again."""
    found = tables(result)
    for name, table in found.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(begin)
        if not mark:
            raise ValueError(f"docs/data_parallel.md has no mark {begin.strip()!r}")
        text = f"{before}{begin}\n{table}\n\n{rest[rest.index(end) :]}"
    return text


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

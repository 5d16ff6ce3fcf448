"""What every bench shares: the row, the correctness gate, the machine line, the table, the JSON file, the exit code.

Belongs here: nothing that knows what is timed. A bench is a `Bench`, or a `Tool`, in a file of its own, listed in
__main__.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypedDict

import torch
from rich.console import Console
from rich.table import Table

from .plot import write_svg
from .timing import Comparison

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
SCHEMA = 1


class Row(TypedDict):
    """One comparison. ratio above 1: provider is better than baseline; its range is over the interleaved rounds."""

    case: str
    shape: str
    provider: str
    baseline: str
    unit: str
    value: float
    baseline_value: float
    ratio: float
    ratio_min: float
    ratio_max: float
    bar: float | None
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Bench:
    """check raises when a result is wrong, on the shapes that run times; run(quick) returns the rows."""

    name: str
    description: str
    device: str
    """cpu or cuda: which device's results these are."""
    check: Callable[[], None]
    run: Callable[[bool], list[Row]]
    obstacle: Callable[[], str | None] | None = None
    """What it needs and does not find here, None if nothing. By default it needs its device."""
    predict: Callable[[], list[Row]] | None = None
    """Rows that come from a model and not from a measurement: what is shown where the bench cannot run."""
    note: str = ""
    """What a reader of the rows must know; printed below them."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """What measures something else than ratios: it has arguments, rows and a table of its own."""

    name: str
    description: str
    run: Callable[[Sequence[str], Path, Console], int]
    """(arguments after the name, directory of results, console) -> exit code."""


def make_row(
    *,
    case: str,
    shape: str,
    provider: str,
    baseline: str,
    unit: str,
    convert: Callable[[float], float],
    comparison: Comparison,
    bar: float | None = None,
) -> Row:
    """A row from a comparison; convert turns the seconds of one repetition into `unit`, bar is the required ratio."""
    return {
        "case": case,
        "shape": shape,
        "provider": provider,
        "baseline": baseline,
        "unit": unit,
        "value": round(convert(comparison.seconds), 1),
        "baseline_value": round(convert(comparison.baseline_seconds), 1),
        "ratio": round(comparison.ratio, 3),
        "ratio_min": round(comparison.ratio_min, 3),
        "ratio_max": round(comparison.ratio_max, 3),
        "bar": bar,
        "ok": bar is None or comparison.ratio >= bar,
    }


def mean_row(rows: Sequence[Row], *, case: str, shape: str, provider: str, bar: float | None = None) -> Row:
    """The geometric means of rows with one unit and baseline; the range is that of their ratios."""
    values = [max(row["value"], 0.05) for row in rows]  # a row's 0.0 is a rounded number
    baselines = [max(row["baseline_value"], 0.05) for row in rows]
    ratios = [row["ratio"] for row in rows]
    mean = Comparison(
        geometric_mean(values), geometric_mean(baselines), geometric_mean(ratios), min(ratios), max(ratios)
    )
    common: dict = {"baseline": rows[0]["baseline"], "unit": rows[0]["unit"], "convert": float}
    return make_row(case=case, shape=shape, provider=provider, comparison=mean, bar=bar, **common)


def missing_device(device: str) -> str | None:
    """What a bench of this device lacks here."""
    return None if device == "cpu" or torch.cuda.is_available() else "a CUDA device"


def machine() -> dict[str, Any]:
    """CPU model, usable cores, torch's threads, memory, GPU. No names of hosts or users."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    return found


def machine_line() -> str:
    here = machine()
    gpu = f", {here['gpu']}" if here["gpu"] else ""
    return f"{here['cpu']}, {here['cores']} cores, {here['threads']} threads, torch {torch.__version__}{gpu}"


def device_directory(device: str) -> str:
    """cpu, or the GPU's name as part of a path."""
    return "cpu" if device == "cpu" else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def commit() -> dict[str, Any]:
    """The commit that is checked out, and whether files besides the results differ from it; nulls outside git."""

    def git(*arguments: str) -> str | None:
        try:
            result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return result.stdout.strip()

    status = git("status", "--porcelain", "--", ".", ":!bench/results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def table(rows: Sequence[Row]) -> Table:
    result = Table(box=None, pad_edge=False)
    for column in ("case", "shape", "provider", "baseline"):
        result.add_column(column, no_wrap=True)
    for column in ("value", "baseline value", "unit", "ratio", "min", "max", "bar", "ok"):
        result.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    for row in rows:
        result.add_row(
            *(row["case"], row["shape"], row["provider"], row["baseline"]),
            *(f"{row['value']:,.1f}", f"{row['baseline_value']:,.1f}", row["unit"]),
            *(f"{ratio:.3f}" for ratio in (row["ratio"], row["ratio_min"], row["ratio_max"])),
            "" if row["bar"] is None else f"{row['bar']:g}",
            "" if row["bar"] is None else "yes" if row["ok"] else "NO",
        )
    return result


def check_rows(rows: Sequence[Row]) -> None:
    columns = list(Row.__annotations__)
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"a row has the columns {list(row)}, not {columns}")
    if not rows:
        raise ValueError("the bench returned no rows")


def write(
    bench: Bench | Tool,
    content: Mapping[str, Any],
    *,
    device: str,
    results: Path,
    draw: Callable[[Path], object],
    console: Console,
) -> None:
    """Write <device>/<name>.json, and beside it the SVG that `draw` makes of it."""
    directory = results / device_directory(device)
    directory.mkdir(parents=True, exist_ok=True)
    result = {
        "schema": SCHEMA,
        "bench": bench.name,
        "description": bench.description,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        **commit(),
        "versions": versions(),
        **content,
    }
    path = directory / f"{bench.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw(path)
    console.print(f"written: {path} and {path.with_suffix('.svg').name}", highlight=False, soft_wrap=True)


def verdict(rows: Sequence[Row]) -> str:
    required = [row for row in rows if row["bar"] is not None]
    missed = [row for row in required if not row["ok"]]
    if not missed:
        return f"all {len(required)} bars hold"
    where = "; ".join(f"{row['case']} {row['shape']}: {row['ratio']:.3f} < {row['bar']:g}" for row in missed)
    return f"{len(missed)} of {len(required)} bars missed: {where}"


def decline(bench: Bench, needed: str, console: Console) -> int:
    """Say what the bench needs, and show what a model predicts of it; the exit code."""
    console.print(
        f"{bench.name} needs {needed}: nothing is measured, nothing is written", highlight=False, soft_wrap=True
    )
    if bench.predict is not None:
        console.print("\nPREDICTION, not a measurement", highlight=False)
        console.print(table(bench.predict()), highlight=False)
        console.print(bench.note, highlight=False, soft_wrap=True)
    return 0


def execute(bench: Bench, *, quick: bool, results: Path, console: Console) -> int:
    """Gate, time, report; the exit code. Of several ranks' consoles one is not quiet: its rank writes the results."""
    console.print(machine_line(), highlight=False, soft_wrap=True)
    needed = missing_device(bench.device) if bench.obstacle is None else bench.obstacle()
    if needed is not None:
        return decline(bench, needed, console)
    try:
        bench.check()
    except Exception:
        traceback.print_exc()
        console.print(f"{bench.name}: a result is wrong, so nothing is timed", highlight=False, soft_wrap=True)
        return 1
    rows = bench.run(quick)
    check_rows(rows)
    if quick:  # a required ratio is one of full-size shapes
        rows = [{**row, "bar": None, "ok": True} for row in rows]
    console.print(table(rows), highlight=False)
    if bench.note:
        console.print(bench.note, highlight=False, soft_wrap=True)
    if quick:
        console.print("--quick: small sizes, few repetitions; nothing is written and no bar applies", highlight=False)
        return 0
    if not console.quiet:
        content = {"rows": list(rows)}
        write(bench, content, device=bench.device, results=results, draw=write_svg, console=console)
    console.print(f"{bench.name}: {verdict(rows)}", highlight=False, soft_wrap=True)
    return 0 if all(row["ok"] for row in rows) else 1


def main(arguments: Sequence[str], benches: Sequence[Bench | Tool], results: Path = RESULTS) -> int:
    """`python -m bench [NAME] [--quick]`; the exit code: 1 for a wrong result or a missed bar, 2 for a wrong call.

    What follows the name of a Tool is the Tool's to read.
    """
    first = os.environ.get("RANK", "0") == "0"  # torchrun's variable
    console = Console(width=None if sys.stdout.isatty() else 180, quiet=not first)
    by_name = {bench.name: bench for bench in benches}
    named = by_name.get(arguments[0]) if arguments else None
    if isinstance(named, Tool):
        console.print(machine_line(), highlight=False, soft_wrap=True)
        return named.run(arguments[1:], results, console)
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time what was first found to be correct.")
    parser.add_argument("name", nargs="?", help="the bench; without it, list them")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions, nothing written")
    options = parser.parse_args(arguments)
    bench = by_name.get(options.name)
    if isinstance(bench, Bench):
        return execute(bench, quick=options.quick, results=results, console=console)
    for each in benches:
        console.print(f"{each.name:22} {each.description}", highlight=False, soft_wrap=True)
    if options.name is not None:
        print(f"there is no bench {options.name!r}", file=sys.stderr)
        return 2
    return 0

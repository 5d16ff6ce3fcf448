"""The one runner of benches: options, gate, tables, results file, picture, exit code.

Belongs here: nothing that knows what is measured. A bench is a `Bench` in a file of its own, listed in
bench/__main__.py; one whose rows are ratios states them with ratios.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from .compiled import counting
from .provenance import RESULTS, commit, device_directory, versions

SCHEMA = 1
LETTERS = 280  # a longer line of a results file is broken, if it has parts
QUICK = {"--quick": {"action": "store_true", "help": "small sizes, few repetitions, nothing written"}}
REFUSED = (
    "files besides bench/results differ from the commit, or there is none, so results are printed and none is "
    "written; commit first to keep them"
)


class WrongCall(ValueError):
    """Options that make no sense: its text is printed, and the exit code is 2."""


class Report(NamedTuple):
    """What a bench has found.

    tables: tables and lines of text, printed in order. content: what the results file has after its head. problems:
    what is not as required; each is printed, and any makes the exit code 1. outcome: printed if there is no problem.
    files: writes further files into the folder of the results.
    """

    tables: Sequence[Table | str]
    content: Mapping[str, Any]
    problems: Sequence[str]
    outcome: str
    files: Callable[[Path], object] | None = None


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A question, and what answers it. Its results are written if it is called without options, from a clean tree.

    With --into FOLDER they are written there in any case. The file then says what options there were, has them in its
    name, and says whether the tree was clean.
    """

    name: str
    description: str
    run: Callable[[argparse.Namespace], Report]
    """Raises WrongCall for options that make no sense."""
    draw: Callable[[Path], Path | None] | None
    """Makes the picture beside a results file (.json); None where there is nothing to see."""
    device: str | None = "cpu"
    """cpu or cuda: which device it needs, and whose results these are; None: the GPU if there is one, else the CPU."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: QUICK)
    """Options for argparse. Each makes the bench do less than the whole, so that bench/results gets nothing."""
    check: Callable[[bool], None] | None = None
    """The gate: raises when a result is wrong, on the shapes that are timed. It is told whether those are --quick's."""
    obstacle: Callable[[], str | None] | None = None
    """Names what the bench needs and does not find here; None if it finds all. Unset, it needs its device."""
    predict: Callable[[], str] | None = None
    """A table of predicted times, shown where the bench cannot run."""
    note: str = ""
    """What a reader of the tables must know; printed below them, and in the results file."""


def columns(left: Iterable[str], right: Iterable[str] = ()) -> Table:
    """An empty table with columns that are aligned left, then columns that are aligned right; none wraps."""
    table = Table(box=None, pad_edge=False)
    for justify, names in (("left", left), ("right", right)):
        for name in names:
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def missing_device(device: str | None) -> str | None:
    """What a bench of this device lacks here."""
    return "a CUDA device" if device == "cuda" and not torch.cuda.is_available() else None


def machine() -> dict[str, Any]:
    """CPU model, usable cores, torch's threads, GPU. No names of hosts or users."""
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


def machine_line() -> str:
    """The machine in words."""
    here = machine()
    gpu = f", {here['gpu']}" if here["gpu"] else ""
    return f"{here['cpu']}, {here['cores']} cores, {here['threads']} threads, torch {torch.__version__}{gpu}"


def refused(results: Path, state: Mapping[str, Any]) -> bool:
    """Whether results must not be written there: into the repository, unless `state` is that of a clean commit."""
    return results == RESULTS and state["dirty"] is not False


def say(console: Console, text: str) -> None:
    """A line of text as it is, however long."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def readable(value: Any, indent: str = "") -> str:
    """JSON in which every list or dictionary that fits is on one line."""
    line = json.dumps(value)
    if len(indent + line) <= LETTERS or not isinstance(value, list | tuple | dict):
        return line
    if isinstance(value, dict):
        inner = [f"{json.dumps(key)}: {readable(each, indent + ' ')}" for key, each in value.items()]
    else:
        inner = [readable(each, indent + " ") for each in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{indent} " + f",\n{indent} ".join(inner) + f"\n{indent}{last}"


def write(
    bench: Bench, content: Mapping[str, Any], given: Mapping[str, Any], directory: Path, console: Console
) -> None:
    """Write <name>.json and the bench's picture beside it; with options <name>-<option>.json."""
    directory.mkdir(parents=True, exist_ok=True)
    head = {
        "schema": SCHEMA,
        "bench": bench.name,
        "description": bench.description,
        **({"options": dict(given)} if given else {}),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        **{key: content[key] for key in ("commit", "dirty")},
        "versions": versions("torch", "triton") | {"torch": torch.__version__},
    }
    path = directory / f"{'-'.join([bench.name, *given])}.json"
    path.write_text(readable({**head, **content}) + "\n")
    drawn = None if bench.draw is None else bench.draw(path)
    say(console, f"written: {path}" + ("" if drawn is None else f" and {drawn.name}"))


def execute(
    bench: Bench, options: argparse.Namespace, given: Mapping[str, Any], results: Path, console: Console
) -> int:
    """Gate, measure, report; the exit code. given: the options that make it less than the whole.

    Every rank but one has a quiet console; that one writes the results.
    """
    needed = missing_device(bench.device) if bench.obstacle is None else bench.obstacle()
    if needed is not None:
        say(console, f"{bench.name} needs {needed}: nothing is measured, nothing is written")
        if bench.predict is not None:
            say(console, "\nPREDICTION, not a measurement")
            say(console, f"{bench.predict()}\n{bench.note}")
        return 0
    begun = commit()  # now: somebody may edit or commit while it runs
    kernels = counting() if bench.device == "cuda" else {}
    into: Path | None = options.into
    unwanted = into is None and not given and refused(results, begun)
    if unwanted:
        say(console, f"{bench.name}: {REFUSED}")
    try:
        if bench.check is not None:
            bench.check(bool(given.get("quick")))
    except Exception:
        traceback.print_exc()
        say(console, f"{bench.name}: a result is wrong, so nothing is timed")
        return 1
    try:
        report = bench.run(options)
    except WrongCall as error:
        say(console, f"{bench.name}: {error}")
        return 2
    for table in (*report.tables, bench.note):
        console.print(table, highlight=False, soft_wrap=isinstance(table, str), markup=False)
    unwanted = unwanted or (into is None and not given and refused(results, commit()))
    if unwanted or (given and into is None):
        say(console, f"nothing is written: {REFUSED if unwanted else 'called with an option'}")
    elif not console.quiet:
        note = {"note": bench.note} if bench.note else {}
        directory = into or results / device_directory(bench.device)
        content = {**begun, **note, **({"kernels": dict(kernels)} if kernels else {}), **report.content}
        write(bench, content, given, directory, console)
        if report.files is not None:
            report.files(directory)
    for problem in report.problems or [report.outcome]:
        say(console, f"{bench.name}: {problem}")
    return 1 if report.problems else 0


def main(arguments: Sequence[str], benches: Sequence[Bench], results: Path = RESULTS) -> int:
    """`python -m bench [NAME] [options]`; the exit code: 1 for a wrong result or a missed bar, 2 for a wrong call."""
    first = os.environ.get("RANK", "0") == "0"  # torchrun's variable
    console = Console(width=None if sys.stdout.isatty() else 180, quiet=not first)
    named = {bench.name: bench for bench in benches}
    at = next((index for index, argument in enumerate(arguments) if argument in named), None)
    if at is None:
        parser = argparse.ArgumentParser(prog="python -m bench", description="Time what was first found to be correct.")
        parser.add_argument("name", nargs="?", help="the bench; without it, list them; NAME --help: its options")
        name = parser.parse_args(arguments).name
        for each in benches:
            say(console, f"{each.name:22} {each.description}")
        if name is not None:
            print(f"there is no bench {name!r}", file=sys.stderr)
        return 0 if name is None else 2
    bench, others = named[arguments[at]], [*arguments[:at], *arguments[at + 1 :]]
    parser = argparse.ArgumentParser(prog=f"python -m bench {bench.name}", description=bench.description)
    for name, settings in bench.options.items():
        parser.add_argument(name, **settings)
    where = "write the results into this folder, also those of a part or of a changed tree"
    parser.add_argument("--into", type=Path, metavar="FOLDER", help=where)
    options = parser.parse_args(others)
    given = {
        name: value for name, value in vars(options).items() if name != "into" and value != parser.get_default(name)
    }
    say(console, machine_line())
    return execute(bench, options, given, results, console)

"""The command: it evaluates all cases in worker processes, keeps the rows on disk, prints them, sets the exit code.

Belongs here: nothing that knows a kernel (shipped.py), a rule (rules.py) or the committed page (summary.py).
"""

import argparse
import ast
import functools
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import compiler
from .asked import Asked, digest
from .cases import CAPABILITIES, Case
from .rules import Row, empty_row, judge
from .summary import clean_commit, write_page

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = {  # short names of columns, so that a row fits a line
    "registers": "regs",
    "spills": "spill",
    "shared": "smem",
    "tcgen05": "tcgen",
    "tma_loads": "tma",
    "cp_async": "cp.async",
    "releases": "rel",
    "fences": "fence",
    "acquires": "acq",
    "barriers": "bar",
    "in_flight": "flight",
    "wide_stores": "st 16B",
    "narrow_stores": "narrow",
}


@dataclass(frozen=True)
class Check:
    """What is checked, and where rows and results are kept."""

    cases: str = "checks.compile.shipped:cases"
    """module:function of a function that returns the list of cases. Worker processes call it, too."""
    kernels: Path = ROOT / "kernels"
    """Every jitted function in this folder whose name ends in _kernel needs a case."""
    cache: Path = ROOT / ".compile-cache"
    """The folder of rows that need not be computed again."""
    results: Path = ROOT / "checks" / "results" / "compile.md"


DEFAULT = Check()


@functools.cache
def load_cases(source: str) -> dict[str, Case]:
    """Cases by key, in their order. ValueError if two have one key."""
    module, _, function = source.partition(":")
    found = getattr(importlib.import_module(module), function)()
    by_key = {case.key: case for case in found}
    if len(by_key) < len(found):
        keys = [case.key for case in found]
        raise ValueError(f"cases of one key: {sorted({key for key in keys if keys.count(key) > 1})}")
    return by_key


def work(source: str, key: str) -> Row:
    """In a worker process: evaluate one case."""
    return judge(load_cases(source)[key])


def versions() -> dict[str, str]:
    """Versions of what a kernel's code depends on, by name."""
    import torch
    import triton

    ptxas = {f"ptxas for sm_{capability}": compiler.ptxas_version(capability) for capability in CAPABILITIES}
    return {"torch": torch.__version__, "triton": triton.__version__, **ptxas}


class Cache:
    """Rows on disk, one file per case. A row counts only while its fingerprint is the current one.

    A fingerprint covers the code that the case asks for, this package, the module of the cases, and the compilers.
    """

    def __init__(self, check: Check) -> None:
        self.folder, self.asked = check.cache, Asked(check.kernels)
        module = importlib.import_module(check.cases.partition(":")[0])
        own = {path.resolve() for path in (*Path(__file__).parent.glob("*.py"), Path(str(module.__file__)))}
        self._common = json.dumps(versions()), *(path.read_text() for path in sorted(own))

    def fingerprint(self, case: Case) -> str:
        """The hash of all of that."""
        return digest([*self._common, self.asked.of(case)])

    def path(self, case: Case) -> Path:
        """The file of a case."""
        return self.folder / f"{hashlib.sha256(case.key.encode()).hexdigest()[:24]}.json"

    def get(self, case: Case) -> Row | None:
        """The row of a case, or None if it has to be computed."""
        of = case.key, self.fingerprint(case)
        try:
            content = json.loads(self.path(case).read_text())
            return content["row"] if (content["key"], content["fingerprint"]) == of else None
        except (OSError, ValueError, KeyError):
            return None

    def put(self, case: Case, row: Row) -> None:
        """Keep a row, in place of an older one of the same case."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.path(case).with_suffix(f".{os.getpid()}")
        content = {"key": case.key, "fingerprint": self.fingerprint(case), "row": row}
        temporary.write_text(json.dumps(content))
        temporary.replace(self.path(case))


def compile_all(source: str, keys: Sequence[str], jobs: int) -> Iterator[tuple[str, Row | None]]:
    """Yields (key, row) as rows are ready; the row is None if the compiler ends its process.

    At most `jobs` cases are handed out at once. After a crash these are the suspects, and each runs again alone.
    """
    pending = list(keys)[::-1]
    while pending:
        suspects: list[str] = []
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("forkserver")) as pool:
            running: dict[Future[Row], str] = {}
            while (pending and not suspects) or running:
                while pending and not suspects and len(running) < jobs:
                    key = pending.pop()
                    running[pool.submit(work, source, key)] = key
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    key = running.pop(future)
                    try:
                        yield key, future.result()
                    except BrokenProcessPool:
                        suspects.append(key)
        for key in suspects:
            yield key, alone(source, key) if len(suspects) > 1 else None


def alone(source: str, key: str) -> Row | None:
    """Evaluate one case in a process of its own; None if that process dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        try:
            return pool.submit(work, source, key).result()
        except BrokenProcessPool:
            return None


def crashed(case: Case) -> Row:
    """The row of a case whose process died."""
    return {**empty_row(case), "violations": ["fails: the process died"]}


def evaluate_all(source: str, cache: Cache, cases: dict[str, Case], jobs: int, console: Console) -> dict[str, Row]:
    """Rows by key, in the order of the cases."""
    rows: dict[str, Row] = {key: row for key, case in cases.items() if (row := cache.get(case)) is not None}
    missing = [key for key in cases if key not in rows]
    console.print(f"{len(cases)} cases, {len(missing)} to compile", highlight=False)
    if missing:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("compiling", total=len(missing))
            for key, row in compile_all(source, missing, max(1, min(jobs, len(missing)))):
                if row is not None:
                    cache.put(cases[key], row)
                rows[key] = row or crashed(cases[key])
                progress.advance(task)
    return {key: rows[key] for key in cases}


def uncovered(check: Check, cases: dict[str, Case]) -> list[str]:
    """Violations: one for each kernel that no case compiles."""
    covered = {case.kernel for case in cases.values()}
    missing = []
    for path in sorted(check.kernels.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.name not in covered:
                if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    missing.append(f"no case compiles {node.name} of {path.relative_to(check.kernels.parent)}")
    return missing


def table(rows: Sequence[Row]) -> Table:
    """All rows as they are printed, without the texts of their violations."""
    columns = [column for column in Row.__annotations__ if column != "violations"]
    result = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        text = column in ("kernel", "name", "arch", "dtype", "tile")
        result.add_column(HEADINGS.get(column, column), justify="left" if text else "right", no_wrap=True)
    result.add_column("verdict", no_wrap=True)
    for row in rows:
        cells = ["" if row[column] is None else str(row[column]) for column in columns]  # type: ignore[literal-required]
        result.add_row(*cells, "WRONG" if row["violations"] else "ok")
    return result


def share(text: str) -> tuple[int, int]:
    """(K, N) of "K/N", with K < N."""
    first, _, step = text.partition("/")
    if int(first) not in range(int(step)):
        raise ValueError(f"{text} is no share such as 0/3, 1/3 or 2/3")
    return int(first), int(step)


def main(arguments: Sequence[str], check: Check = DEFAULT) -> int:
    """`python -m checks.compile [--only PATTERN] [--share K/N] [--without RULE] [--jobs N]`.

    The exit code: 1 for a violation, 2 for a wrong call.
    """
    parser = argparse.ArgumentParser(prog="python -m checks.compile", description=sys.modules[__package__].__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="cases whose key this regular expression is found in")
    parser.add_argument(
        "--share", metavar="K/N", type=share, default=(0, 1), help="every N-th of these, from number K on"
    )
    parser.add_argument(
        "--without", metavar="RULE", action="append", default=[], help="a rule that need not hold (for another triton)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (2)")
    options = parser.parse_args(arguments)
    if reason := compiler.unavailable():
        print(reason, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 200)
    every = load_cases(check.cases)
    cases = {key: case for key, case in every.items() if re.search(options.only or "", key)}
    first, step = options.share
    cases = dict(itertools.islice(cases.items(), first, None, step))
    if not cases:
        print(f"no case matches {options.only!r}" if options.only else "there are no cases", file=sys.stderr)
        return 2
    commit, obstacle = clean_commit(check.results.parent)  # now: somebody may edit or commit while it compiles
    cache = Cache(check)
    rows = evaluate_all(check.cases, cache, cases, options.jobs, console)
    for row in rows.values():
        row["violations"] = [each for each in row["violations"] if each.partition(":")[0] not in options.without]
    console.print(table(list(rows.values())), highlight=False)
    wrong = [f"{key}: {violation}" for key, row in rows.items() for violation in row["violations"]]
    if not (options.only or options.without) and step == 1:
        wrong += uncovered(check, every)
        refusal = f"{check.results} is not written: {obstacle}"
        kept = list(rows.values()), cache.asked.of_all(cases), versions()
        done = write_page(check.results, commit, *kept) if commit else refusal
        console.print(done, highlight=False, soft_wrap=True, markup=False)
    for violation in wrong:
        console.print(violation, highlight=False, soft_wrap=True, markup=False)
    console.print(f"{len(rows)} cases, {len(wrong)} violations", highlight=False)
    return 1 if wrong else 0

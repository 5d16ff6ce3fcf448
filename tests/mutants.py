"""`make mutations`: tries a fixed sample of wrong edits of tpformer/ and kernels/ against the tests that reach them.

Belongs here: which edits there are, which are drawn, how one is tried, the table. A mutant is killed when a test fails.
If it survives, no test asks the question, or the edit changes nothing. In a clone with the edit tests/changed.py finds
the tests and runs them, by the record of `make coverage`; the table goes to build/mutations.json.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import pytest
from changed import git
from reach import RECORD, ROOT

SEED, COUNT = 20261122, 240
SECONDS = 60.0  # of tests, as recorded, that are tried at most: the nearest, and of those the shortest first
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}


class Mutant(NamedTuple):
    """Replace `before`, at this place of a file, by `after`."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    before: str
    after: str


class Outcome(NamedTuple):
    mutant: Mutant
    killed_by: str  # the first test that failed; empty if the mutant survived
    reached: str  # how many tests reach it, in words
    seconds: float


def edits(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (kind, what is replaced, by what) for one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield "comparison", node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "operator", node, f"({ast.unparse(node.left)} {ARITHMETIC[type(node.op)]} {ast.unparse(node.right)})"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield "operator", node, f"({other.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", node, f"({node.value!r} + 1)"
    elif isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "statement", node, "pass"


def skipped(tree: ast.AST) -> set[ast.AST]:
    """The nodes in which an edit changes nothing that runs: annotations, and f-strings, which are messages."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        string = node if isinstance(node, ast.JoinedStr) else None
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None), string):
            found.update(ast.walk(part) if part is not None else ())
    return found


def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_text()
    offsets = [0]
    for line in text.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    tree, found = ast.parse(text), []
    left_out = skipped(tree)
    for kind, place, after in (each for node in ast.walk(tree) if node not in left_out for each in edits(node)):
        start = offsets[place.lineno - 1] + place.col_offset  # type: ignore[attr-defined]
        end = offsets[place.end_lineno - 1] + place.end_col_offset  # type: ignore[attr-defined]
        before = text.encode()[start:end].decode()
        found.append(Mutant(file, place.lineno, start, end, kind, before, after))  # type: ignore[attr-defined]
    return found


def try_mutant(clone: Path, mutant: Mutant) -> Outcome:
    """Have the tests that it reaches run in a clone, the nearest first, to the first that fails."""
    began, path = time.monotonic(), clone / mutant.file
    options = {"PYTHONPATH": str(clone), "PYTHONUNBUFFERED": "1", "PYTEST_ADDOPTS": "-x --timeout=120"}
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        command = [sys.executable, "tests/changed.py", "--seconds", str(SECONDS)]
        done = subprocess.run(command, cwd=clone, env=os.environ | options, capture_output=True, text=True)
    finally:
        path.write_bytes(original)
    reached, *lines = done.stdout.splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    survived = done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    killer = "" if survived else next(iter(failed), f"pytest ended with {done.returncode}")
    return Outcome(mutant, killer, reached, time.monotonic() - began)


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw from all lines of tpformer/ and kernels/, whether a test runs them or not.

    An edit is drawn by a hash of itself: a change of the library changes only what is drawn from the lines it changes.
    """
    candidates: dict[int, Mutant] = {}
    for file in sorted(git("ls-files", "tpformer/*.py", "kernels/*.py").split()):
        text = (ROOT / file).read_text().splitlines()
        for mutant in mutants_of(file):
            line = text[mutant.line - 1]
            candidates[zlib.crc32(f"{seed} {file} {line} {mutant.before} {mutant.after}".encode())] = mutant
    return [candidates[key] for key in sorted(candidates)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not RECORD.exists():
        sys.exit(f"{RECORD} does not exist: run `make coverage` first")
    folder = ROOT / "build" / "mutants"
    clones: Queue[Path] = Queue()
    for number in range(options.jobs):
        shutil.rmtree(folder / str(number), ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / str(number)], check=True)
        shutil.copy(RECORD, folder / str(number) / RECORD.relative_to(ROOT))
        clones.put(folder / str(number))

    def attempt(mutant: Mutant) -> Outcome:
        clone = clones.get()
        try:
            return try_mutant(clone, mutant)
        finally:
            clones.put(clone)

    outcomes = []
    with ThreadPoolExecutor(options.jobs) as executor:
        for outcome in executor.map(attempt, draw(options.count, options.seed)):
            mutant = outcome.mutant
            verdict = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED, {outcome.reached}"
            what = f"{mutant.kind} {mutant.before!r} -> {mutant.after!r}"
            print(f"{mutant.file}:{mutant.line} {what}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    survivors = [outcome for outcome in outcomes if not outcome.killed_by]
    print(f"{len(outcomes)} mutants, {len(outcomes) - len(survivors)} killed, {len(survivors)} survived")
    rows = [{**outcome._asdict(), "mutant": outcome.mutant._asdict()} for outcome in outcomes]
    (ROOT / "build" / "mutations.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

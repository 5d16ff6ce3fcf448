"""`make mutations`: tries a fixed sample of wrong edits of tpformer/ against the tests that reach them.

Belongs here: which edits there are, which are drawn, how one is tried, the table. A mutant is killed when a test fails.
If it survives, no test asks the question, or the edit changes nothing. `make coverage` records which tests run a line;
the table goes to build/mutations.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = ROOT / "build" / "coverage" / "data"
SEED, COUNT = 20261122, 60
FIRST_TESTS = 40  # so many, those nearest to the file, are tried before the rest
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//"}


class Mutant(NamedTuple):
    """Replace `before`, at this place of a file, by `after`."""

    file: str
    line: int
    statement: int
    """First line of the innermost statement, by which coverage may know a statement of several lines."""
    start: int
    end: int
    kind: str
    before: str
    after: str


class Outcome(NamedTuple):
    mutant: Mutant
    killed_by: str
    """The first test that failed; empty if the mutant survived."""
    tests: int
    """How many tests reach it."""
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
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement", node, "pass"
    elif isinstance(node, ast.AugAssign | ast.Raise):
        yield "statement", node, "pass"


def skipped(tree: ast.AST) -> set[ast.AST]:
    """The nodes in which an edit changes nothing that runs: annotations, and f-strings, which are messages."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if part is not None:
                found |= set(ast.walk(part))
        if isinstance(node, ast.JoinedStr):
            found |= set(ast.walk(node))
    return found


def mutants_of(file: str) -> list[Mutant]:
    text = (ROOT / file).read_text()
    offsets = [0]
    for line in text.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    tree, found = ast.parse(text), []
    left_out = skipped(tree)
    statements: dict[ast.AST, int] = {}  # ast.walk comes to a statement after those around it
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            statements.update(dict.fromkeys(ast.walk(statement), statement.lineno))
    for node in ast.walk(tree):
        if node in left_out:
            continue
        for kind, place, after in edits(node):
            start = offsets[place.lineno - 1] + place.col_offset  # type: ignore[attr-defined]
            end = offsets[place.end_lineno - 1] + place.end_col_offset  # type: ignore[attr-defined]
            lines = (place.lineno, statements[node])  # type: ignore[attr-defined]
            found.append(Mutant(file, *lines, start, end, kind, text.encode()[start:end].decode(), after))
    return found


def test_name(context: str) -> str:
    """The test in pytest-cov's "name|run" or PYTEST_CURRENT_TEST's "name (call)"; "" where a module was imported."""
    names = [part.rsplit(" (", 1)[0] for part in context.split("|") if "::" in part]
    return names[-1] if names else ""


def read_reach() -> dict[str, dict[int, set[str]]]:
    """file -> line -> the tests that run it; "" stands for an import."""
    reach: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    with sqlite3.connect(COVERAGE) as data:
        rows = data.execute(
            "select file.path, context.context, arc.fromno, arc.tono from arc"
            " join file on file.id = arc.file_id join context on context.id = arc.context_id"
        )
        for path, context, _, line in rows:
            if line > 0:
                reach[os.path.relpath(path, ROOT)][line].add(test_name(context))
        for path, context, bits in data.execute(
            "select file.path, context.context, line_bits.numbits from line_bits"
            " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
        ):
            for line in numbits_to_nums(bits):
                reach[os.path.relpath(path, ROOT)][line].add(test_name(context))
    return reach


def tests_of(mutant: Mutant, reach: dict[str, dict[int, set[str]]]) -> list[str]:
    """The tests that run the mutant's line, nearest first; if the line runs at imports, those that run its file."""
    lines = reach[mutant.file]
    tests = {test for test in lines.get(mutant.line) or lines.get(mutant.statement, ()) if test}
    if not tests and mutant.statement in lines:
        tests = {test for line in lines.values() for test in line if test}
    folder, stem = Path(mutant.file).parent.name, Path(mutant.file).stem

    def distance(test: str) -> tuple[bool, bool, str]:
        path = Path(test.split("::")[0])
        return stem not in path.stem, folder not in path.parts, test

    return sorted(tests, key=distance)


def run_tests(clone: Path, tests: list[str]) -> str:
    """Return the first of these tests that fails in a clone, or ""."""
    environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    arguments = clone / "tests.txt"
    arguments.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=120", f"@{arguments}"]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    if done.returncode in (0, 5):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {done.returncode}"


def try_mutant(clone: Path, mutant: Mutant, tests: list[str]) -> Outcome:
    began, path = time.monotonic(), clone / mutant.file
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        killer = run_tests(clone, tests[:FIRST_TESTS]) if tests else ""
        if not killer and len(tests) > FIRST_TESTS:
            killer = run_tests(clone, tests[FIRST_TESTS:])
    finally:
        path.write_bytes(original)
    return Outcome(mutant, killer, len(tests), time.monotonic() - began)


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw from all lines of tpformer/, whether a test runs them or not."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tpformer").rglob("*.py"))
    candidates = [mutant for file in files for mutant in mutants_of(file)]
    return random.Random(seed).sample(candidates, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if not COVERAGE.exists():
        sys.exit(f"{COVERAGE} does not exist: run `make coverage` first")
    reach = read_reach()
    mutants = draw(options.count, options.seed)
    folder = ROOT / "build" / "mutants"
    clones: Queue[Path] = Queue()
    for number in range(options.jobs):
        shutil.rmtree(folder / str(number), ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / str(number)], check=True)
        clones.put(folder / str(number))

    def attempt(mutant: Mutant) -> Outcome:
        clone = clones.get()
        try:
            return try_mutant(clone, mutant, tests_of(mutant, reach))
        finally:
            clones.put(clone)

    outcomes = []
    with ThreadPoolExecutor(options.jobs) as executor:
        for outcome in executor.map(attempt, mutants):
            mutant = outcome.mutant
            verdict = f"killed by {outcome.killed_by}" if outcome.killed_by else f"SURVIVED {outcome.tests} tests"
            what = f"{mutant.kind} {mutant.before!r} -> {mutant.after!r}"
            print(f"{mutant.file}:{mutant.line} {what}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    survivors = [outcome for outcome in outcomes if not outcome.killed_by]
    print(f"{len(outcomes)} mutants, {len(outcomes) - len(survivors)} killed, {len(survivors)} survived")
    rows = [{**outcome._asdict(), "mutant": outcome.mutant._asdict()} for outcome in outcomes]
    (ROOT / "build" / "mutations.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

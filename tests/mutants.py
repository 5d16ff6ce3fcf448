"""`make mutations`: tries a fixed sample of wrong edits of tpformer/ and kernels/ against the tests that reach them.

Belongs here: which edits there are, which are drawn, how one is tried, the table. A mutant is killed when a test fails.
If it survives, no test asks the question, or the edit changes nothing. `make coverage` records which tests run a line;
the table goes to build/mutations.json. Tests run in forks of a process that has imported all but the project.
"""

from __future__ import annotations

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
from changed import importers, module_of, nearest_first, within
from conftest import HUGGING_FACE
from pool import Server
from reach import COVERAGE, ROOT, Reach, read_lines, read_seconds

SEED, COUNT = 20261122, 240
SECONDS = 60.0  # of tests, as recorded, that are tried at most: the nearest, and of those the shortest first
# what the forks of a server have imported: everything large that is no part of the project
PRELOAD = [
    "pytest",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    *HUGGING_FACE,
]
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


def tests_of(mutant: Mutant, reach: dict[str, dict[int, set[str]]]) -> list[str]:
    """The tests that run the mutant's line; if the line runs at imports, those that run its file."""
    lines = reach[mutant.file]
    tests = {test for test in lines.get(mutant.line) or lines.get(mutant.statement, ()) if test}
    if not tests and mutant.statement in lines:
        tests = {test for line in lines.values() for test in line if test}
    return sorted({test.split("[")[0] for test in tests})


def fork(clone: str, arguments: list[str], output: str) -> None:
    """In a process of its own: run pytest in a clone. Its exit code is pytest's."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(clone)
    os.environ.update(PYTHONPATH=clone, OMP_NUM_THREADS="1")
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    sys.path[:] = [clone, *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", ""))
        if file.startswith(str(ROOT)) and "site-packages" not in file and name != __name__:
            del sys.modules[name]  # the clone has its own
    sys.exit(int(pytest.main(arguments)))


def run_tests(server: Server, clone: Path, tests: list[str]) -> str:
    """Return the first of these tests that fails in a clone, or ""."""
    output = clone / "output.txt"
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=120", "--rootdir", str(clone)]
    process = server.start(fork, str(clone), [*options, *tests], str(output), daemon=False)
    process.join()
    if process.exitcode in (0, 5):
        return ""
    failed = [line for line in output.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {process.exitcode}"


def try_mutant(server: Server, clone: Path, mutant: Mutant, tests: list[str], reach: Reach) -> Outcome:
    """Try the nearest tests. Nothing records who reaches a kernel: the test files that import it are tried."""
    began, path = time.monotonic(), clone / mutant.file
    tests = tests or sorted(importers(module_of(mutant.file)))
    chosen = within(nearest_first(tests, [mutant.file], reach), reach, SECONDS)
    original = path.read_bytes()
    path.write_bytes(original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    try:
        killer = run_tests(server, clone, chosen) if chosen else ""
    finally:
        path.write_bytes(original)
    return Outcome(mutant, killer, len(tests), time.monotonic() - began)


def draw(count: int, seed: int) -> list[Mutant]:
    """Draw from all lines of tpformer/ and kernels/, whether a test runs them or not.

    An edit is drawn by a hash of itself: a change of the library changes only what is drawn from the lines it changes.
    """
    files = [
        path for folder in ("tpformer", "kernels") for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()
    ]
    candidates: dict[int, Mutant] = {}
    for file in sorted({str(path.resolve().relative_to(ROOT)) for path in files}):
        text = (ROOT / file).read_text().splitlines()
        for mutant in mutants_of(file):
            line = text[mutant.line - 1]
            candidates[zlib.crc32(f"{seed} {file} {line} {mutant.before} {mutant.after}".encode())] = mutant
    return [candidates[key] for key in sorted(candidates)[:count]]


def survivors_of(report: Path, mutants: list[Mutant]) -> list[Mutant]:
    """Those of the mutants that survived when the report was written, perhaps of another version of the library."""

    def edit(file: str, kind: str, before: str, after: str, **_: object) -> tuple[str, ...]:
        return file, kind, before, after

    survived = {edit(**row["mutant"]) for row in json.loads(report.read_text()) if not row["killed_by"]}
    return [mutant for mutant in mutants if edit(**mutant._asdict()) in survived]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--survivors", type=Path, help="only those that survived in this report, a mutations.json")
    options = parser.parse_args()
    if not COVERAGE.exists():
        sys.exit(f"{COVERAGE} does not exist: run `make coverage` first")
    lines, reach = read_lines(), Reach(read_seconds(), {})
    server = Server({}, PRELOAD)
    mutants = draw(options.count, options.seed)
    if options.survivors:
        mutants = survivors_of(options.survivors, mutants)
    folder = ROOT / "build" / "mutants"
    clones: Queue[Path] = Queue()
    for number in range(options.jobs):
        shutil.rmtree(folder / str(number), ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / str(number)], check=True)
        clones.put(folder / str(number))

    def attempt(mutant: Mutant) -> Outcome:
        clone = clones.get()
        try:
            return try_mutant(server, clone, mutant, tests_of(mutant, lines), reach)
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

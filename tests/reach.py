"""Which tests run which code: read from what `make coverage` recorded, and kept in a file beside this one.

Belongs here: lines of coverage's database, functions of the kept record. tests/mutants.py and tests/changed.py ask.
`make coverage` keeps the record; it knows functions by name, so it stays useful while lines move.
"""

from __future__ import annotations

import ast
import base64
import gzip
import json
import os
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = ROOT / "build" / "coverage" / "data"
DURATIONS = ROOT / "build" / "coverage" / "tests.xml"
RECORD = ROOT / "tests" / "reach.gz"
IMPORTED = ""  # in the place of a test: a line that runs when its module is imported


def test_name(context: str) -> str:
    """The test in pytest-cov's "name|run" or PYTEST_CURRENT_TEST's "name (call)"; "" where a module was imported."""
    names = [part.rsplit(" (", 1)[0] for part in context.split("|") if "::" in part]
    return names[-1] if names else IMPORTED


def read_lines() -> dict[str, dict[int, set[str]]]:
    """file -> line -> the tests that run it, with their parameters."""
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


def functions_of(source: str) -> dict[int, str]:
    """line -> "function" or "Class.method" around it. Nested functions belong to the outermost; other lines have none.

    A decorator's and a default's lines are the function's, though they run when the module is imported.
    """
    found: dict[int, str] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found.update(dict.fromkeys(range(first, (child.end_lineno or first) + 1), prefix + child.name))
            else:
                walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    walk(ast.parse(source), "")
    return found


class Reach(NamedTuple):
    """The kept record. Tests are functions: "tests/test_changed.py::test_what_a_change_reaches", without cases."""

    seconds: dict[str, float]
    """How long all cases of a test function took, two tests at a time."""
    functions: dict[str, set[str]]
    """"file::function" -> the tests that run it."""

    def of_file(self, file: str) -> set[str]:
        """The tests that run any function of a file."""
        return set().union(*(tests for name, tests in self.functions.items() if name.split("::")[0] == file))


def record() -> Reach:
    """Condense coverage's database."""
    functions: dict[str, set[str]] = defaultdict(set)
    for file, lines in read_lines().items():
        names = functions_of((ROOT / file).read_text())
        for line, tests in lines.items():
            if line in names:
                functions[f"{file}::{names[line]}"] |= {test.split("[")[0] for test in tests if test != IMPORTED}
    return Reach(read_seconds(), {name: tests for name, tests in functions.items() if tests})


def read_seconds() -> dict[str, float]:
    """The seconds of each test function in pytest's JUnit file."""
    from xml.etree import ElementTree

    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(DURATIONS).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
        seconds[name] += float(case.get("time", 0))
    return seconds


def keep(reach: Reach) -> None:
    """Write the record: names in order, and one bit for each pair of a function and a test."""
    tests, functions = sorted(set(reach.seconds).union(*reach.functions.values())), sorted(reach.functions)
    places = {test: place for place, test in enumerate(tests)}
    bits = np.zeros((len(functions), len(tests)), bool)
    for row, function in enumerate(functions):
        bits[row, [places[test] for test in reach.functions[function]]] = True
    content = {
        "seconds": {test: round(reach.seconds.get(test, 0.0), 1) for test in tests},
        "functions": functions,
        "bits": base64.b64encode(np.packbits(bits).tobytes()).decode(),
    }
    RECORD.write_bytes(gzip.compress(json.dumps(content).encode(), 9, mtime=0))


def load() -> Reach:
    """Read the record; where there is none yet, nothing is known."""
    if not RECORD.exists():
        return Reach({}, {})
    content = json.loads(gzip.decompress(RECORD.read_bytes()))
    tests, functions = list(content["seconds"]), content["functions"]
    packed = np.frombuffer(base64.b64decode(content["bits"]), np.uint8)
    bits = np.unpackbits(packed, count=len(functions) * len(tests)).reshape(len(functions), len(tests))
    reached = {name: {tests[i] for i in np.flatnonzero(row)} for name, row in zip(functions, bits, strict=True)}
    return Reach(content["seconds"], reached)


if __name__ == "__main__":
    if not COVERAGE.exists():
        sys.exit(f"{COVERAGE} does not exist: run `make coverage`")
    keep(record())
    print(f"{RECORD.relative_to(ROOT)}: {RECORD.stat().st_size} bytes")

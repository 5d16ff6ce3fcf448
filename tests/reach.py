"""Which tests run which code: read from what `make coverage` recorded, and kept in a file beside this one.

Belongs here: what coverage's database says of functions, and the kept record, which tests/changed.py asks.
`make coverage` keeps the record; it knows functions by name, so it stays useful while lines move.
"""

import ast
import gzip
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = ROOT / "build" / "coverage" / "data"
DURATIONS = ROOT / "build" / "coverage" / "tests.xml"
RECORD = ROOT / "tests" / "reach.gz"
IMPORTED = ""  # in the place of a test: a line that runs when its module is imported


def test_name(context: str) -> str:
    """The test in pytest-cov's "name|run" or PYTEST_CURRENT_TEST's "name (call)"; "" where a module was imported."""
    names = [part.rsplit(" (", 1)[0] for part in context.split("|") if "::" in part]
    return names[-1] if names else IMPORTED


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

    seconds: dict[str, float]  # of all cases of a test, two tests at a time
    functions: dict[str, set[str]]  # "file::function" -> the tests that run it

    def of_file(self, file: str) -> set[str]:
        """The tests that run any function of a file."""
        return set().union(*(tests for name, tests in self.functions.items() if name.split("::")[0] == file))


def record() -> Reach:
    """Condense coverage's database, and the seconds of pytest's JUnit file."""
    functions: dict[str, set[str]] = defaultdict(set)
    data = CoverageData(str(COVERAGE))
    data.read()
    for path in data.measured_files():
        names = functions_of(Path(path).read_text())
        for line, contexts in data.contexts_by_lineno(path).items():
            if line in names:
                tests = {test_name(context).split("[")[0] for context in contexts} - {IMPORTED}
                functions[f"{os.path.relpath(path, ROOT)}::{names[line]}"] |= tests
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(DURATIONS).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
        seconds[name] += float(case.get("time", 0))
    return Reach(seconds, {name: tests for name, tests in functions.items() if tests})


def keep(reach: Reach) -> None:
    """Write the record, which names each test once, and then by its place."""
    tests = sorted(set(reach.seconds).union(*reach.functions.values()))
    places = {test: place for place, test in enumerate(tests)}
    content = {
        "seconds": {test: round(reach.seconds.get(test, 0.0), 1) for test in tests},
        "functions": {name: sorted(places[test] for test in reached) for name, reached in reach.functions.items()},
    }
    RECORD.write_bytes(gzip.compress(json.dumps(content).encode(), 9, mtime=0))


def load() -> Reach:
    """Read the record; where there is none yet, nothing is known."""
    if not RECORD.exists():
        return Reach({}, {})
    content = json.loads(gzip.decompress(RECORD.read_bytes()))
    tests = list(content["seconds"])
    functions = {name: {tests[place] for place in places} for name, places in content["functions"].items()}
    return Reach(content["seconds"], functions)


if __name__ == "__main__":
    if not COVERAGE.exists():
        sys.exit(f"{COVERAGE} does not exist: run `make coverage`")
    keep(record())
    print(f"{RECORD.relative_to(ROOT)}: {RECORD.stat().st_size} bytes")

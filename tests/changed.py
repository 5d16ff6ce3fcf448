"""`make test-changed`: the tests that the changes of this working copy reach, nearest first.

Belongs here: from changed lines to tests. What a test runs is recorded (tests/reach.py); what the record cannot know is
taken from the tree: a new file runs the tests of its folder, a changed helper the test files that import it.
"""

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from reach import RECORD, ROOT, Reach, functions_of, load

# a change of these may change any test
EVERYTHING = re.compile(r"tests/(conftest|pool|commands|versions)\.py|pyproject\.toml|constraints\.txt|Makefile")
PROSE = ("tests/test_prose.py", "tests/test_docs.py", "tests/test_readme.py", "tests/test_repo.py")


class Change(NamedTuple):
    """A changed file, and the text it had. A new file had none."""

    file: str
    before: str | None


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def changes(base: str) -> list[Change]:
    """What differs from a commit, with files that git does not know yet."""
    found, names = [], git("diff", "--name-only", "--no-renames", "-z", base)
    for name in dict.fromkeys((names + git("ls-files", "--others", "--exclude-standard", "-z")).split("\0")):
        if not name or name.endswith(RECORD.name):
            continue
        known = subprocess.run(["git", "show", f"{base}:{name}"], cwd=ROOT, capture_output=True)
        found.append(Change(name, known.stdout.decode(errors="replace") if known.returncode == 0 else None))
    return found


def importers(modules: set[str]) -> set[str]:
    """The test files that import a module of these names, also by way of other helpers of tests/."""
    helpers = {path: imported(path) for path in (ROOT / "tests").rglob("*.py")}
    wanted, found = set(modules), set()
    while more := {path for path, names in helpers.items() if names & wanted} - found:
        found |= more
        wanted |= {path.stem for path in more}
    return {str(path.relative_to(ROOT)) for path in found if path.name.startswith("test_")}


def by_users(file: str) -> set[str]:
    """The test files that import an operation of kernels/ which uses a file: its reference, to which they compare."""
    folders = [(ROOT / user).parent for user in users(file)]
    siblings = [path for folder in folders if folder != ROOT / "kernels" for path in folder.glob("*.py")]
    return importers({module_of(file), *(module_of(str(path.relative_to(ROOT))) for path in siblings)})


def users(file: str) -> set[str]:
    """A file of kernels/ and all others there that import it, also by way of others.

    Triton runs a jitted function by itself, so that coverage sees only those that launch it, in one of these files.
    """
    found, imports = {file}, {path: kernels_imported(path) for path in (ROOT / "kernels").rglob("*.py")}
    while more := {str(path.relative_to(ROOT)) for path, names in imports.items() if names & found} - found:
        found |= more
    return found


def kernels_imported(path: Path) -> set[str]:
    """The files that a file of kernels/ may import by `from ..rows import load_row` or `from . import reference`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.relative_to(ROOT).parents[node.level - 1]
            names = [node.module.replace(".", "/")] if node.module else [alias.name for alias in node.names]
            found |= {f"{folder / name}.py" for name in names}
    return found


@functools.cache
def imported(path: Path) -> set[str]:
    """Names of modules that a file imports, whole and without what they are imported from."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_of(file: str) -> str:
    """The name by which a file is imported."""
    name = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    return f"tpformer.{name}" if file.startswith("kernels/") else name


def folder_of(file: str) -> set[str]:
    """The test files of the folder that mirrors a file's: tests/ops for tpformer/ops/transports/fused.py."""
    parts = [part for part in Path(file).parts[:-1] if part != "tpformer"]
    folders = [ROOT / "tests" / part for part in reversed(parts) if (ROOT / "tests" / part).is_dir()]
    return {str(path.relative_to(ROOT)) for folder in folders[:1] for path in folder.rglob("test_*.py")}


def reached(change: Change, reach: Reach) -> set[str]:
    """Tests, or whole test files, that a change reaches."""
    path = Path(change.file)
    if EVERYTHING.fullmatch(change.file):
        return {"tests"}
    if path.suffix != ".py":
        return set(PROSE)
    if path.parts[0] == "tests":
        return {change.file} if path.name.startswith("test_") else importers({path.stem})
    importing = by_users(change.file) if path.parts[0] == "kernels" else importers({module_of(change.file)})
    known = reach.of_file(change.file)
    if change.before is None or not known:  # new, or what coverage does not see: a kernel, a bench, a check
        return importing | (folder_of(change.file) if change.before is None or not importing else set())
    unknown = importing - {test.split("::")[0] for test in reach.seconds}  # test files that are newer than the record
    before, now = (code_of(text) for text in (change.before, (ROOT / path).read_text() if exists(change.file) else ""))
    names = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    if None in names:  # a line outside of functions, which may matter to any of them
        return known | unknown
    if any(line.startswith("@triton.jit") for name in names for line in before.get(name, []) + now.get(name, [])):
        return unknown.union(by_users(change.file), *(reach.of_file(user) for user in users(change.file)))
    return unknown.union(*(reach.functions.get(f"{change.file}::{name}", set()) for name in names))


def exists(test: str) -> bool:
    """Whether a file, or a test function in it, is still there: the record may be older."""
    file, _, function = test.partition("::")
    path = ROOT / file
    return path.exists() and (not function or re.search(rf"def {function}\b", path.read_text()) is not None)


def code_of(source: str) -> dict[str | None, list[str]]:
    """The lines of each function, and of None those outside of any, but for blank ones and comments."""
    functions, found = functions_of(source), defaultdict(list)
    for number, line in enumerate(source.splitlines(), 1):
        if re.match(r"\s*[^\s#]", line):
            found[functions.get(number)].append(line)
    return found


def nearest_first(tests: Iterable[str], files: Iterable[str], reach: Reach) -> list[str]:
    """Those in a changed file's own test file, those of its folder, then others; of each kind the shortest first."""
    stems = {Path(file).parent.name if Path(file).stem == "kernel" else Path(file).stem for file in files}
    folders = {part for file in files for part in Path(file).parts[:-1]}

    def distance(test: str) -> tuple[bool, bool, float, str]:
        path = Path(test.split("::")[0])
        own = any(stem in path.stem for stem in stems) or str(path) in files
        return not own, not folders & set(path.parts[1:]), reach.seconds.get(test, 0.0), test

    return sorted(tests, key=distance)


def within(tests: list[str], reach: Reach, seconds: float) -> list[str]:
    """The first of these that take no longer together, at least one. A whole file counts its recorded tests."""
    taken, total = [], 0.0
    for test in tests:
        total += sum(value for name, value in reach.seconds.items() if name == test or name.startswith(f"{test}::"))
        if taken and total > seconds:
            break
        taken.append(test)
    return taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests; the exit code is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD", help="the commit that the working copy is compared with (HEAD)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, as recorded, that are run at most (60)")
    parser.add_argument("--list", action="store_true", help="print the tests, and run none")
    options = parser.parse_args(arguments)
    found, reach = changes(options.base), load()
    if not reach.functions:
        print("nothing is recorded yet, so tests are chosen by imports and folders: `make coverage` records")
    tests: set[str] = set().union(*(reached(change, reach) for change in found))
    tests = {test for test in tests if exists(test) and ("::" not in test or test.split("::")[0] not in tests)}
    if not tests:
        print(f"no test reaches {len(found)} changed files")
        return 0
    ordered = nearest_first(tests, [change.file for change in found], reach)
    chosen = within(ordered, reach, options.seconds)
    print(f"{len(found)} changed files reach {len(ordered)} tests", end="")
    print(f"; the nearest {len(chosen)} run, about {options.seconds:.0f} s" if len(chosen) < len(ordered) else "")
    if options.list:
        print("\n".join(chosen))
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

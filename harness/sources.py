"""Which files a result depends on: those that globs name, and what kernels among them import of one another."""

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from . import provenance

KERNELS = "kernels"


@functools.cache  # many results depend on the same kernels
def imports(text: str) -> list[tuple[int, str, list[str]]]:
    """(dots, module, names) of each relative import of a source."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level)
    return [(node.level, node.module or "", [alias.name for alias in node.names]) for node in nodes]


def imported(path: Path, root: Path) -> set[Path]:
    """The files of kernels/ that one of them imports. A name may be a module, or something in one."""
    found = set()
    for dots, module, names in imports(path.read_text()):
        base = path.parents[dots - 1].joinpath(*module.split("."))
        found |= {base.with_suffix(".py"), *(base / f"{name}.py" for name in names)}
    return {each for each in found if each.is_file() and each.is_relative_to(root / KERNELS)}


def reached(begin: Iterable[Path], following: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """These files, those that follow each of them, and so on."""
    found: set[Path] = set()
    new = set(begin)
    while new:
        found |= new
        new = {each for path in new for each in following(path)} - found
    return found


def files(patterns: Iterable[str]) -> list[str]:
    """The files that these globs name, and all that those of kernels/ import, as paths in the repository."""
    root = provenance.ROOT
    named = {path for pattern in patterns for path in root.glob(pattern)}
    found = reached(named, lambda path: imported(path, root) if path.is_relative_to(root / KERNELS) else ())
    return sorted(str(path.relative_to(root)) for path in found)

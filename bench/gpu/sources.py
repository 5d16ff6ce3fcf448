"""Which files an item's result depends on.

Belongs here: what kernels import of one another, so that an item names its operations alone. Other files it names.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

from .. import provenance

KERNELS = "kernels"


def imported(path: Path, root: Path) -> set[Path]:
    """The files of kernels/ that one of them imports. A name may be a module, or something in one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            found |= {base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)}
    return {each for each in found if each.is_file() and each.is_relative_to(root / KERNELS)}


def files(patterns: Iterable[str]) -> list[str]:
    """The files that these globs name, and all that those of kernels/ import, as paths in the repository."""
    root = provenance.ROOT
    found: set[Path] = set()
    new = {path for pattern in patterns for path in root.glob(pattern)}
    while new:
        found |= new
        inner = (path for path in new if path.is_relative_to(root / KERNELS))
        new = {each for path in inner for each in imported(path, root)} - found
    return sorted(str(path.relative_to(root)) for path in found)

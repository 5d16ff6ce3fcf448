"""The default corpus: which files of Python's own standard library it has, and which of them validate.

Only lists of paths belong here; build.py turns files into tokens.
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})

# The salt is hashed in front of every name. Without it, the one large file of English prose (pydoc_data/topics.py,
# 757 kB) would be most of the validation set.
_SPLIT_SALT = "validation:"


def stdlib_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Every .py file of the standard library outside its tests and installed packages, sorted by relative name."""
    root = stdlib_root()
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]  # prunes the walk
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def split_files(
    files: Sequence[Path], *, root: Path, validation_fraction: float = 0.05
) -> tuple[list[Path], list[Path]]:
    """Training and validation files, each in the order given; about validation_fraction of them validate.

    A file's side depends only on its own name relative to `root`, so adding or removing a file moves no other.
    Raises ValueError unless 0 < validation_fraction < 1, or when a file is not under root.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must lie strictly between 0 and 1, got {validation_fraction}")
    train: list[Path] = []
    valid: list[Path] = []
    for path in files:
        digest = hashlib.sha256(f"{_SPLIT_SALT}{path.relative_to(root).as_posix()}".encode()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64
        (valid if position < validation_fraction else train).append(path)
    return train, valid

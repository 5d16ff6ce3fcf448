"""Paths that a command is to write, checked before it works. Nothing here imports torch."""

from pathlib import Path


def named(option: str, path: str) -> Path:
    """The path of something new in a folder. ValueError for an empty one, and for one that names a folder."""
    if not path.strip():
        raise ValueError(f"{option} is empty: give it a path")
    if path.endswith("/") or Path(path).name in ("", "..") or Path(path).is_dir():
        folder = path.rstrip("/") or "/"
        raise ValueError(f"{option} {path} is a folder: add a name, such as {option} {folder}/NAME")
    return Path(path)


def new_file(option: str, path: str) -> Path:
    """The path of a file that a command is to make. ValueError unless it is new, in a folder that exists."""
    found = named(option, path)
    if found.exists() or not found.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: give a new file in a folder that exists")
    return found

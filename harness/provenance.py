"""Which commit, sources, versions and device a results file belongs to, and in which folder it is.

Belongs here: what a GPU machine without rich can import, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tpformer.processes.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CHANGED = ROOT / "build" / "results"  # of a tree that no commit has


def device_directory(device: str | None) -> str:
    """cpu, or the GPU's name as part of a path; device None: of the GPU if there is one."""
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


def commit() -> dict[str, Any]:
    """The commit that is checked out, and whether files besides bench/results differ from it; nulls outside git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    status = git("status", "--porcelain", "--", ".", ":!bench/results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def place(device: str) -> Path:
    """The folder for results of this device: under bench/results, or under build/results if the tree has changes."""
    return (RESULTS if commit()["dirty"] is False else CHANGED) / device_directory(device)


def digest(patterns: Iterable[str]) -> str:
    """A hash of all files that these globs name: a copy without git, or with changes, is not what its commit says."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of those of these packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, and its folder. Readers find it whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")

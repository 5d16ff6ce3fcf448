"""Which commit and which device a results file belongs to, and in which folder it is.

Belongs here: what a GPU machine without rich can import, too.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


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

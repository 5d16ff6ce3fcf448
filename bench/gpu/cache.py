"""Triton's cache, made on one machine and used on another.

    python -m bench gpu --fill          # compiles what the items call, and packs it: make gpu-cache
    python -m bench.gpu.cache FILE...   # adds what a call on a GPU has compiled and left in its folder

An entry is found where Python, Triton, its assembler and the cache's folder are the same ones.

Belongs here: where the cache is, what of it is packed, and in which file.
"""

import hashlib
import os
import sys
import tarfile
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from harness.provenance import ROOT

FOLDER = Path("/tmp/tpformer-triton-cache")  # on every machine, as files of the cache name others by their whole paths
PACKED = ROOT / ".cache"  # which git ignores
LIMIT = 40 << 20  # bytes of a packed cache
LEFT_OUT = (".ttir", ".ttgir", ".llir", ".ptx", ".source")  # what no launch needs
PRESET = 3  # of xz
HELD = 4 << 20  # bytes that xz may hold back before it writes them


def triton_key() -> str:
    """Triton's hash of itself, which has to be the same one where its cache is to be used."""
    try:
        from triton.runtime.cache import triton_key as key
    except ImportError:
        return "none"
    return hashlib.sha256(key().encode()).hexdigest()[:16]


def packed() -> Path:
    """The packed cache that fits the Triton which is installed."""
    return PACKED / f"triton-{triton_key()}.tar.xz"


def environment() -> dict[str, str]:
    """Variables for processes that share the cache. torch sets another assembler while it compiles, whose version is in
    the cache's keys, so one is named."""
    found = util.find_spec("triton")
    assembler = Path((found and found.origin) or "").parent / "backends/nvidia/bin/ptxas"
    pinned = {"TRITON_PTXAS_PATH": str(assembler)} if assembler.is_file() else {}
    return {"TRITON_CACHE_DIR": str(FOLDER), "TRITON_STORE_BINARY_ONLY": "1", **pinned}


def entries() -> set[str]:
    """The names of what is in the cache: a folder for each kernel, each launcher, and what they share."""
    return {path.name for path in FOLDER.iterdir()} if FOLDER.is_dir() else set()


def absent(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """What of a file is not there yet. Another process may have loaded what is there, and would crash by a change."""
    return None if (FOLDER / member.name).is_file() else tarfile.data_filter(member, folder)


def unpack(files: Iterable[Path]) -> None:
    """Put what these files have, and the cache has not, into the cache."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.exists():
            with tarfile.open(path) as archive:
                archive.extractall(FOLDER, filter=absent)


def pack(path: Path, names: Iterable[str]) -> int:
    """Write these entries to a file, the newest first, up to LIMIT; returns how many were left out."""
    newest = sorted(names, key=lambda name: -(FOLDER / name).stat().st_mtime)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as output, tarfile.open(fileobj=output, mode="w:xz", preset=PRESET) as archive:
        while newest and output.tell() < LIMIT - HELD:
            name = newest.pop(0)
            archive.add(FOLDER / name, name, filter=lambda each: None if each.name.endswith(LEFT_OUT) else each)
    os.replace(new, path)
    return len(newest)


def begin() -> set[str]:
    """Take what was packed, and return what is there."""
    unpack([packed()])
    return entries()


def end(before: set[str], path: Path) -> str:
    """Pack what has come since, or everything if it goes to the packed cache itself. Returns what was done."""
    new = entries() - before
    whole = path == packed()
    if not new:
        return "Triton's cache has all that was called"
    left_out = pack(path, entries() if whole else new)
    size = path.stat().st_size / 2**20
    return f"{path}: {len(new)} entries have come, {size:.1f} MiB" + (f", {left_out} left out" if left_out else "")


def main(files: list[str]) -> None:
    """Add what these files have to the packed cache."""
    unpack([packed(), *map(Path, files)])
    left_out = pack(packed(), entries())
    print(f"{packed()}: {packed().stat().st_size / 2**20:.1f} MiB, {left_out} entries left out")


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m bench gpu`: its options, the machine in words, one session, and the table at its end."""

import argparse
import fnmatch
import hashlib
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..provenance import CHANGED, commit, place, versions
from .items import ITEMS, Item
from .schedule import Session, Stop, run
from .state import DONE, MEASURED, State
from .table import table

DESCRIPTION = "What is worth most on one GPU in a limited time: docs/gpu.md."
REHEARSAL = CHANGED.parent / "rehearsal"
WIDTH = 180


def chosen(patterns: Sequence[str], items: Sequence[Item]) -> list[Item]:
    """The items whose names match one of these; ValueError if one matches none. Without patterns all."""
    for pattern in patterns:
        if not fnmatch.filter([item.name for item in items], pattern):
            raise ValueError(f"no item is called {pattern!r}: there are {', '.join(item.name for item in items)}")
    return [item for item in items if not patterns or any(fnmatch.fnmatch(item.name, each) for each in patterns)]


def machine(rehearses: bool) -> dict[str, Any]:
    """What results depend on besides sources: the GPU and the versions of what compiles and runs kernels."""
    gpu = "none, a rehearsal" if rehearses else torch.cuda.get_device_name()
    return {"GPU": gpu, **versions("torch", "triton", "numpy")}


def driver() -> str:
    """The version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def triton_key() -> str:
    """Triton's hash of itself, which has to be equal wherever its cache is to be used."""
    try:
        from triton.runtime.cache import triton_key as key
    except ImportError:
        return "none"
    return hashlib.sha256(key().encode()).hexdigest()[:16]


def identity(of: Mapping[str, Any], rehearses: bool) -> dict[str, Any]:
    """The head of the table."""
    here = commit()
    tree = {True: ", changed tree", False: "", None: ", outside git"}[here["dirty"]]
    others = {} if rehearses else {"driver": driver(), "cuDNN": torch.backends.cudnn.version()}
    return {**of, **others, "Triton's key": triton_key(), "commit": f"{(here['commit'] or 'none')[:8]}{tree}"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=DESCRIPTION)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would not end by then")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ITEM", help="these items; * stands for anything"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for results and state, in place of bench/results/..."
    )
    parser.add_argument("--rehearse", action="store_true", help="every item without a GPU, on small sizes: no figures")
    parser.add_argument("--list", action="store_true", help="the items, in the order in which they would run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 if an item that was asked for is not measured or missed a bar, 2 for a wrong call."""
    options, begun = parse(arguments), time.monotonic()
    console = Console(width=WIDTH)
    try:
        items = chosen(options.only, ITEMS)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for item in items:
            print(f"{item.name:34} {item.seconds:4} s")
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        print("there is no CUDA device here: --rehearse runs every item without one")
        return 0
    folder = (options.out or (REHEARSAL if options.rehearse else place("cuda"))).resolve()
    of, stop = machine(options.rehearse), Stop()
    stop.listen()
    say = lambda text: console.print(text, highlight=False, soft_wrap=True)  # noqa: E731
    session = Session(
        items, folder, State(folder / "state.json", of), begun + options.seconds, stop, options.rehearse, say
    )
    run(session)
    for part in table(session, identity(of, options.rehearse)):
        console.print(part, highlight=False, no_wrap=True, crop=True)
    right = DONE if options.rehearse else (MEASURED,)
    outcomes = [entry and entry.outcome for entry in (session.state.entries.get(item.name) for item in items)]
    return 0 if all(outcome in right for outcome in outcomes) else 1

"""`python -m bench gpu`: its options, the machine in words, one session, and the table at its end."""

import argparse
import fnmatch
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness.provenance import CHANGED, commit, place, versions
from harness.runner import say

from . import cache
from .items import ITEMS, Item
from .schedule import FILL, MEASURE, REHEARSE, Session, Stop, run
from .state import DONE, MEASURED, State
from .table import table

DESCRIPTION = "What is worth most on one GPU in a limited time: docs/gpu.md."
BUILD = CHANGED.parent
WIDTH = 180


def chosen(patterns: Sequence[str], items: Sequence[Item]) -> list[Item]:
    """The items whose names match one of these; ValueError if one matches none. Without patterns all."""
    for pattern in patterns:
        if not fnmatch.filter([item.name for item in items], pattern):
            raise ValueError(f"no item is called {pattern!r}: there are {', '.join(item.name for item in items)}")
    return [item for item in items if not patterns or any(fnmatch.fnmatch(item.name, each) for each in patterns)]


def machine(way: str) -> dict[str, Any]:
    """The GPU, and the versions of Python, torch, triton and numpy: results depend on them as on sources."""
    gpu = torch.cuda.get_device_name() if way == MEASURE else f"none, to {way}"
    return {"GPU": gpu, **versions("torch", "triton", "numpy")}


def driver() -> str:
    """The version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def identity(of: Mapping[str, Any], way: str) -> dict[str, Any]:
    """The head of the table."""
    here = commit()
    tree = {True: ", changed tree", False: "", None: ", outside git"}[here["dirty"]]
    others = {"driver": driver(), "cuDNN": torch.backends.cudnn.version()} if way == MEASURE else {}
    return {**of, **others, "Triton's key": cache.triton_key(), "commit": f"{(here['commit'] or 'none')[:8]}{tree}"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=DESCRIPTION)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would not end by then")
    parser.add_argument(
        "--only", action="append", default=[], metavar="ITEM", help="these items; * stands for anything"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for results and state, in place of bench/results/..."
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--rehearse", action="store_true", help="every item without a GPU, on small sizes: no figures")
    ways.add_argument("--fill", action="store_true", help="without a GPU, compile what the items call, and pack it")
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
    way = REHEARSE if options.rehearse else FILL if options.fill else MEASURE
    if way == MEASURE and not torch.cuda.is_available():
        print("there is no CUDA device here: --rehearse runs every item without one")
        return 0
    folder = (options.out or (place("cuda") if way == MEASURE else BUILD / way)).resolve()
    of, stop = machine(way), Stop()
    stop.listen()
    before = cache.begin() if way != REHEARSE else set()
    state = State(folder / "state.json", of)
    session = Session(items, folder, state, begun + options.seconds, stop, way, partial(say, console), Counter())
    run(session)
    if way != REHEARSE:
        say(console, cache.end(before, folder / "cache.tar.xz" if way == MEASURE else cache.packed()))
    for part in table(session, identity(of, way)):
        console.print(part, highlight=False, no_wrap=True, crop=True)
    right = (MEASURED,) if way == MEASURE else DONE
    items = [item for item in items if session.possible(item)]
    outcomes = [entry and entry.outcome for entry in (session.state.entries.get(item.name) for item in items)]
    return 0 if all(outcome in right for outcome in outcomes) else 1

"""What each rank of a job is doing. Python frames tell it; each rank writes it to a file; a report compares the files.

Belongs here: positions of threads, the ranks' files in a directory that all share, and the sentences that blame a rank.
The thread that uses them is in watchdog.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType

import torch

from tpformer.distributed.hang import PACKAGE

from .files import replace_file

ROWS = 64
STACK_DEPTH = 12

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
DISTRIBUTED = (os.path.join(PACKAGE, "distributed") + os.sep, os.path.join(TORCH, "distributed") + os.sep)
# the collectives that callers know are functions of these files; deeper frames are their implementation
COLLECTIVES = (
    os.path.join(TORCH, "distributed", "distributed_c10d.py"),
    os.path.join(DISTRIBUTED[0], "collectives.py"),
)
# frames of these wrappers, around and below collectives, say nothing about what a thread does
TRANSPARENT = (
    os.path.join(TORCH, "distributed", "c10d_logger.py"),
    os.path.join(TORCH, "_ops.py"),
    os.path.join(TORCH, "utils", "_contextlib.py"),
)
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# a thread in these files waits for another one, such as that of a backward on CUDA or of a checkpoint
WAITING = (
    os.path.join(TORCH, "autograd", "graph.py"),
    *(os.path.join(STANDARD_LIBRARY, name) for name in ("threading.py", "queue.py", "concurrent")),
)


@dataclass(frozen=True)
class Position:
    """The place of a thread in its program."""

    collective: str | None
    """The function of torch.distributed or tpformer.distributed that it is in, such as all_reduce; None outside."""
    at: str
    """file:line of the nearest caller outside of torch, tpformer.distributed and the standard library."""
    stack: tuple[str, ...]
    """The STACK_DEPTH innermost Python lines; the last one is the innermost."""


def _is_library(file: str) -> bool:
    standard = file.startswith(STANDARD_LIBRARY) and "-packages" not in file
    return standard or file.startswith((TORCH, DISTRIBUTED[0], "<frozen"))


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.replace(PACKAGE, 'tpformer' + os.sep)}:{frame.f_lineno}"


def position(frame: FrameType) -> Position:
    """The place of the thread whose innermost frame this is."""
    frames = [frame]
    # a thread that runs on meanwhile was seen to leave a list where its caller's frame had been (Python 3.11.7)
    while isinstance(caller := frames[-1].f_back, FrameType):
        frames.append(caller)

    def known(each: FrameType) -> bool:
        return each.f_code.co_filename in COLLECTIVES

    opaque = (each for each in frames if each.f_code.co_filename not in TRANSPARENT)
    inside = list(takewhile(lambda each: each.f_code.co_filename.startswith(DISTRIBUTED), opaque))
    # a collective may call others of its own file; the caller knows the outermost one
    called = list(takewhile(known, dropwhile(lambda each: not known(each), inside)))
    named = called[-1] if called else inside[0] if inside else None
    callers = [each for each in frames if not _is_library(each.f_code.co_filename)]
    return Position(
        collective=None if named is None else named.f_code.co_name,
        at=_line(callers[0] if callers else frame),
        stack=tuple(f"{_line(each)} in {each.f_code.co_name}" for each in reversed(frames[:STACK_DEPTH])),
    )


def position_of_thread(thread: int) -> Position:
    """The place of the thread with that identifier.

    If it waits while another thread is in a collective, the collective and the stack are the other thread's.
    """
    frames = sys._current_frames()
    own = frames.pop(thread, None)
    if own is None:
        return Position(None, "its thread has ended", ())
    found = position(own)
    if found.collective is None and own.f_code.co_filename.startswith(WAITING):
        others = [other for frame in frames.values() if (other := position(frame)).collective is not None]
        if others:
            return dataclasses.replace(others[0], at=found.at)
    return found


@dataclass(frozen=True)
class RankState:
    """What a rank writes to its file at each heartbeat. Durations are seconds of that rank's clock."""

    rank: int
    attempt: str
    beat: int
    """The number of heartbeats. If it grows, the process lives, even where the clocks of machines differ."""
    step: int
    doing: str
    step_seconds: float
    """Seconds since the last progress, without the time in which the process did not run."""
    collective: str | None
    at: str
    at_seconds: float
    """How long every heartbeat has found the rank at this place."""
    stack: tuple[str, ...] = ()
    host: str = ""
    pid: int = 0
    finished: bool = False

    @property
    def place(self) -> str:
        """The step, and the collective or line that the rank is in, in words."""
        if self.finished:
            return f"finished after step {self.step}"
        return (
            f"step {self.step}, in {self.collective}, called at {self.at}"
            if self.collective
            else f"step {self.step}, at {self.at}, in no collective"
        )


def write_state(directory: Path, state: RankState) -> None:
    """Write rank-N.json in `directory`, whole or not at all. OSError where that fails."""
    replace_file(directory / f"rank-{state.rank}.json", json.dumps(dataclasses.asdict(state)))


def read_states(directory: Path, world_size: int, attempt: str) -> dict[int, RankState]:
    """The states that ranks of this attempt have written, by rank. Missing, damaged and older files are left out."""
    states = {}
    for rank in range(world_size):
        try:
            values = json.loads((directory / f"rank-{rank}.json").read_text())
            state = RankState(**{**values, "stack": tuple(values["stack"])})
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        if state.attempt == attempt:
            states[rank] = state
    return states


def names(ranks: Sequence[int]) -> str:
    """Ranks in words, such as "rank 3" or "ranks 0-2, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _each(states: Sequence[RankState], limit: int = 4) -> str:
    parts = [f"rank {state.rank} ({state.place})" for state in states[:limit]]
    return "; ".join(parts) + (f"; and {len(states) - limit} more" if len(states) > limit else "")


def find_culprits(world_size: int, states: Mapping[int, RankState], alive: set[int]) -> tuple[list[int], str]:
    """The ranks that the others wait for, and a sentence that says why.

    The first rule that finds any decides: ranks without a heartbeat; ranks that are in no collective while others are
    in one; ranks at another place than most.
    """
    missing = [rank for rank in range(world_size) if rank not in states]
    if missing:
        return missing, (
            f"{names(missing)} wrote nothing here: its process died or hangs before the training, or the run directory "
            "is not on a file system that all machines share"
        )
    here = [states[rank] for rank in range(world_size)]
    stopped = [state for state in here if state.rank not in alive and not state.finished]
    if stopped:
        return [state.rank for state in stopped], (
            f"no heartbeat from {names([state.rank for state in stopped])}: its process is dead, stopped, or in native "
            f"code that holds Python's lock; last seen: {_each(stopped)}"
        )
    waiting: list[RankState] = []
    elsewhere: list[RankState] = []
    for state in here:
        (elsewhere if state.collective is None or state.finished else waiting).append(state)
    if waiting and elsewhere:
        return [state.rank for state in elsewhere], (
            f"{names([state.rank for state in waiting])} {'waits' if len(waiting) == 1 else 'wait'} in collectives for "
            f"{_each(elsewhere)}"
        )
    groups: dict[tuple, list[RankState]] = {}
    for state in here:
        groups.setdefault((state.step, state.collective, state.at), []).append(state)
    if len(groups) == 1:
        return [], f"no rank stands out, all are the same: {_each(here)}"
    # the smaller groups are blamed; of two equal ones, the one at the earlier step
    most = max(groups.values(), key=lambda group: (len(group), group[0].step))
    odd = [state for group in groups.values() if group is not most for state in group]
    odd.sort(key=lambda state: state.rank)
    why = "they may have called collectives in another order" if waiting else "the others may wait for their devices"
    return [state.rank for state in odd], f"{_each(odd)} against {_each(most)}: {why}"


def report(world_size: int, states: Mapping[int, RankState], ages: Mapping[int, float], alive: set[int]) -> str:
    """The sentence that names the culprits, a table of at most ROWS ranks, culprits first, and two culprits' stacks.

    ages: seconds since each rank's last heartbeat.
    """
    culprits, why = find_culprits(world_size, states, alive)
    ranks = culprits + sorted(set(range(world_size)) - set(culprits))
    rows = [("rank", "step", "since", "heartbeat", "in", "for", "called at")]
    for rank in ranks[:ROWS]:
        if (state := states.get(rank)) is None:
            rows.append((str(rank), "", "", "never", "", "", ""))
            continue
        rows.append(
            (
                f"{rank} on {state.host}, pid {state.pid}",
                f"{state.step} {state.doing}",
                f"{state.step_seconds:.1f} s",
                "finished" if state.finished else f"{ages.get(rank, 0.0):.1f} s ago",
                state.collective or "no collective",
                f"{state.at_seconds:.1f} s",
                state.at,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ranks) > ROWS:
        lines.append(f"  and {len(ranks) - ROWS} more ranks")
    for rank in culprits[:2]:
        if rank in states and states[rank].stack:
            lines += [f"Python stack of rank {rank} at its last heartbeat:", *(f"  {x}" for x in states[rank].stack)]
    blamed = f"{names(culprits)}: " if culprits else ""
    return f"{blamed}{why}\n" + "\n".join(line.rstrip() for line in lines)

"""What a rank says when a peer does not come: the last operations of a group, and the report of an expired wait.

Belongs here: the ring, the search for the user's line, the report's words. No workspaces, no kernels.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

RING_SIZE = 64
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LIBRARIES = (PACKAGE, TORCH, contextlib.__file__, "<frozen", "<eval_with_key>")


class HangError(RuntimeError):
    """A rank waited for a peer in vain. The group's fused operations are unusable from then on; the message says who
    waited for whom, where, and what to do."""


class Operation(NamedTuple):
    """One operation as its rank began it."""

    step: int | None
    kind: str
    name: str
    epoch: int | None
    """None once CUDA graphs move the epoch, which the host then does not know."""
    file: str
    line: int
    began: float
    """time.monotonic()"""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class Ring:
    """The last operations of a group, all kinds in one order. Costs one tuple and a walk up the stack each."""

    def __init__(self, size: int = RING_SIZE) -> None:
        self.operations: deque[Operation] = deque(maxlen=size)

    def note(self, step: int | None, kind: str, name: str, epoch: int | None) -> None:
        self.operations.append(Operation(step, kind, name, epoch, *user_line(), time.monotonic()))

    def find(self, kind: str, epoch: int) -> Operation | None:
        """The newest one of that kind and epoch; None if it is too long ago or a CUDA graph replayed it."""
        return next((one for one in reversed(self.operations) if one.kind == kind and one.epoch == epoch), None)

    @property
    def last(self) -> Operation | None:
        return self.operations[-1] if self.operations else None


def user_line() -> tuple[str, int]:
    """File and line of the nearest caller outside of tpformer and torch.

    In a backward pass on CUDA, which runs in a thread of its own, there is none: then the outermost line of tpformer.
    """
    frame = sys._getframe(1)
    found = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES):
            return file, frame.f_lineno
        if file.startswith(PACKAGE):
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found.f_code.co_filename, found.f_lineno


@dataclass(frozen=True)
class Expired:
    """An error word that a kernel wrote: `rank` gave up waiting for `peer`. Ranks are those of the group."""

    kind: str
    rank: int
    peer: int
    seen: int
    wanted: int
    limit: int
    timeout: float


def describe(expired: Expired, ring: Ring, global_ranks: Sequence[int], now: float | None = None) -> str:
    """The report: one sentence, a table, and what to do. global_ranks: the group's ranks in the world."""
    operation, last = ring.find(expired.kind, expired.wanted), ring.last
    now = time.monotonic() if now is None else now

    def named(rank: int) -> str:
        return f"rank {rank} (global rank {global_ranks[rank]})" if 0 <= rank < len(global_ranks) else f"rank {rank}"

    name = (
        "an operation that is not among the last ones (a replayed CUDA graph?)" if operation is None else operation.name
    )
    rows = [
        ("rank", f"{expired.rank} of {len(global_ranks)} (global rank {global_ranks[expired.rank]})"),
        ("step", "unknown" if operation is None or operation.step is None else str(operation.step)),
        ("operation", f"{name}, workspace {expired.kind}"),
        ("epoch", f"seen {expired.seen}, wanted {expired.wanted}"),
        ("waiting for", named(expired.peer)),
    ]
    waited = f"gave up after {expired.limit} polls (timeout {expired.timeout:g} s)"
    if operation is not None:
        rows += [("time", f"begun {now - operation.began:.1f} s ago, {waited}"), ("called at", operation.place)]
    else:
        rows += [("time", waited)]
    if last is not None and last is not operation:
        epoch = "" if last.epoch is None else f", epoch {last.epoch}"
        rows += [("last operation", f"{last.name}, workspace {last.kind}{epoch}, at {last.place}")]
    width = max(len(title) for title, _ in rows) + 2
    table = "\n".join(f"  {title:<{width}}{text}" for title, text in rows)
    return (
        f"{named(expired.rank)} waited in vain for {named(expired.peer)} in {name}\n{table}\n"
        f"Look at the output of {named(expired.peer)}: it died, hangs, or called its operations in another order (a "
        "report of its own names the one it was in). If it was only slow, give the group a longer timeout: "
        "tpformer.distributed.set_timeout. The group's fused operations cannot go on: restart from the last checkpoint."
    )

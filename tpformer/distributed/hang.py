"""What a rank reports when a peer does not come to a fused operation: who waited for whom, where, and what to do.

Belongs here: the ring of a group's last operations, the search for the user's line, and the report's words.
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
FILES = 4096  # names of files of which it is known whose they are
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LIBRARIES = (PACKAGE, TORCH, contextlib.__file__, "<frozen", "<eval_with_key>")


class HangError(RuntimeError):
    """A rank waited for a peer in vain, or lets its peers do so, because it has left an operation that it had begun.

    The group's fused operations cannot be used from then on.
    """


class Operation(NamedTuple):
    """One operation as its rank began it."""

    step: int | None
    kind: str
    name: str
    epoch: int | None
    """None if a CUDA graph holds the operation: its replays move the epoch, and the host does not see them."""
    file: str
    line: int
    began: float
    """The time.monotonic() at which it began."""

    @property
    def place(self) -> str:
        """file:line of the user's call."""
        return f"{self.file}:{self.line}"


class Ring:
    """The last operations of a group, of all kinds, in their order. Each costs a tuple and a walk up the stack."""

    def __init__(self, size: int = RING_SIZE) -> None:
        self.operations: deque[Operation] = deque(maxlen=size)

    def note(self, step: int | None, kind: str, name: str, epoch: int | None) -> Operation:
        """Add an operation that begins now."""
        file, line = user_line(2)  # neither here nor in KernelWorkspace.begin
        operation = Operation(step, kind, name, epoch, file, line, time.monotonic())
        self.operations.append(operation)
        return operation

    def find(self, kind: str, epoch: int) -> Operation | None:
        """The newest operation of that kind and epoch; None if it was too long ago, or if a CUDA graph replayed it."""
        return next((one for one in reversed(self.operations) if one.kind == kind and one.epoch == epoch), None)

    @property
    def last(self) -> Operation | None:
        """The operation that began last; None if there was none."""
        return self.operations[-1] if self.operations else None


def user_line(skipped: int = 0) -> tuple[str, int]:
    """File and line of the nearest caller outside of tpformer and torch. skipped: callers that are known to be inside.

    A backward pass on CUDA runs in a thread of its own, which has no such caller: then the outermost line of tpformer.
    """
    frame = sys._getframe(1 + skipped)
    found = frame
    while frame is not None:
        file = frame.f_code.co_filename
        library = OWNERS[file]
        if library is None:
            return file, frame.f_lineno
        if library is PACKAGE:
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found.f_code.co_filename, found.f_lineno


class Owners(dict[str, str | None]):
    """The first of LIBRARIES that a file is of; None for a user's. Every operation asks of each frame of its stack."""

    def __missing__(self, file: str) -> str | None:
        if len(self) >= FILES:
            self.clear()
        self[file] = found = next((library for library in LIBRARIES if file.startswith(library)), None)
        return found


OWNERS = Owners()


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
    """The report: a sentence, a table, and what to do. global_ranks: the group's ranks in the world."""
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
        f"Look at the output of {named(expired.peer)}: it died, hangs, or called its operations in another order (its "
        "own report names the one it was in). If it was only slow, give the group a longer timeout with "
        "tpformer.distributed.set_timeout. The group's fused operations cannot go on: restart from the last checkpoint."
    )

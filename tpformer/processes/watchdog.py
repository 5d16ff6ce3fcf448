"""A watchdog ends a job whose ranks wait for one another in vain, and names the rank that they wait for.

Belongs here: each rank's thread that writes down what its rank is doing. When nothing has moved for too long, it reads
what the others wrote, reports and ends the process. It uses files only, no third process and no connection, so it works
with any launcher, and while every process group is stuck.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from .launch import HANG_EXIT_CODE
from .rank_states import RankState, position_of_thread, read_states, report, write_state

HEARTBEAT_SECONDS = 1.0
RANKS_PER_SECOND = 64  # how many files all ranks together may write
PATIENCE = 5  # a rank counts as stopped after so many intervals without a heartbeat
REPORT_SECONDS = 10.0  # how long the other ranks wait for the report of the first one


class Watchdog:
    """The watching thread of one rank. Constructing it is collective over the world; use as a context manager.

    directory: one that all ranks share (`ranks/` of a run), for this object alone. It holds rank-N.json of every rank,
    rewritten about once a second, and hang-report.txt after a hang; what an earlier attempt left there is removed.
    timeout: seconds without a call of `progress` after which the job ends: one rank prints the report to stderr, and
    each process exits at once with HANG_EXIT_CODE. Time in which the process itself did not run (it was stopped, the
    machine slept) does not count. A process of an earlier attempt, or of one already reported, exits too: a rank that
    was stopped and continues cannot write into its successors' run.
    Communicates: one broadcast of a short string, then only files. ValueError unless timeout is positive.
    """

    def __init__(self, directory: Path, *, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"a timeout must be positive, not {timeout}")
        self.directory, self.timeout = directory, timeout
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # more ranks write less often: they share one file system
        self.interval = min(max(HEARTBEAT_SECONDS, self.world_size / RANKS_PER_SECOND), timeout / 10)
        self._report = directory / "hang-report.txt"
        self._attempt_file, self._claim = directory / "attempt", directory / "reporter"
        attempt = [uuid.uuid4().hex]
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in (*directory.glob("*rank-*"), self._report, self._claim):
                leftover.unlink(missing_ok=True)
            self._attempt_file.write_text(attempt[0])
        dist.broadcast_object_list(attempt, src=0)
        self._attempt = attempt[0]
        self._thread_watched = threading.get_ident()
        self._progress = (0, 0, "")
        self._seen: tuple | None = None
        self._place: tuple | None = None
        self._beats, self._lived, self._progressed_at, self._arrived_at = 0, 0.0, 0.0, 0.0
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()
        if kind is None:
            self._beat(finished=True)

    def progress(self, step: int, doing: str = "") -> None:
        """This rank begins this step, or another part of it (`doing`: such as "validation"). Costs nothing."""
        self._progress = (self._progress[0] + 1, step, doing)

    @property
    def _idle(self) -> float:
        return self._lived - self._progressed_at

    def _beat(self, finished: bool = False) -> None:
        """Write this rank's state. The disk may be full or its server away: that alone must not end the training."""
        now = time.monotonic()
        late = now - self._last > PATIENCE * self.interval
        self._lived += self.interval if late else now - self._last
        self._last = now
        if late:
            self._leave_if_over()
        _, step, doing = progress = self._progress
        found = position_of_thread(self._thread_watched)
        if progress != self._seen:
            self._seen, self._progressed_at = progress, self._lived
        if (place := (progress, found.collective, found.at)) != self._place:
            self._place, self._arrived_at = place, self._lived
        self._beats += 1
        state = RankState(
            rank=self.rank,
            attempt=self._attempt,
            beat=self._beats,
            step=step,
            doing=doing,
            step_seconds=self._idle,
            collective=found.collective,
            at=found.at,
            at_seconds=self._lived - self._arrived_at,
            stack=found.stack,
            host=socket.gethostname(),
            pid=os.getpid(),
            finished=finished,
        )
        with contextlib.suppress(OSError):
            write_state(self.directory, state)

    def _watch(self) -> None:
        while True:
            self._beat()
            self._leave_if_replaced()
            if self._idle > self.timeout:
                self._end()
            if self._closed.wait(self.interval):
                return

    def _wait_for(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Whether it happened within the time; heartbeats go on, so that other ranks see this one alive."""
        deadline = time.monotonic() + seconds
        while not (over := happened()) and time.monotonic() < deadline and not self._closed.wait(self.interval):
            self._beat()
        return over

    def _end(self) -> None:
        """Exit after a report, by this rank or one that began earlier; return if there was progress meanwhile."""
        try:
            self._claim.open("x").close()
        except OSError:
            over = self._wait_for(lambda: self._report.exists() or self._idle < self.timeout, REPORT_SECONDS)
            if self._report.exists():
                os._exit(HANG_EXIT_CODE)
            if over or self._closed.is_set():
                return
        states: dict[int, RankState] = {}
        first: dict[int, int] = {}
        alive: set[int] = set()

        def all_alive() -> bool:
            states.update(read_states(self.directory, self.world_size, self._attempt))
            alive.update(rank for rank, state in states.items() if state.beat > first.setdefault(rank, state.beat))
            return len(alive) == self.world_size

        self._wait_for(all_alive, PATIENCE * self.interval)
        if self._idle < self.timeout or self._closed.is_set():
            self._claim.unlink(missing_ok=True)
            return
        head = f"rank {self.rank} made no progress for {self._idle:.1f} s (timeout {self.timeout:g} s): the job ends.\n"
        text = head + report(self.world_size, states, self._ages(states), alive) + "\n"
        text += "If it was only slow (compilation, validation, a large checkpoint), raise run.timeout.\n"
        print(text, file=sys.stderr, flush=True, end="")
        with contextlib.suppress(OSError):
            temporary = self._report.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.replace(self._report)
        os._exit(HANG_EXIT_CODE)

    def _ages(self, states: Mapping[int, RankState]) -> dict[int, float]:
        """Seconds from each rank's last heartbeat to the newest of all, by the times of their files: one clock."""
        times: dict[int, float] = {}
        for rank in states:
            with contextlib.suppress(OSError):
                times[rank] = (self.directory / f"rank-{rank}.json").stat().st_mtime
        newest = max(times.values(), default=0.0)
        return {rank: newest - modified for rank, modified in times.items()}

    def _leave_if_over(self) -> None:
        """Exit if this attempt was reported, or another one has begun."""
        if self._report.exists():
            self._leave()
        self._leave_if_replaced()

    def _leave_if_replaced(self) -> None:
        """Exit if another attempt works in this directory."""
        with contextlib.suppress(OSError):
            if self._attempt_file.read_text() != self._attempt:
                self._leave()

    def _leave(self) -> None:
        text = f"rank {self.rank} of an attempt that has ended leaves (see {self._report})"
        print(text, file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)

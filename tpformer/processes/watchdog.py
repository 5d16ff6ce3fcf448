"""A watchdog ends a job whose ranks wait for one another in vain, and names the rank that they wait for.

Belongs here: the thread in which each rank writes down what it is doing. When its rank has made no progress for too
long, the thread reads what the others wrote, reports, and ends the process. It needs only files, so it works with any
launcher, and while every process group is stuck.
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

from .files import make_folder, naming, remove, replace_file
from .launch import HANG_EXIT_CODE
from .rank_states import RankState, position_of_thread, read_states, report, write_state

HEARTBEAT_SECONDS = 1.0
RANKS_PER_SECOND = 64  # how many files all ranks together may write in a second
PATIENCE = 5  # a rank counts as stopped after this many intervals without a heartbeat
SHARED_SECONDS = 5.0  # how late a file that rank 0 wrote may show up on another machine
REPORT_SECONDS = 10.0  # how long the other ranks wait for the one that writes the report


class Watchdog:
    """The watching thread of one rank. Constructing it is collective over the world. Use it as a context manager.

    directory: a directory that all ranks share and nothing else uses (`ranks/` of a run). It holds every rank's
    rank-N.json, rewritten about once a second, and after a hang hang-report.txt. Files of an earlier attempt are
    removed.
    timeout: after this many seconds without a call of `progress` the job ends. One rank prints the report to stderr,
    and each process exits at once with HANG_EXIT_CODE. Time in which the process itself did not run, because it was
    stopped or the machine slept, does not count. A rank that was stopped and continues exits, too, if its attempt has
    been reported or another one has begun, so it cannot write into that run.
    Communicates: one broadcast and one all-gather of short strings, then only files. ValueError unless timeout is
    positive, and on all ranks if the directory is not one that they share.
    """

    def __init__(self, directory: Path, *, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"a timeout must be positive, not {timeout}")
        self.directory, self.timeout = directory, timeout
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # the more ranks there are, the less often each writes, because they share one file system
        self.interval = min(max(HEARTBEAT_SECONDS, self.world_size / RANKS_PER_SECOND), timeout / 10)
        self._report = directory / "hang-report.txt"
        self._attempt_file, self._claim = directory / "attempt", directory / "reporter"
        attempt = [uuid.uuid4().hex]
        if self.rank == 0:
            make_folder(directory)
            for leftover in (*directory.glob("*rank-*"), self._report, self._claim, self._attempt_file):
                remove(leftover)
            with naming(self._attempt_file):
                self._attempt_file.write_text(attempt[0])
        dist.broadcast_object_list(attempt, src=0)
        self._attempt = attempt[0]
        self._check_shared()
        self._thread_watched = threading.get_ident()
        self._progress = (0, 0, "")
        self._seen: tuple | None = None
        self._place: tuple | None = None
        self._beats, self._lived, self._progressed_at, self._arrived_at = 0, 0.0, 0.0, 0.0
        self._last = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def _check_shared(self) -> None:
        """ValueError on all ranks if one does not see what rank 0 wrote. A network's file system may show it late."""
        deadline = time.monotonic() + SHARED_SECONDS
        while not (seen := self._is_own()) and time.monotonic() < deadline:
            time.sleep(0.1)
        own = None if seen else f"{self.directory.absolute()} on {socket.gethostname()}"
        everyone: list[str | None] = [None] * self.world_size
        dist.all_gather_object(everyone, own)
        for rank, other in enumerate(everyone):
            if other is not None:
                raise ValueError(
                    f"rank {rank} does not see what rank 0 has just written: its folder {other} is not rank 0's: set "
                    f"run.dir to one folder that all ranks share"
                )

    def _is_own(self) -> bool:
        """Whether the directory is, as this rank sees it, that of this attempt."""
        with contextlib.suppress(OSError):
            return self._attempt_file.read_text() == self._attempt
        return False

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
        """Say that this rank begins a step, or a part of it that `doing` names, such as "validation". Costs nothing."""
        self._progress = (self._progress[0] + 1, step, doing)

    @property
    def _idle(self) -> float:
        return self._lived - self._progressed_at

    def _beat(self, finished: bool = False) -> None:
        """Write this rank's state. A failure to write, as on a full disk, is ignored: training must go on."""
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
        """Whether it happened within the time. Heartbeats go on, so that other ranks see that this one is alive."""
        deadline = time.monotonic() + seconds
        while not (over := happened()) and time.monotonic() < deadline and not self._closed.wait(self.interval):
            self._beat()
        return over

    def _end(self) -> None:
        """Write the report, or wait for the rank that already writes it, and exit. Return if there was progress."""
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
            replace_file(self._report, text)
        os._exit(HANG_EXIT_CODE)

    def _ages(self, states: Mapping[int, RankState]) -> dict[int, float]:
        """Seconds from each rank's last heartbeat to the newest of all. The times are those of the files: one clock."""
        times: dict[int, float] = {}
        for rank in states:
            with contextlib.suppress(OSError):
                times[rank] = (self.directory / f"rank-{rank}.json").stat().st_mtime
        newest = max(times.values(), default=0.0)
        return {rank: newest - modified for rank, modified in times.items()}

    def _leave_if_over(self) -> None:
        """Exit if this attempt was reported, or another one has begun."""
        if self._report.exists():
            self._leave(f"which was reported in {self._report}")
        self._leave_if_replaced()

    def _leave_if_replaced(self) -> None:
        """Exit if another attempt works in this directory."""
        with contextlib.suppress(OSError):
            if self._attempt_file.read_text() != self._attempt:
                self._leave(f"because another attempt has begun in {self.directory}")

    def _leave(self, why: str) -> None:
        print(f"rank {self.rank} leaves an attempt that has ended, {why}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)

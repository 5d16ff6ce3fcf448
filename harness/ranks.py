"""Worker processes that hold what is timed, and do nothing until told which part of it to run.

Belongs here: starting ranks, passing calls and results, ending them. Nothing about what is timed.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

Calls = Mapping[str, Callable[[], Any]]
TIMEOUT = timedelta(minutes=5)


class Ranks:
    """`size` processes in one gloo world, each with `threads` threads and the calls that `setup(*arguments)` returned.

    setup: a module-level function; it runs on every rank, with torch.distributed initialised. Between calls the
    processes are blocked on a pipe, so that ranks of another world can be timed meanwhile. A context manager.
    Raises RuntimeError with the traceback when a rank fails, or dies. timeout: of a collective. preload: modules that
    are imported once, not by every rank; of the first world of a process, whose server then serves all others.
    """

    def __init__(
        self,
        size: int,
        threads: int,
        setup: Callable[..., Calls],
        *arguments: Any,
        timeout: timedelta = TIMEOUT,
        preload: Sequence[str] = ("tpformer.training.trainer",),
    ) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self.directory = tempfile.TemporaryDirectory(prefix="tpformer-bench-")
        self.pipes: list[connection.Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            place = (f"file://{self.directory.name}/store", rank, size, threads, timeout)
            self.processes.append(context.Process(target=_serve, args=(*place, setup, arguments, theirs), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        self._results()

    def call(self, name: str) -> list[Any]:
        """Run the call of that name on all ranks; their results in rank order."""
        for pipe in self.pipes:
            pipe.send(name)
        return self._results()

    def sample(self, name: str) -> float:
        """The same for a timing.Sample: seconds of the slowest rank."""
        return max(self.call(name))

    def _results(self) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):  # in order of arrival: a rank that failed leaves the others waiting
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            for rank in [waiting[pipe] for pipe in connection.wait(list(waiting))]:  # type: ignore[index]
                try:
                    succeeded, results[rank] = self.pipes[rank].recv()
                except EOFError:
                    succeeded, results[rank] = False, "the process died"
                if not succeeded:
                    self.close()
                    raise RuntimeError(f"rank {rank} of {len(self.pipes)}: {results[rank]}")
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.directory.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    store: str, rank: int, size: int, threads: int, timeout: timedelta, setup: Callable, arguments: tuple, pipe: Any
) -> None:
    """A rank's life: join the world, set up, then one call at a time until the other end of the pipe closes."""
    try:
        torch.set_num_threads(threads)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
        calls = setup(*arguments)
        pipe.send((True, None))
        while True:
            pipe.send((True, calls[pipe.recv()]()))
    except EOFError:
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))

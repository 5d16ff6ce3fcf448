"""A pool of worker processes that lives for a whole pytest session.

Belongs here: starting workers, giving them a test function, collecting results and failures. No test logic. Ranks leave
their process groups when all have returned, because each open group has threads and sockets, and a new world takes
milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tpformer.torch_private import forget_meshes

# a fork server imports these once for all workers, but for what is not installed; a worker itself imports the rest.
# The first are of tests/, which every worker and command would read.
PRELOAD = [
    "commands", "one_loop", "steps", "small_runs",
    "hypothesis", "pytest", "safetensors.torch", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.errors", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch.testing._internal.distributed.fake_pg", "tpformer.cli.run", "tpformer.in_place",
    "tpformer.planner.report", "tpformer.training.export", "tpformer.inference.evaluate", "tpformer.training.trainer",
    "tpformer.training.verify",
    "tyro._backends._tyro_backend", "typeguard",  # which tyro imports when a command is called
]  # fmt: skip
PROCESS_GROUP_TIMEOUT = timedelta(seconds=300)
GRACE = 0.3  # seconds the other ranks get to report after the first failure; a peer's error is often the telling one


class RankFailure(RuntimeError):
    """A rank raised, died or did not return in time; the message has every failed rank's traceback or exit code."""


class WorkerPool:
    """`pool(n)` gives the world of n ranks, which starts on first use and lives until this context manager ends.

    environment: variables that every worker has before it imports anything of the project (such as TRITON_INTERPRET).
    """

    def __init__(self, environment: dict[str, str] | None = None, preload: tuple[str, ...] = ()) -> None:
        self.server = Server(
            {"OMP_NUM_THREADS": str(torch.get_num_threads())} | (environment or {}), [*PRELOAD, *preload]
        )
        self.directory = tempfile.mkdtemp(prefix="tpformer-pool-")
        self.worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        return self.worlds.setdefault(size, World(size, self.server, self.directory))  # which starts nothing yet

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for world in self.worlds.values():
            world.close()
        self.server.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Server:
    """A fork server, whose processes start in milliseconds: it has imported everything, in its own environment."""

    def __init__(self, environment: Mapping[str, str], preload: list[str]) -> None:
        tests = os.path.dirname(__file__)  # what is preloaded may be there
        self.environment = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]), **environment}
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload([*preload, "frozen"])

    def start(self, target: Callable[..., None], *args: Any, name: str = "", daemon: bool = True) -> Any:
        """Start a process that calls the module-level `target(*args)`, and return it."""
        process = multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name, daemon=daemon)
        # imports read the environment, so the server needs it
        with mock.patch.dict(os.environ, self.environment):
            self.server.ensure_running()
        with self.serving():
            process.start()
        return process

    def serving(self) -> AbstractContextManager[Any]:
        """Within, multiprocessing's fork server is this one."""
        return mock.patch.object(forkserver, "connect_to_new_process", self.server.connect_to_new_process)

    def close(self) -> None:
        """End the server, whose processes must have ended before.

        By a signal: a Python that ends by itself first frees all that it has imported, which takes two seconds.
        """
        if self.server._forkserver_pid is not None:
            os.kill(self.server._forkserver_pid, signal.SIGTERM)
        self.server._stop()


class World:
    """`size` worker processes in one gloo world, with one thread each; the first `run` starts them."""

    def __init__(self, size: int, server: Server, directory: str) -> None:
        self.size, self.server, self.directory = size, server, directory
        self.processes: list[Any] = []
        self.connections: list[connection.Connection] = []
        self.store: dist.TCPStore | None = None  # it is in this process, so that it survives a killed rank

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
        """Call the module-level `function(*args)` on every rank; returns the results in rank order.

        Raises RankFailure naming the rank if one raises, dies, or has not returned after `timeout` seconds. The world
        is then replaced before the next run, because its other ranks may be stuck in a collective.
        """
        task = pickle.dumps((function, args))  # a function by its name, by which workers import it
        if not all(process.is_alive() for process in self.processes):  # one was killed since the last run
            self.kill()
        if not self.processes:
            self.start()
        try:
            for conn in self.connections:
                conn.send((os.environ.get("PYTEST_CURRENT_TEST", ""), list(sys.path), task))
            results = self.collect(timeout)
        except BaseException:  # at a KeyboardInterrupt too, else the next run would read these results
            self.kill()
            raise
        for conn in self.connections:  # only now may ranks leave their process groups: no other one needs them any more
            with contextlib.suppress(BrokenPipeError):  # the worker was killed, which the next run notices
                conn.send(None)
        return results

    def start(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            arguments = (rank, self.size, self.store.port, self.stack_file(rank), theirs)
            self.processes.append(self.server.start(serve, *arguments, name=f"rank {rank} of {self.size}"))
            theirs.close()
            self.connections.append(ours)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Workers whose connection is closed end by themselves; those that are stuck are killed."""
        for conn in self.connections:
            conn.close()
        for process in self.processes:
            process.join(GRACE)
            process.kill()
            process.join()
        self.processes, self.connections, self.store = [], [], None

    def stack_file(self, rank: int) -> str:
        return f"{self.directory}/stack-{self.size}-{rank}"

    def collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline, expired = time.monotonic() + timeout, False
        while waiting := {c: r for r, c in enumerate(self.connections) if r not in results and r not in failures}:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for rank in [waiting[conn] for conn in ready]:  # type: ignore[index]
                succeeded, value = self.receive(rank)
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE)
            if not ready:
                expired = not failures
                break
        if failures or expired:
            raise RankFailure(self.describe(results, failures, timeout))
        return [results[rank] for rank in range(self.size)]

    def receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return self.connections[rank].recv()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            return False, f"died with exit code {self.processes[rank].exitcode}"

    def describe(self, results: dict[int, Any], failures: dict[int, str], timeout: float) -> str:
        lines = [f"rank {rank} of {self.size} {text}" for rank, text in sorted(failures.items())]
        stuck = [rank for rank in range(self.size) if rank not in results and rank not in failures]
        for rank in stuck:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # makes the worker write its stacks, see serve
        time.sleep(0.1 if stuck else 0)
        cause = "was still running when another rank failed" if failures else f"did not return in {timeout} s"
        stacks = (f"rank {rank} of {self.size} {cause}:\n{Path(self.stack_file(rank)).read_text()}" for rank in stuck)
        return "\n".join([*lines, *stacks])


def serve(rank: int, size: int, port: int, stack_file: str, conn: Any) -> None:
    """The life of a worker: it runs a task, and leaves the world when told to, until the pool closes its pipe."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PROCESS_GROUP_TIMEOUT)
        for world in itertools.count():
            options = {"rank": rank, "world_size": size, "timeout": PROCESS_GROUP_TIMEOUT}
            enter = partial(dist.init_process_group, "gloo", store=dist.PrefixStore(f"world {world}", store), **options)
            try:
                while (task := conn.recv()) is not None:
                    conn.send_bytes(run_task(enter, *task))
            except (EOFError, BrokenPipeError):
                os._exit(0)  # the pool is gone, and perhaps peers too, so there is no orderly shutdown
            if dist.is_initialized():
                dist.destroy_process_group()
                forget_meshes()
                gc.collect()  # FSDP2's modules and others hold groups in cycles
                gc.freeze()  # what is left is torch's caches: each later collection would look through them all again


def run_task(enter: Callable[[], None], test: str, path: list[str], task: bytes) -> bytes:
    """Return the pickled pair (whether the task returned, its result or traceback)."""
    sys.path[:] = path
    try:
        if not dist.is_initialized():
            enter()
        with on_account_of(test):
            function, args = pickle.loads(task)
            torch.manual_seed(0)  # ranks that have run other tests before build the same model, too
            return pickle.dumps((True, function(*args)))
    except BaseException:
        return pickle.dumps((False, "raised\n" + traceback.format_exc()))


@contextmanager
def on_account_of(test: str) -> Iterator[None]:
    """Within, `make coverage` credits what runs to this test, even if this process is killed later."""
    os.environ["PYTEST_CURRENT_TEST"] = test
    measured = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    with contextlib.ExitStack() as stack:
        if measured is not None:
            measured.switch_context(test)
            stack.callback(measured.save)
        yield

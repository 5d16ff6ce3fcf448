"""A pool of worker processes that stays alive for a whole pytest session.

Belongs here: starting workers, handing them a test function, collecting results and failures. No test logic.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, forkserver
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
PROCESS_GROUP_TIMEOUT = timedelta(seconds=60)
GRACE = 0.3  # seconds the other ranks get to report after the first failure; a peer's error is often the telling one


class RankFailure(RuntimeError):
    """A rank raised, died or did not return in time; the message has every failed rank's traceback or exit code."""


class WorkerPool:
    """`pool(n)` gives the world of n ranks; worlds are started on first use and kept until `close()`.

    environment: variables set in every worker before it imports anything of the project (such as TRITON_INTERPRET).
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.environment = {"OMP_NUM_THREADS": "1"} | (environment or {})
        self.directory = tempfile.mkdtemp(prefix="tpformer-pool-")
        self.worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if size not in self.worlds:
            self.worlds[size] = World(size, self.environment, self.directory)
        return self.worlds[size]

    def close(self) -> None:
        for world in self.worlds.values():
            world.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class World:
    """`size` worker processes joined in one gloo world, one thread each; started by the first `run`."""

    def __init__(self, size: int, environment: dict[str, str], directory: str) -> None:
        self.size = size
        self.environment = environment
        self.directory = directory
        self.processes: list[Any] = []
        self.connections: list[connection.Connection] = []
        self.store: dist.TCPStore | None = None  # lives here, so that a killed rank cannot take it along

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call the module-level `function(*args)` on every rank; returns the results in rank order.

        Raises RankFailure naming the rank if one raises, dies, or has not returned after `timeout` seconds. The world
        is then replaced before the next run, because its other ranks may be stuck in a collective.
        """
        if "<" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} must be a module-level function: workers import it by name")
        task = (function.__module__, inspect.getfile(function), function.__qualname__, pickle.dumps(args))
        if not all(process.is_alive() for process in self.processes):  # killed since the last run
            self.kill()
        if not self.processes:
            self.start()
        try:
            for conn in self.connections:
                conn.send((list(sys.path), *task))
            return self.collect(timeout)
        except BaseException:  # also KeyboardInterrupt: unread results would be taken for the next run's
            self.kill()
            raise

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        start_forkserver(self.environment["OMP_NUM_THREADS"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self.store.port, self.environment, self.stack_file(rank), theirs)
            process = context.Process(target=serve, args=arguments, daemon=True, name=f"rank {rank} of {self.size}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process, conn in zip(self.processes, self.connections, strict=True):
            process.join()
            conn.close()
        self.processes, self.connections = [], []

    def stack_file(self, rank: int) -> str:
        return f"{self.directory}/stack-{self.size}-{rank}"

    def collect(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        expired = False
        while len(results) + len(failures) < self.size:
            waiting = {self.connections[r]: r for r in range(self.size) if r not in results and r not in failures}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for conn in ready:
                rank = waiting[conn]  # type: ignore[index]
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
        for rank in stuck:
            with open(self.stack_file(rank)) as file:
                stack = file.read()
            cause = "was still running when another rank failed" if failures else f"did not return in {timeout} s"
            lines.append(f"rank {rank} of {self.size} {cause}:\n{stack}")
        return "\n".join(lines)


def start_forkserver(threads: str) -> None:
    """Start the fork server with OMP_NUM_THREADS set: it imports torch, which reads it then, once."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = threads
    forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


def serve(rank: int, size: int, port: int, environment: dict[str, str], stack_file: str, conn: Any) -> None:
    """A worker's life: join the world, then run tasks until the pool's end of the pipe closes."""
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PROCESS_GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PROCESS_GROUP_TIMEOUT)
        while True:
            try:
                path, module, file, name, args = conn.recv()
            except EOFError:
                os._exit(0)  # the pool is gone: peers may be gone too, so no orderly shutdown
            sys.path[:] = path
            try:
                reply = (True, getattr_path(import_module(module, file), name)(*pickle.loads(args)))
                payload = pickle.dumps(reply)
            except BaseException:
                payload = pickle.dumps((False, "raised\n" + traceback.format_exc()))
            conn.send_bytes(payload)


def import_module(name: str, file: str) -> Any:
    """The module `name` whose source is `file`: test modules need not be importable by name (pytest's importlib mode,
    or two test files with one name in different folders)."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == file:
        return loaded
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def getattr_path(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = getattr(value, part)
    return value

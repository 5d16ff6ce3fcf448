"""`tpformer` commands for tests. Each is a process of its own, which starts in milliseconds.

Belongs here: how such a process starts and ends, and its output. It is a fork of a server that has imported everything,
but has an environment, standard output and exit code of its own, as if a shell had started it. `python` takes seconds:
it is for what ends when pytest does, and for what has to import everything by itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from pool import Server, on_account_of

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object) -> str:
    """What a new interpreter prints, in the repository's root, whose packages it finds. It has to succeed."""
    command, paths = [sys.executable, *map(str, arguments)], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Commands:
    """`run("pretrain", "run.toml")` gives (exit code, stdout, stderr); `start` returns at once."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def start(self, *arguments: str, **environment: str) -> Command:
        return self.call(main, *arguments, **environment)

    def run(self, *arguments: str, seconds: float = 300, **environment: str) -> tuple[int, str, str]:
        return self.start(*arguments, **environment).finish(seconds)

    def call(self, function: Callable[..., None], *args: Any, **environment: str) -> Command:
        """Start the module-level `function(*args)` instead of a command. It may patch modules and then call `main`."""
        return Command(self.server, function, args, environment)


class Command:
    """A running process. stdout and stderr are files, so nothing waits for a reader."""

    def __init__(self, server: Server, function: Callable[..., None], args: tuple, environment: dict[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tpformer-command-")
        self.files = [Path(self.folder.name, name) for name in ("out", "err")]
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        # no daemon, because a daemon could not start ranks
        self.process = server.start(enter, os.getcwd(), environment, self.files, test, function, args, daemon=False)
        self.pid: int = self.process.pid

    out = property(lambda self: self.written(0))
    err = property(lambda self: self.written(1))

    def written(self, number: int) -> str:
        return self.files[number].read_text() if self.files[number].exists() else ""

    def poll(self) -> int | None:
        return self.process.exitcode

    def children(self) -> list[int]:
        """The process ids of its ranks, in rank order."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def wait_until(self, happened: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Return when it has happened. Raises AssertionError if the process ends before, or if it takes too long."""
        deadline = time.monotonic() + seconds
        while not happened():
            assert self.poll() is None, f"ended before: {what}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"took too long: {what}\n{self.err}"
            time.sleep(0.002)

    def finish(self, seconds: float = 300) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr at the end. A process that takes longer is killed with its ranks."""
        self.process.join(seconds)
        code = self.process.exitcode
        try:
            assert code is not None, f"still running after {seconds} s\n{self.out}\n{self.err}"
            return code, self.out, self.err
        finally:
            self.close()

    def close(self) -> None:
        if self.process.exitcode is None:
            for pid in (*self.children(), self.pid):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.folder.cleanup()


def enter(
    directory: str, environment: dict[str, str], files: list[Path], test: str, call: Callable, args: tuple
) -> None:
    """Take on the directory, environment and files that a shell would give a process, then call the function."""
    threading.Thread(target=stop_without_pytest, daemon=True).start()
    os.chdir(directory)
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    for number, output in enumerate(files, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    with on_account_of(test):
        call(*args)


def stop_without_pytest() -> None:
    """Stop this process once pytest has ended, however it ended, because nobody waits for it any more."""
    pytest = multiprocessing.parent_process()
    assert pytest is not None
    connection.wait([pytest.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def main(*arguments: str) -> None:
    from tpformer import cli

    sys.argv = ["tpformer", *arguments]
    cli.main()


def on_terminal(name: str, *arguments: str) -> None:
    """The command in a session of its own, on the terminal of this name."""
    os.login_tty(os.open(name, os.O_RDWR))
    main(*arguments)

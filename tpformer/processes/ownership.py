"""A run directory belongs to one job at a time: the job's launcher holds a lock on a file in it.

Importing this file does not import torch.
"""

import fcntl
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from .files import is_there, make_folder, what_failed

LOCK = "owner.lock"
DEATH_SECONDS = 10.0  # how long the ranks of a launcher that was killed may take to end


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Make the directory unless it exists, and keep other jobs out of it while the context is open.

    Ranks that are forked meanwhile inherit the lock. So it is free when the launcher and all its ranks have ended,
    however they ended. What the file says is for people alone: a file whose process is dead is no obstacle. Where the
    file system has no locks, one line on stderr says so.
    ValueError if another job has the directory, or if it cannot be made or written.
    """
    try:
        make_folder(directory)
        is_there(directory / LOCK)
        file = (directory / LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"run.dir {directory} cannot be written ({what_failed(error)}): set another run.dir") from None
    with file:
        try:
            _lock(file, directory)
        except OSError as error:
            print(
                f"tpformer: {directory} cannot be locked ({error.strerror}): nothing keeps a second job out of it",
                file=sys.stderr,
                flush=True,
            )
        with suppress(OSError):  # on a full disk the lock still holds
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}")
            file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _lock(file: TextIO, directory: Path) -> None:
    """Lock the file. ValueError if another job has it; OSError where there are no locks."""
    deadline = time.monotonic() + DEATH_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip()
        if not _is_dead(owner) or time.monotonic() > deadline:
            raise ValueError(
                f"{directory} is in use by {owner or 'another process'}: wait until it has ended, stop it, or set "
                f"another run.dir"
            )
        time.sleep(0.1)  # its ranks are about to end


def _is_dead(owner: str) -> bool:
    """Whether the process that a lock names was one of this machine and is no more."""
    _, _, rest = owner.partition("process ")
    number, _, host = rest.partition(" on ")
    if host != platform.node() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    return False

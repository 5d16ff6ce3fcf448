"""Standard input, output and error of a command, which may be closed, full, or without a reader.

Importing this file does not import torch.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NAMES = ("stdin", "stdout", "stderr")


class Output(io.FileIO):
    """Standard output or error. What cannot be written is dropped, where no line is worth the work that it is about.

    drops: unset, a write that fails is an OSError: of commands whose output is all that they give.
    A full disk, a terminal that has closed and a lost file system are such cases. Later lines are written again where
    that works, below one that says how many bytes were lost. unread: called once when the reader of a pipe has gone;
    None: that is a BrokenPipeError.
    """

    unread: Callable[[], None] | None = None
    drops = True
    lost = 0

    def write(self, data: Any, /) -> int:
        """Write, or drop, all or some of the bytes; how many."""
        try:
            if self.lost and super().write(f"\n{self.lost} bytes of output are missing here\n".encode()):
                self.lost = 0
            while (written := super().write(data)) is None:  # a full pipe that does not block
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            if error.errno == errno.EPIPE and self.unread is None:
                raise
            if not self.drops and error.errno != errno.EPIPE:
                raise OSError(error.errno, error.strerror, "standard output") from None
            if error.errno == errno.EPIPE and self.unread is not None:
                self.unread, told = _nobody, self.unread
                told()
            elif not self.lost and error.errno != errno.EIO and self.fileno() == 1:
                with suppress(OSError):
                    os.write(2, f"standard output cannot be written ({error.strerror}): lines are dropped\n".encode())
            self.lost += len(data)
            return len(data)


def _nobody() -> None:
    """The reader has gone, and whoever had to know of it does."""


def when_unread(call: Callable[[], None]) -> None:
    """From now on, call this once if nobody reads the standard output any more, in place of a BrokenPipeError."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, Output):
        raw.unread = call


def open_standard_files(*, drops: bool) -> None:
    """Open those that are closed on /dev/null, and let the command outlive what its output goes to (see Output).

    drops: whether its work is worth more than its standard output, as that of a run is.
    Otherwise a checkpoint could get the number of standard output, and be mixed with what C code prints there. A run
    whose terminal closes, or whose log fills its disk, would fail at the first line that it prints, before its
    checkpoint. That nobody reads the standard output stays an error: it ends `tpformer ... | head`.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    for number in (1, 2):
        old = getattr(sys, NAMES[number])
        if not _has(old, number):
            continue  # a test or a caller has put something else in its place
        old.flush()
        raw = Output(number, "w", closefd=False)
        raw.unread = _nobody if number == 2 else None
        raw.drops = drops or number == 2
        new = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering or raw.isatty(),
            write_through=old.write_through,
        )
        setattr(sys, NAMES[number], new)


def _has(stream: Any, number: int) -> bool:
    """Whether a stream writes to the file of this number."""
    with suppress(OSError, AttributeError, ValueError):
        return stream.fileno() == number
    return False

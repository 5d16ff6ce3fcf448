"""Standard input, output and error of a command, which may be closed, or belong to a terminal that closes.

Importing this file does not import torch.
"""

import errno
import io
import os
import sys
from typing import Any

NAMES = ("stdin", "stdout", "stderr")


class _Terminal(io.FileIO):
    """What is written to a terminal that has closed is dropped. SIGHUP tells of it, and nobody reads the lines."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def open_standard_files() -> None:
    """Open those that are closed on /dev/null, and let output outlive the terminal.

    Otherwise a checkpoint could get the number of standard output, and be mixed with what C code prints there. A run
    that stops because its terminal closed would fail at the first line that it prints, before its checkpoint.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    for number in (1, 2):
        if os.isatty(number):
            old = getattr(sys, NAMES[number])
            old.flush()
            raw = io.BufferedWriter(_Terminal(number, "w", closefd=False))
            new = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, line_buffering=True)
            setattr(sys, NAMES[number], new)

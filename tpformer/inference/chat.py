"""A conversation with a model in a terminal, on any number of tensor-parallel ranks.

Rank 0 has the terminal and the transcript. It sends the tokens of each question to the other ranks, which only compute.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from .streaming import TextStream
from .transcript import Transcript

HELP = (
    "/reset forgets what was said; /system TEXT sets the system message, /system alone removes it; /save FILE writes "
    "the conversation; /quit or Ctrl-D ends it. Ctrl-C stops an answer"
)
# control characters could do anything to a terminal; a new line and a tab may stay
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal:
    """Standard input and output. Lines are edited, and a prompt is shown, only where input is a terminal.

    Notes go to standard error, so that the output of a pipe is the answers alone.
    """

    def __init__(self) -> None:
        # a forked rank has another sys.stdin, but the command's input is still open under its number
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
        self.interactive = sys.stdin.isatty()
        self.stopped = False
        self._console = Console(stderr=True, soft_wrap=True)
        signal.signal(signal.SIGINT, self._stop)
        if self.interactive:
            import readline  # noqa: F401  gives input() an editable line and a history

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def lines(self) -> Iterator[str]:
        """The lines that are typed, until the input ends. Ctrl-C in a line drops that line."""
        while True:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                line = input("> " if self.interactive else "")
            except KeyboardInterrupt:
                print(flush=True)
                continue
            except EOFError:
                return
            finally:
                signal.signal(signal.SIGINT, self._stop)
            self.stopped = False
            yield line

    def write(self, text: str) -> None:
        """Show a piece of an answer at once."""
        sys.stdout.write(CONTROL.sub("\ufffd", text))
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Show a sentence that is no part of an answer."""
        self._console.print(text, style="dim", markup=False, highlight=False)

"""Requests to stop that a process gets as signals.

Importing this file does not import torch.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """The signals of STOPS that ask this process to stop: all, but SIGHUP where `nohup` has it ignored."""
    return [each for each in STOPS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yield a list to which the number of every heeded signal is added while the context is open."""
    seen: list[int] = []
    previous = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in heeded()}
    try:
        yield seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

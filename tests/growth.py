"""How much memory of its own a process takes while something runs."""

import ctypes
import gc
import threading
from pathlib import Path


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def growth(work) -> int:
    """The most bytes of its own memory that this process has beyond what it began with while `work` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be seen
    before, seen, done = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(seen) - before

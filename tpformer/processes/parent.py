"""A rank ends when its launcher has ended, even if that was killed and could tell nobody.

Importing this file does not import torch.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # sys/prctl.h
POLL_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent, the process of that number, ends.

    On Linux the kernel does it at once. Elsewhere a thread looks once a second.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None or prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()
    elif os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)

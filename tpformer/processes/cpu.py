"""Settings of a process that computes on a CPU: its share of the cores, and memory that stays with it."""

import ctypes
import os
import sys

import torch

# glibc's mallopt: names from malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30


def share_cores() -> None:
    """cores / local ranks threads for this rank, so that ranks do not fight; OMP_NUM_THREADS goes before it."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def keep_freed_memory() -> None:
    """Reuse freed blocks below 1 GiB instead of returning them to the system.

    By default glibc returns a step's activations and faults them in again, which costs 2 to 5 % of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # other C libraries have none, and not the habit
        mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)

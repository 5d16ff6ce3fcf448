"""Ranks share a machine's cores, and freed memory stays with the process."""

import os
import resource
import sys

import pytest
import torch

from tpformer.processes.cpu import keep_freed_memory, share_cores


def test_cores_are_shared_out_unless_the_user_says_otherwise(monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks in ("1", "2", "1000"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        share_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share_cores()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert threads == [cores, max(1, cores // 2), 1], "nothing is set beside OMP_NUM_THREADS"


def faults() -> None:
    """Print the page faults of 20 steps that each touch 64 MiB and free them, behind a first one."""
    keep_freed_memory()
    found = []
    for _ in range(21):
        held = [torch.ones(2**21) for _ in range(8)]
        del held
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(found[-1] - found[0])


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again(commands):
    pages = 20 * 8 * 2**23 // resource.getpagesize()
    # without the setting a quarter to all of the pages fault, depending on the heap
    code, out, err = commands.call(faults).finish()
    assert code == 0 and int(out) < pages / 10, out + err

"""A rank's share of the cores, and memory that stays with the process."""

import resource
import subprocess
import sys

import pytest

THREADS = "import torch; from tpformer.distributed import share_cores; share_cores(); print(torch.get_num_threads())"

FAULTS = """
import resource, sys, torch
from tpformer.distributed import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def touch():
    a = [torch.ones(2**21) for _ in range(8)]  # 64 MiB, then freed
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(script: str, *arguments: str, **environment: str) -> int:
    command = [sys.executable, "-c", script, *arguments]
    variables = {"PATH": "/usr/bin:/bin", **environment}
    return int(subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_cores_are_shared_out_unless_the_user_says_otherwise():
    alone = run(THREADS)
    assert run(THREADS, LOCAL_WORLD_SIZE="2") == max(1, alone // 2)
    assert run(THREADS, LOCAL_WORLD_SIZE="1000") == 1
    assert run(THREADS, OMP_NUM_THREADS="1") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again():
    pages = 20 * 8 * 2**23 // resource.getpagesize()
    # without the setting between a quarter and all of them fault, as the heap happens to lie
    assert run(FAULTS, "keep") < pages / 10

"""Groups that lose a rank, in processes of their own: workers of the pool must not die.

Belongs here: starting such groups, and what their other ranks hear.
"""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def die() -> None:
    """End this rank as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def heard(folder: Path, file: str, function: str, size: int, names: Sequence[str]) -> dict[str, list[str]]:
    """By name: the RuntimeErrors of the ranks that live on, "" of one that hears nothing.

    function: of the test file `file`. Each of `size` ranks calls it with the name; one of them calls `die`.
    """
    here = Path(file).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here.parent, here)))}
    arguments = [Path(file).stem, function, str(folder), str(size), *names]
    command = [sys.executable, "-c", "import sys, lost_ranks; lost_ranks.main(*sys.argv[1:])", *arguments]
    subprocess.run(command, cwd=here, env=environment, check=True)
    return {name: [each.read_text() for each in sorted(folder.glob(f"{name}-*"))] for name in names}


def main(module: str, function: str, folder: str, size: str, *names: str) -> None:
    """Fork a group for each name, one after the other."""
    call = getattr(importlib.import_module(module), function)
    for name in names:
        started = []
        for rank in range(int(size)):
            started.append(os.fork())
            if started[-1] == 0:
                _live(call, name, Path(folder), rank, int(size))
        for process in started:
            os.waitpid(process, 0)


def _live(call: Callable[[str], object], name: str, folder: Path, rank: int, size: int) -> None:
    store = dist.FileStore(str(folder / f"store of {name}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    dist.barrier()
    try:
        call(name)
        said = ""
    except RuntimeError as error:
        said = str(error)
    (folder / f"{name}-{rank}").write_text(said)
    os._exit(0)  # without the end of a group that has lost a rank

"""Groups that lose a rank, in processes of their own: workers of the pool must not die.

Belongs here: starting such groups, and what their other ranks hear.
"""

import os
import signal
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from commands import Commands


def die() -> None:
    """End this rank as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def heard(
    commands: Commands, folder: Path, function: Callable, size: int, names: Sequence[str]
) -> dict[str, list[str]]:
    """By name: the RuntimeErrors of the ranks that live on, "" of one that hears nothing.

    function: each of `size` ranks calls it with the name; one of them calls `die`.
    """
    code, _, err = commands.call(_fork, folder, function, size, names).finish()
    assert code == 0, err
    return {name: [each.read_text() for each in sorted(folder.glob(f"{name}-*"))] for name in names}


def _fork(folder: Path, function: Callable[[str], object], size: int, names: Sequence[str]) -> None:
    """Fork a group for each name, one after the other."""
    for name in names:
        started = []
        for rank in range(size):
            started.append(os.fork())
            if started[-1] == 0:
                _live(function, name, folder, rank, size)
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

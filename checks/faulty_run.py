"""A `tpformer` command in a process of its own, in which something goes wrong.

Belongs here: faults inside of a run's processes, and the process itself. Which faults, and what must follow, is in
faults.py. Ranks are forks of the command, so they have its patches.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tpformer.distributed.dtensor import is_dtensor

PRELOAD = ["tpformer.cli.training", "tpformer.training.trainer", "torch.distributed.checkpoint", "checks.faulty_run"]

BATCH = 4  # samples of a step, by whose numbers a step is known


class Fault(NamedTuple):
    """What goes wrong: on which rank, in or after which step. file: the name of a checkpoint's file."""

    kind: str
    rank: int
    step: int
    file: str = ""


def once(folder: Path) -> bool:
    """Whether this is the first call of all processes and restarts of a job."""
    with suppress(FileExistsError):
        (folder / "fired").touch(exist_ok=False)
        return True
    return False


def _spoil(tensor: torch.Tensor) -> None:
    """Make an element of this rank's NaN."""
    tensor = tensor.detach()
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    local.view(-1)[0] = float("nan")


def _spoil_gradients(fault: Fault, folder: Path) -> None:
    """Raise, or make a weight or a gradient NaN, on one rank."""
    from tpformer.training.model import ModelParts

    original = ModelParts.gradients

    def gradients(self: ModelParts, batch: torch.Tensor, **options: Any) -> torch.Tensor:
        here, step = int(os.environ["RANK"]) == fault.rank, options["first_sample"] // BATCH + 1
        parameter = list(self.parameters())[2]
        if here and step == fault.step and fault.kind == "raise" and once(folder):
            raise LookupError(f"injected in step {fault.step}")
        if here and step == fault.step and fault.kind == "NaN in a weight":
            _spoil(parameter)
        loss = original(self, batch, **options)
        if here and step >= fault.step and fault.kind == "NaN in a gradient":
            assert parameter.grad is not None
            _spoil(parameter.grad)
        return loss

    ModelParts.gradients = gradients  # type: ignore[method-assign]


def _fill_disk(fault: Fault, folder: Path) -> None:
    """One write of a checkpoint's file fails on one rank."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    original = FileSystem.create_stream

    def create_stream(self: FileSystem, path: Any, mode: str) -> Any:
        if "w" in mode and int(os.environ["RANK"]) == fault.rank and once(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(self, path, mode)

    FileSystem.create_stream = create_stream


def _break_disk(fault: Fault, folder: Path) -> None:
    """One file of a checkpoint cannot be read."""
    from tpformer.training import checkpoint_files

    original = checkpoint_files.file_sha256

    def file_sha256(path: Path) -> str:
        if path.parent.name == f"step-{fault.step}" and path.name == fault.file:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return original(path)

    checkpoint_files.file_sha256 = file_sha256


def _slow_saves(fault: Fault, folder: Path) -> None:
    """A checkpoint stays unfinished long enough for a signal to find it so."""
    from tpformer.training.checkpoint import Checkpointer

    original = Checkpointer._publish

    def publish(*arguments: Any) -> None:
        time.sleep(0.5)
        original(*arguments)

    Checkpointer._publish = publish  # type: ignore[method-assign,assignment]


INJECTED: dict[str, Callable[[Fault, Path], None]] = {
    "raise": _spoil_gradients,
    "NaN in a weight": _spoil_gradients,
    "NaN in a gradient": _spoil_gradients,
    "ENOSPC": _fill_disk,
    "EIO on a read": _break_disk,
    "SIGTERM during a save": _slow_saves,
}


def _enter(folder: Path, number: int, arguments: list[str], fault: Fault | None) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if fault is not None and fault.kind in INJECTED:
        INJECTED[fault.kind](fault, folder)
    from tpformer import cli

    sys.argv = ["tpformer", *arguments]
    cli.main(arguments)


class Command:
    """A running command. folder: where its output is kept, as out-NUMBER and err-NUMBER."""

    def __init__(self, folder: Path, number: int, arguments: list[str], fault: Fault | None) -> None:
        self.files = [folder / f"{name}-{number}" for name in ("out", "err")]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.process = context.Process(target=_enter, args=(folder, number, arguments, fault))
        self.process.start()

    @property
    def said(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() for path in self.files if path.exists())

    def ranks(self) -> list[int]:
        """The process ids of its ranks, in rank order; none once it has ended."""
        pid = self.process.pid
        with suppress(OSError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None, and the end of all its processes, if it has not ended in time."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            for pid in (*self.ranks(), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)  # type: ignore[arg-type]
            self.process.join()
        return code

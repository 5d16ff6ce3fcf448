"""Checkpoints of a run: distributed (DCP, so they reshard), asynchronous, atomic, and verified before they are loaded.

A checkpoint is a directory step-N holding DCP's files and manifest.json: size and SHA-256 of every file. It is written
under a temporary name and renamed when complete, so an interrupted save leaves the previous ones whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

MANIFEST = "manifest.json"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file and what is wrong with it."""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(directory: Path) -> None:
    """Record size and SHA-256 of every file, and make all of it durable."""
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    entries = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in files}
    (directory / MANIFEST).write_text(json.dumps(entries, indent=1))
    for path in (*files, directory / MANIFEST, directory):
        _fsync(path)


def verify(directory: Path) -> None:
    """CheckpointError, naming the file, unless every file is there with the size and SHA-256 of the manifest."""
    try:
        entries = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} cannot be read: {error}") from None
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}")
        if _digest(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is corrupted: its SHA-256 differs from the manifest's")


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's checkpoints directory, ascending; none if it does not exist."""
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*") if path.is_dir())


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step}"


def newest_good(directory: Path, report: Callable[[str], None]) -> int | None:
    """Step of the newest checkpoint that verifies, None if there is none; each bad one is reported, none is touched."""
    for step in reversed(steps(directory)):
        try:
            verify(_path(directory, step))
            return step
        except CheckpointError as error:
            report(f"checkpoint of step {step} is not usable: {error}")
    return None


class Checkpointer:
    """Saves and loads a model and its optimizer, laid out in any way, in `directory`.

    Collective: all ranks construct it and call its methods in the same order. Saving uses a process group of its own,
    so that its collectives never meet those of training.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self.directory, self.keep = directory, keep
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
        self._pending: Future | None = None
        self._leader = dist.get_rank() == 0

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start saving; training may go on at once (the state is copied first). Waits for the save before."""
        self.wait()
        temporary = self.directory / f".saving-{step}"
        if self._leader:
            self.directory.mkdir(parents=True, exist_ok=True)
            for leftover in self.directory.glob(".saving-*"):
                shutil.rmtree(leftover)
        dist.barrier(self._group)
        saving = dcp.async_save(_state(step, model, optimizer), checkpoint_id=temporary, process_group=self._group)
        done: Future[None] = Future()
        self._pending = done
        saving.add_done_callback(lambda saved: self._finish(saved, temporary, step, done))

    def _finish(self, saving: Future, temporary: Path, step: int, done: Future) -> None:
        """In the saving thread, when DCP's files of all ranks are written: rank 0 seals and publishes them."""
        try:
            saving.result()
            if self._leader:
                write_manifest(temporary)
                final = _path(self.directory, step)
                if final.exists():  # a bad one of the same step, which the resumed run now replaces
                    shutil.rmtree(final)
                temporary.rename(final)
                _fsync(self.directory)
                for old in steps(self.directory)[: -self.keep]:
                    shutil.rmtree(_path(self.directory, old))
            done.set_result(None)
        except BaseException as error:  # DCP's CheckpointException is no Exception; the caller of wait() gets it
            done.set_exception(error)

    def wait(self) -> None:
        """Return when the save in progress, if any, is on disk; raises what went wrong in it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def newest(self, report: Callable[[str], None] = print) -> int | None:
        """Step of the newest good checkpoint, the same on all ranks; bad ones are reported by rank 0."""
        found = [newest_good(self.directory, report) if self._leader else None]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fill the model (and optimizer) in place from the checkpoint of a step, saved under any layout."""
        optimizers = [] if optimizer is None else [optimizer]
        state = _state(step, model, *optimizers)
        dcp.load(state, checkpoint_id=_path(self.directory, step), process_group=self._group)
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
            options=_OPTIONS,
        )


def _state(step: int, model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, list(optimizers), options=_OPTIONS)
    state: dict[str, Any] = {"model": model_state, "step": step}
    if optimizers:
        state["optimizer"] = optimizer_state
    return state

"""Checkpoints of a run. torch's distributed checkpoint (DCP) writes them, so any layout can load them.

They are written while training goes on, and verified before they are loaded. A checkpoint is a directory step-N with
DCP's files, trainer.json (the step and the trainer's own numbers) and manifest.json (size and SHA-256 of every file).
It is written under a temporary name and renamed when complete, so an interrupted save leaves the previous ones whole.
Tensors have the same global names on every part and rank: model.NAME, and optimizer.NAME.KEY for each key of a
parameter's optimizer state. What an exchange of gradients keeps is sums.NAME. Where replicas take steps by themselves,
model.NAME is what they have in common, and replica.R. stands before the names of replica R's own.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer

from tpformer.distributed.mesh import joining
from tpformer.parallel import Exchange
from tpformer.processes.files import file_sha256, fsync, naming
from tpformer.words import listed

from .checkpoint_files import (
    MANIFEST,
    MODEL,
    TRAINER,
    Writer,
    check_files,
    discard,
    manifest_entries,
    newest_good,
    read_note,
    read_tensors,
    remove_leftovers,
    saved_tensors,
    step_path,
    steps,
    write_manifest,
)
from .checkpoint_metadata import METADATA, CheckpointError
from .checkpoint_tensors import (
    check_pairs,
    first_not_finite,
    load_exchange,
    load_optimizer,
    load_own,
    model_tensors,
    of_replica,
    replicas_note,
    saved_replicas,
    state_tensors,
)

T = TypeVar("T")


# ranks


def _on_every_rank(group: ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """The results of `work` on all ranks of the group, by rank. group: None for this process alone.

    Communication: one all-gather of the pickled results. If `work` fails on some rank, all ranks raise the error of the
    first such rank: as CheckpointError if it is one, else as RuntimeError.
    """
    result, words, failure = None, None, None
    try:
        result = work()
    except (Exception, dcp.CheckpointException) as error:  # DCP's does not derive from Exception
        failure, words = error, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [(result, words, isinstance(failure, CheckpointError))]
    if group is not None:
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, everyone[0], group=group)
    for _, text, unusable in everyone:
        if text is not None:
            raise (CheckpointError if unusable else RuntimeError)(text) from failure
    return [one for one, _, _ in everyone]


def _words(error: BaseException) -> str:
    """An error in one line. DCP's has the traceback of every rank that failed; the first one's error is taken."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return str(error)


def load_checkpoint(
    path: Path,
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer] = (),
    exchange: Exchange | None = None,
    *,
    group: ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill parts, and optimizers and exchange if given, in place from a checkpoint. Returns the checkpoint's `extra`.

    group: its ranks' parts together must be the whole model, in any layout. None stands for this process alone.
    Of replicas that took steps by themselves, replica r takes what r modulo their number had of its own, and ranks that
    take steps together take the common model and the optimizer's state of replica 0.
    Communication: one all-gather of names and errors; each rank reads for itself.
    CheckpointError, on all ranks, for names or shapes that the model and the checkpoint do not share.
    """
    if optimizers:
        check_pairs(parts, optimizers)

    def load() -> tuple[set[str], set[str], dict[str, Any]]:
        own, replicas = None if exchange is None else exchange.replica, saved_replicas(path)
        prefix = of_replica((own or (0, 1))[0] % replicas) if replicas else ""
        loaded: set[str] = set()
        for part in parts:
            tensors = model_tensors(part)
            read_tensors(path, tensors)
            loaded |= {name.removeprefix(MODEL) for name in tensors}
        if exchange is not None:
            exchange.begin(anew=True)
        for part in parts if own is not None and replicas else ():
            load_own(path, part, prefix)
        for part, optimizer in zip(parts, optimizers, strict=False):
            load_optimizer(path, part, optimizer, prefix)
        step, extra = read_note(path)
        if exchange is not None:
            load_exchange(path, exchange, step)
        return loaded, set(saved_tensors(path, MODEL)), extra

    results = _on_every_rank(group, load)
    unused = results[0][1].difference(*(loaded for loaded, _, _ in results))
    if unused:
        raise CheckpointError(f"{path} is of another model: nothing here takes its {listed(unused)}")
    return results[0][2]


def choose_step(directory: Path, step: int | None, report: Callable[[str], None]) -> int:
    """A step in a run's checkpoints directory whose checkpoint is good: the wanted one, or the newest.

    If there are process groups, all ranks call it, and each reads its share of the files.
    Errors: FileNotFoundError without a checkpoint, or without one of that step; CheckpointError for a damaged one.
    """
    checkpointer = Checkpointer(directory) if dist.is_initialized() else None
    found = steps(directory)
    if not found:
        raise FileNotFoundError(f"{directory} has no checkpoint yet: train the run first")
    if step is None:
        newest = newest_good(directory, report) if checkpointer is None else checkpointer.newest(report)
        if newest is None:
            raise CheckpointError(f"{directory} has no usable checkpoint: {found} are damaged")
        return newest
    if step not in found:
        raise FileNotFoundError(f"{directory} has no checkpoint of step {step}: it has {', '.join(map(str, found))}")
    (check_files if checkpointer is None else checkpointer.verify)(step_path(directory, step))
    return step


class Checkpointer:
    """Saves and loads a model in parts, each with its optimizer, under any layout, in `directory`.

    Collective: all ranks construct it and call its methods in the same order. `directory` must be on a file system that
    they share. keep: how many of the newest checkpoints are kept. timeout: that of its own process group (gloo), which
    it makes so that saving does not disturb the collectives of training.
    report: is called on rank 0 with one line for what went wrong and needs no exception. on_saved: is called on rank 0
    with the step of each checkpoint, in the saving thread, when it is on disk and before an older one is removed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 2,
        timeout: timedelta = timedelta(minutes=30),
        report: Callable[[str], None] = print,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.directory, self.keep, self.on_saved = directory, keep, on_saved
        self.failures = 0  # how many saves in a row have failed, the same on all ranks
        with joining():
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._pending: Future | None = None
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._report = report if self._rank == 0 else lambda text: None

    def _leader_does(self, work: Callable[[], T]) -> T:
        """Do the work on rank 0. Its result is returned, or its error raised, on all ranks."""
        return _on_every_rank(self._group, lambda: work() if self._rank == 0 else None)[0]  # type: ignore[return-value]

    def save(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extra: Mapping[str, Any] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Start saving. Training may go on at once. First waits for the save before; if that failed, it is reported.

        Whether this save fails is said by `failed` and by `wait`, and prevents no later one.
        parts: this rank's, with one optimizer each. Names are global: a parameter in several parts or on several ranks
        must be equal in all, and is written once. extra: numbers, strings, lists and dicts, equal on all ranks, such as
        the loss scale and the position in the data. The learning rate follows from the step, so it needs no saving.
        exchange: what it keeps is saved, too.
        Memory: one copy of this rank's parameters and optimizer state in host memory until the save is done.
        Errors: ValueError for an optimizer that is not its part's, or whose state holds what is no tensor; TypeError
        for an extra that JSON cannot hold; FloatingPointError, on all ranks and before anything is written, if a
        parameter is not finite on some rank.
        """
        self.settle()
        check_pairs(parts, optimizers)
        note = json.dumps({"step": step, "extra": dict(extra or {})})
        tensors = state_tensors(parts, optimizers, exchange or Exchange())
        if offenders := [each for each in _on_every_rank(self._group, lambda: first_not_finite(parts)) if each]:
            raise FloatingPointError(f"checkpoint of step {step} is not saved: {offenders[0]} is not finite")
        temporary = self.directory / f".saving-{step}"

        def prepare() -> None:
            remove_leftovers(self.directory)
            with naming(temporary / TRAINER):
                self.directory.mkdir(exist_ok=True)  # without parents: a run directory that is gone stays gone
                temporary.mkdir()
                (temporary / TRAINER).write_text(note)

        done: Future[None] = Future()
        self._pending = done
        try:
            self._leader_does(prepare)
        except RuntimeError as error:
            self._fail(error, temporary, step, done)
            return
        stager = DefaultStager(StagingOptions(False, False, False, False))
        writer = Writer(temporary)
        saving = dcp.async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=stager)
        saving.add_done_callback(lambda saved: self._finish(saved, temporary, step, done))
        saving.add_done_callback(lambda _: stager.close())

    def _finish(self, saving: Future, temporary: Path, step: int, done: Future) -> None:
        """Add the manifest and publish. The saving thread calls it when DCP has written the files of all ranks."""
        try:
            saving.result()
            own = [temporary / TRAINER, temporary / METADATA] if self._rank == 0 else []
            own += temporary.glob(f"__{self._rank}_*.distcp")
            entries = _on_every_rank(self._group, lambda: manifest_entries(own))
            self._leader_does(
                lambda: self._publish(temporary, step, {k: v for part in entries for k, v in part.items()})
            )
            done.set_result(None)
        except BaseException as error:  # DCP's CheckpointException does not derive from Exception
            self._fail(error, temporary, step, done)

    def _fail(self, error: BaseException, temporary: Path, step: int, done: Future) -> None:
        """End a save that failed. What it wrote is removed, because it may be what fills the disk."""
        shutil.rmtree(temporary, ignore_errors=True)
        failure = RuntimeError(f"checkpoint {step_path(self.directory, step)} could not be written: {_words(error)}")
        failure.__cause__ = error
        done.set_exception(failure)

    def _publish(self, temporary: Path, step: int, entries: Mapping[str, Mapping[str, Any]]) -> None:
        if missing := [name for name in entries if not (temporary / name).is_file()]:
            raise RuntimeError(
                f"rank 0 does not see {listed(missing)} that other ranks wrote to {temporary}: the run directory must "
                f"be on a file system that all ranks share"
            )
        write_manifest(temporary, entries)
        final = step_path(self.directory, step)
        if os.path.lexists(final):  # a bad checkpoint of this step, which the resumed run replaces
            discard(final)
        temporary.rename(final)
        fsync(self.directory)
        try:
            self.on_saved(step)
            # checkpoints of later steps are bad ones, from before the run was resumed: they are kept as evidence
            for old in [other for other in steps(self.directory) if other <= step][: -self.keep]:
                discard(step_path(self.directory, old))
        except OSError as error:
            self._report(f"checkpoint {final} is saved, but older ones are kept: {error}")

    @property
    def failed(self) -> bool:
        """Whether the save in progress has ended on this rank, and has failed. It ends on other ranks soon after."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def on_any(self, flag: bool) -> bool:
        """Whether the flag is true on some rank. Communication: one all-gather of it."""
        return any(_on_every_rank(self._group, lambda: flag))

    def wait(self) -> None:
        """Return when the save in progress, if any, is on disk. If it failed, RuntimeError names its path, once."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.failures += 1
            pending.result()
            self.failures = 0

    def settle(self) -> None:
        """Return when no save is in progress. If the last one failed, that is reported."""
        try:
            self.wait()
        except RuntimeError as error:
            self._report(str(error))

    def newest(self, report: Callable[[str], None] = print) -> int | None:
        """The step of the newest good checkpoint, the same on all ranks, or None. Rank 0 reports bad ones.

        Each rank reads its share of the files.
        """
        self.settle()
        found = self._leader_does(lambda: steps(self.directory))
        tell = report if self._rank == 0 else lambda _: None
        return newest_good(self.directory, tell, among=found, check=self.verify)

    def verify(self, path: Path) -> None:
        """CheckpointError, on all ranks, for a checkpoint that is damaged, or that is not the same on all ranks.

        Each rank reads its share of the files.
        """

        def read() -> str:
            check_files(path, share=self._rank, of=self._ranks)
            return file_sha256(path / MANIFEST)

        found = _on_every_rank(self._group, read)
        if other := [rank for rank, digest in enumerate(found) if digest != found[0]]:
            raise CheckpointError(f"{path} of rank {other[0]} is another one than that of rank 0: they must share it")

    def load(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        exchange: Exchange | None = None,
    ) -> dict[str, Any]:
        """Fill what this rank has from a step's checkpoint, as load_checkpoint; returns its `extra`."""
        self.settle()
        path = step_path(self.directory, step)
        if self._rank == 0 and (note := replicas_note(path, exchange)):
            self._report(note)
        return load_checkpoint(path, parts, optimizers, exchange, group=self._group)

"""A checkpoint on disk, as one process sees it: its files, its manifest and its tensors. No process groups here."""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tpformer.processes.files import file_sha256, fsync, kind_of, naming, remove
from tpformer.words import listed, message, shown

from .checkpoint_metadata import METADATA, CheckpointError, MetadataReader, read_metadata

MANIFEST, TRAINER = "manifest.json", "trainer.json"
MODEL, OPTIMIZER, SUMS, REPLICA = "model.", "optimizer.", "sums.", "replica."


def manifest_entries(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """{name: size and SHA-256} of files. Returns when the files are on disk."""
    entries = {}
    for path in sorted(files):
        with naming(path):
            fsync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return entries


def write_manifest(directory: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a checkpoint's manifest. Returns when it and the directory are on disk."""
    with naming(directory / MANIFEST):
        (directory / MANIFEST).write_text(json.dumps(entries, indent=1))
        fsync(directory / MANIFEST)
        fsync(directory)


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. CheckpointError, which names the file, if there is none."""
    if not path.is_file():
        raise CheckpointError(f"{path} is {kind_of(path)}, where a checkpoint has a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object, but {str(found)[:40]}")
    return found


def _read_manifest(directory: Path) -> dict[str, tuple[int, str]]:
    """{name: (size, SHA-256)} of a checkpoint's files. CheckpointError if the manifest is malformed."""
    entries = {}
    for name, entry in _read_json(directory / MANIFEST).items():
        kinds = {key: type(value) for key, value in entry.items()} if isinstance(entry, dict) else {}
        if kinds != {"bytes": int, "sha256": str} or Path(name).name != name:
            raise CheckpointError(f"{directory / MANIFEST} is malformed: no file can be {shown(name)}: {shown(entry)}")
        entries[name] = (entry["bytes"], entry["sha256"])
    if missing := {METADATA, TRAINER} - entries.keys():
        raise CheckpointError(f"{directory / MANIFEST} is malformed: it has no {listed(missing)}")
    return entries


def read_note(directory: Path) -> tuple[int, dict[str, Any]]:
    """The step and the trainer's own numbers in a checkpoint's trainer.json. CheckpointError if it is malformed."""
    note = _read_json(directory / TRAINER)
    step, extra = note.get("step"), note.get("extra")
    if type(step) is not int or not isinstance(extra, dict):
        raise CheckpointError(f"{directory / TRAINER} is malformed: it needs a step and an extra: {str(note)[:80]}")
    return step, extra


def check_files(directory: Path, *, share: int = 0, of: int = 1) -> None:
    """CheckpointError, which names the file, for a checkpoint that cannot be used.

    Where a file and the manifest disagree, both are named: nothing says which of them is damaged.
    Every file must have the size and SHA-256 of the manifest, every file that .metadata names must be in the manifest,
    and the step in trainer.json must be that of the directory's name.
    share, of: read only the files share, share + of, share + 2 * of, ..., so that ranks can divide the reading.
    """
    entries = _read_manifest(directory)
    described = [METADATA, TRAINER]  # by share 0, which compares what they say
    for name in (described if share == 0 else []) + [name for name in entries if name not in described][share::of]:
        path, (size, digest) = directory / name, entries[name]
        if not path.is_file():
            raise CheckpointError(f"{path} is {kind_of(path)}, where {MANIFEST} names a file")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, and {size} in {MANIFEST}")
        try:
            found = file_sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if found != digest:
            raise CheckpointError(f"{path} is corrupted, or {MANIFEST} is: its SHA-256 there is another")
    if share == 0:
        named = {place.relative_path for place in read_metadata(directory).storage_data.values()}
        if unlisted := named - entries.keys():
            raise CheckpointError(f"{directory / MANIFEST} has no {listed(unlisted)}, which {METADATA} names")
        step = read_note(directory)[0]
        if directory.name != step_path(directory.parent, step).name:
            raise CheckpointError(f"{directory / TRAINER} is of step {step}, so the directory was renamed")


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's checkpoints directory, ascending; none if it does not exist.

    Only names that a save gives count: step-0100 or step-100.keep, for two, are copies that the user keeps.
    """
    names = (re.fullmatch("step-(0|[1-9][0-9]*)", path.name) for path in directory.glob("step-*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def discard(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a kill leaves no part of it that looks like one.

    A link to a checkpoint is removed, and not what it points to. OSError where that fails.
    """
    doomed = path.with_name(f".removing-{path.name}")
    path.rename(doomed)
    remove(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove what interrupted saves and removals left in a run's checkpoints directory, as far as that is possible."""
    for pattern in (".saving-*", ".removing-*"):
        for leftover in directory.glob(pattern):
            with suppress(OSError):
                remove(leftover)


def step_path(directory: Path, step: int) -> Path:
    """The checkpoint of a step in a run's checkpoints directory."""
    return directory / f"step-{step}"


def newest_good(
    directory: Path,
    report: Callable[[str], None],
    *,
    among: Sequence[int] | None = None,
    check: Callable[[Path], None] = check_files,
) -> int | None:
    """The step of the newest checkpoint that is good, or None. Bad ones are reported, and left as they are.

    among: the steps to look at, ascending; unset, all. check: raises CheckpointError for a bad checkpoint.
    """
    for step in reversed(steps(directory) if among is None else among):
        try:
            check(step_path(directory, step))
            return step
        except CheckpointError as error:
            report(f"checkpoint of step {step} is not usable: {message(error)}")
    return None


def read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors (plain or DTensor, on any device) in place, by global name, converting to their dtypes.

    There is no communication: this process reads the saved shards that overlap with the tensors, one at a time.
    CheckpointError for a name that the checkpoint lacks or holds in another shape.
    """
    reader = MetadataReader(path)
    saved = reader.read_metadata().state_dict_metadata
    if missing := tensors.keys() - saved.keys():
        raise CheckpointError(f"{path} is of another model: it has no {listed(missing)}")
    for name, tensor in tensors.items():
        if saved[name].size != tensor.shape:
            raise CheckpointError(
                f"{path} is of another model: its {name} is {tuple(saved[name].size)}, here {tuple(tensor.shape)}"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


def saved_tensors(path: Path, prefix: str) -> dict[str, TensorStorageMetadata]:
    """{name without prefix: shape and dtype} of a checkpoint's tensors. prefix: MODEL, OPTIMIZER or SUMS."""
    saved = read_metadata(path).state_dict_metadata
    return {name.removeprefix(prefix): entry for name, entry in saved.items() if name.startswith(prefix)}


class _Part(dcp.DefaultLoadPlanner):
    """Reads a part of a saved tensor. tensor: where the values go. begin: where they begin in the saved tensor."""

    def __init__(self, name: str, tensor: Tensor, begin: Sequence[int]) -> None:
        super().__init__()
        self.name, self.tensor, self.begin = name, tensor, begin

    def create_local_plan(self) -> dcp.LoadPlan:
        """One read item for each saved shard that overlaps with the part."""
        chunk = ChunkStorageMetadata(torch.Size(self.begin), self.tensor.size())
        saved = self.metadata.state_dict_metadata[self.name]
        return dcp.LoadPlan(create_read_items_for_chunk_list(self.name, saved, [chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that DCP's reader fills with what it reads for an index: the whole part, in its own dtype."""
        return self.tensor


def read_parts(path: Path, parts: Iterable[tuple[str, Tensor, Sequence[int]]]) -> None:
    """Fill plain tensors from parts of saved ones, converting to their dtypes.

    parts: (global name, tensor, where it begins in the saved one). This process reads the saved shards that overlap.
    Memory: one saved shard. dcp.load would read all parts in one plan, and keep one shard while it reads the next.
    """
    reader = MetadataReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for name, tensor, begin in parts:
        planner = _Part(name, tensor, begin)
        planner.set_up_planner({name: tensor}, metadata, is_coordinator=True)
        try:
            reader.read_data(planner.create_local_plan(), planner)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{error.filename} is gone since the checkpoint was chosen: a run that trains on removes its older "
                f"ones, so try again, or raise its checkpoint.keep"
            ) from None


class Writer(dcp.FileSystemWriter):
    """DCP's writer, with the operating system's words when a write fails. torch.save alone would say that it finds
    itself at an unexpected position of the file, and ranks do not send one another the causes of their errors."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write this rank's file. OSError names it, or the directory."""
        with naming(Path(self.path)):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list) -> None:
        """Write .metadata, on one rank. OSError names it."""
        with naming(Path(self.path, METADATA)):
            super().finish(metadata, results)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write a model's tensors, by their names in the model, as the new checkpoint `path`, in this process alone.

    Memory: one tensor at a time, if they are memory-mapped. OSError if that fails.
    """
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            named = {MODEL + name: tensor for name, tensor in tensors.items()}
            dcp.save(named, storage_writer=Writer(path), no_dist=True)
        except dcp.CheckpointException as error:  # which says that rank 0 failed, where there are no others
            raise error.failures[0][0] from None
    (path / TRAINER).write_text(json.dumps({"step": step, "extra": {}}))
    write_manifest(path, manifest_entries(path.iterdir()))

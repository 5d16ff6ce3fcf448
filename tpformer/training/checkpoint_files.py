"""A checkpoint on disk, as one process sees it: its files, its manifest and its tensors. No process groups here."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tpformer.processes.files import file_sha256
from tpformer.weights.files import listed

MANIFEST, TRAINER = "manifest.json", "trainer.json"
MODEL, OPTIMIZER = "model.", "optimizer."


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file or the tensor, and what is wrong with it."""


def fsync(path: Path) -> None:
    """Return when a file's or a directory's content is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def manifest_entries(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """{name: size and SHA-256} of files. Returns when the files are on disk."""
    entries = {}
    for path in sorted(files):
        fsync(path)
        entries[path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    return entries


def write_manifest(directory: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a checkpoint's manifest. Returns when it and the directory are on disk."""
    (directory / MANIFEST).write_text(json.dumps(entries, indent=1))
    fsync(directory / MANIFEST)
    fsync(directory)


def verify(directory: Path, *, share: int = 0, of: int = 1) -> None:
    """CheckpointError, which names the file, unless every file has the size and SHA-256 of the manifest.

    share, of: check only the files share, share + of, share + 2 * of, ..., so that ranks can divide the reading.
    """
    try:
        entries = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} cannot be read: {error}") from None
    for name, entry in list(entries.items())[share::of]:
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}")
        if file_sha256(path) != entry["sha256"]:
            raise CheckpointError(f"{path} is corrupted: its SHA-256 differs from the manifest's")


def steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's checkpoints directory, ascending; none if it does not exist."""
    names = (path.name.removeprefix("step-") for path in directory.glob("step-*") if path.is_dir())
    # step-100.keep, for one, is a copy that the user keeps
    return sorted(int(name) for name in names if name.isdecimal())


def step_path(directory: Path, step: int) -> Path:
    """The checkpoint of a step in a run's checkpoints directory."""
    return directory / f"step-{step}"


def newest_good(
    directory: Path,
    report: Callable[[str], None],
    *,
    among: Sequence[int] | None = None,
    check: Callable[[Path], None] = verify,
) -> int | None:
    """The step of the newest checkpoint that is good, or None. Bad ones are reported, and left as they are.

    among: the steps to look at, ascending; unset, all. check: raises CheckpointError for a bad checkpoint.
    """
    for step in reversed(steps(directory) if among is None else among):
        try:
            check(step_path(directory, step))
            return step
        except CheckpointError as error:
            report(f"checkpoint of step {step} is not usable: {error}")
    return None


def read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors (plain or DTensor, on any device) in place, by global name, converting to their dtypes.

    There is no communication: this process reads the saved shards that overlap with the tensors, one at a time.
    CheckpointError for a name that the checkpoint lacks or holds in another shape.
    """
    reader = dcp.FileSystemReader(path)
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
    """{name without prefix: shape and dtype} of a checkpoint's tensors. prefix: MODEL or OPTIMIZER."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
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
        """Where the values of the part go."""
        return self.tensor


def read_parts(path: Path, parts: Mapping[str, tuple[Tensor, Sequence[int]]]) -> None:
    """Fill plain tensors from parts of saved ones, by global name, converting to their dtypes.

    parts: {name: (tensor, where it begins in the saved one)}. This process reads the saved shards that overlap.
    Memory: one saved shard. dcp.load would read all parts in one plan, and keep one shard while it reads the next.
    """
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for name, (tensor, begin) in parts.items():
        planner = _Part(name, tensor, begin)
        planner.set_up_planner({name: tensor}, metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner)


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Write a model's tensors, by their names in the model, as the new checkpoint `path`, in this process alone.

    Memory: one tensor at a time, if they are memory-mapped. OSError if that fails.
    """
    path.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({MODEL + name: tensor for name, tensor in tensors.items()}, checkpoint_id=path, no_dist=True)
    (path / TRAINER).write_text(json.dumps({"step": step, "extra": {}}))
    write_manifest(path, manifest_entries(path.iterdir()))

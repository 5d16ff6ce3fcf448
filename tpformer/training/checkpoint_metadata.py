"""A checkpoint's .metadata, which DCP writes as a pickle, read without running anything that the pickle names.

The classes that DCP's metadata needs are replaced by records that only keep their state. The metadata is then built
from the records, and every field is checked.
"""

import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tpformer.words import shown

METADATA = ".metadata"
_CLASSES = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("pathlib._local", "WindowsPath"),
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file or the tensor, and what is wrong with it."""


class _FileRange(NamedTuple):
    """Where a saved shard lies: the file, and the bytes in it. The names are those that DCP's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


class _Restricted(pickle.Unpickler):
    """Knows the names of DCP's metadata alone, and gives each unpickling records of its own."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # a class that is made here can be changed by the pickle without anything else noticing
        self._records = {place: type(place[1], (_Record,), {}) for place in _CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        """The record of a class, or CheckpointError, which names what no checkpoint needs."""
        if (module, name) in _CLASSES:
            return self._records[module, name]
        if (module, name) in _VALUES:
            return lambda *arguments: arguments
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs and which was not loaded")


class _Record:
    """Keeps the state of an object that was pickled."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _size(value: Any) -> torch.Size:
    (numbers,) = value  # the arguments with which torch.Size was to be called
    if any(number < 0 for number in numbers):
        raise ValueError(f"the size {numbers} is negative")
    return torch.Size(numbers)


def _tensor(record: _Record) -> TensorStorageMetadata:
    fields = record.state
    dtype, size = fields["properties"].state[0], _size(fields["size"])
    chunks = [ChunkStorageMetadata(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in fields["chunks"]]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(dtype)} is no dtype")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"the shards do not add up to a tensor of {tuple(size)}")
    for chunk in chunks:
        ends = [first + length for first, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > length for end, length in zip(ends, size, strict=True)):
            raise ValueError(f"a shard ends at {ends} in a tensor of {tuple(size)}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _file_range(record: _Record) -> _FileRange:
    """Where a shard lies. ValueError for a file outside of the checkpoint's folder, and for negative bytes."""
    fields = record.state
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if Path(file).name != file or min(offset, length) < 0:
        raise ValueError(f"no file of the checkpoint has bytes {offset} to {offset + length} of {shown(file)}")
    return _FileRange(file, int(offset), int(length))


def _metadata(record: _Record) -> Metadata:
    """The metadata of a record, where only tensors are saved. Any exception stands for a record of another kind."""
    fields = record.state
    tensors = {name: _tensor(entry) for name, entry in fields["state_dict_metadata"].items()}
    places = {}
    for key, entry in fields["storage_data"].items():
        offset = key.state.get("offset")
        places[MetadataIndex(key.state["fqn"], None if offset is None else _size(offset))] = _file_range(entry)
    for name, entry in tensors.items():
        if not isinstance(name, str) or any(MetadataIndex(name, chunk.offsets) not in places for chunk in entry.chunks):
            raise ValueError(f"it does not say where {name} lies")
    return Metadata(tensors, planner_data=None, storage_data=places)


def read_metadata(path: Path) -> Metadata:
    """What a checkpoint's directory says of its tensors. CheckpointError if that is not DCP's metadata of tensors."""
    try:
        with (path / METADATA).open("rb") as file:
            return _metadata(_Restricted(file).load())
    except Exception as error:  # pickle raises exceptions of any kind for damaged files
        words = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path / METADATA} cannot be used: {words}") from None


class MetadataReader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint's directory. Its metadata comes from read_metadata, its tensors from torch.load with
    weights_only=True; objects that are no tensors are refused by read_metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As the function. DCP passes arguments that matter for other layouts of files only."""
        return read_metadata(Path(self.path))

"""Safetensors files: one directory's tensors read by slices, and new files written through a memory map.

Tensors of both are memory-mapped, so their bytes are the system's file cache and none of this process's own memory.
The format is 8 bytes (the header's length), a JSON header, and the tensors' bytes:
https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpformer.words import listed, printable

from .family import read_json
from .folder import inside

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8} | {
    "BOOL": torch.bool
}
WRITTEN = DTYPES | {"F8_E4M3": torch.float8_e4m3fn}
MAX_FILE_BYTES = 5 * 10**9
ALIGNMENT = 8


class Spec(NamedTuple):
    """What a tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def _files(directory: Path) -> dict[str, set[str] | None]:
    """{file name: the tensors that the index promises there}; None without an index. All lie in the directory."""
    if inside(directory, SINGLE).is_file():
        return {SINGLE: None}
    if inside(directory, INDEX).is_file():
        places = read_json(directory / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{directory / INDEX} has no weight_map")
        files: dict[str, set[str] | None] = {}
        for tensor, file in places.items():
            files.setdefault(str(file), set()).add(tensor)  # type: ignore[union-attr]
        for file in files:
            inside(directory, file)
        return files
    if list(directory.glob("pytorch_model*.bin")):
        raise FileNotFoundError(
            f"{directory} has its weights as pytorch_model.bin only, a pickle that could run any program: convert a "
            f"model that you trust by transformers' from_pretrained and save_pretrained, which writes safetensors"
        )
    raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}")


class TensorFiles:
    """The tensors of a directory's safetensors files, by name: their specs, and slices of their values.

    Opening it reads headers only. Errors, with the file's name: FileNotFoundError for a file that is missing;
    ValueError for one that is damaged or differs from the index, and for tensors in other than 16 to 64 bit floats.
    integers: tensors of integers and booleans are read, too, as a module's buffers may be.
    """

    def __init__(self, directory: Path, *, integers: bool = False) -> None:
        self.directory = directory
        dtypes = DTYPES | INTEGERS if integers else DTYPES
        self.specs: dict[str, Spec] = {}
        self._opened: dict[str, Any] = {}
        odd: dict[str, str] = {}
        files = sorted(_files(directory).items())
        if absent := [file for file, _ in files if not (directory / file).is_file()]:
            raise FileNotFoundError(f"{printable(directory / absent[0])} does not exist, but {INDEX} names it")
        for file, promised in files:
            path = directory / file
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{printable(path)} is damaged: {printable(error, 200)}") from None
            names = set(opened.keys())
            if promised is not None and names != promised:
                raise ValueError(f"{path} and {INDEX} differ in {listed(names ^ promised)}")
            for name in names:
                entry = opened.get_slice(name)
                kind = entry.get_dtype()
                odd |= {} if kind in dtypes else {name: kind}
                self.specs[name] = Spec(tuple(entry.get_shape()), dtypes.get(kind, torch.uint8))
                self._opened[name] = opened
        if odd:
            name, kind = min(odd.items())
            raise ValueError(
                f"{directory} has {len(odd)} tensors that are not floats of 16, 32 or 64 bits, such as "
                f"{printable(name, 80)} in {kind}: quantized weights are not read"
            )

    def slice(self, name: str) -> Any:
        """A tensor's values on disk. Index it with slices of all dims to get a memory-mapped Tensor."""
        return self._opened[name].get_slice(name)


def create_file(path: Path, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """A new safetensors file of these tensors. What is written into the tensors that it returns is in the file.

    OSError if the disk has no room for it, before anything is returned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, offset = {}, 0
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):  # so that each is aligned to its dtype
        begins[name], end = offset, offset + specs[name].nbytes
        kind = next(kind for kind, dtype in WRITTEN.items() if dtype == specs[name].dtype)
        header[name] = {"dtype": kind, "shape": list(specs[name].shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start, size = ALIGNMENT + len(text), ALIGNMENT + len(text) + offset
    with path.open("xb") as file:
        file.write(len(text).to_bytes(ALIGNMENT, "little") + text)
        file.flush()
        if hasattr(os, "posix_fallocate"):  # a write into a map of a full disk would end the process by a signal
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
    whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return {
        name: whole[start + begin : start + begin + specs[name].nbytes].view(specs[name].dtype).view(specs[name].shape)
        for name, begin in begins.items()
    }


def plan_files(specs: Mapping[str, Spec], max_file_bytes: int = MAX_FILE_BYTES) -> dict[str, dict[str, Spec]]:
    """{file name: its tensors}, in the order of `specs`: each file has at most max_file_bytes, or one tensor."""
    files: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if files[-1] and filled + spec.nbytes > max_file_bytes:
            files.append({})
            filled = 0
        files[-1][name] = spec
        filled += spec.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{number:05}-of-{len(files):05}.safetensors": part for number, part in enumerate(files, 1)}


def write_index(directory: Path, files: Mapping[str, Mapping[str, Spec]]) -> None:
    """Write the index of several files; a single file needs none."""
    if len(files) > 1:
        total = sum(spec.nbytes for specs in files.values() for spec in specs.values())
        places = {name: file for file, specs in files.items() for name in specs}
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2))

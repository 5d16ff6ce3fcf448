"""A run's model as safetensors: writing an export, and reading it back.

An export is a directory with config.json and model.safetensors, or with several model-0000i-of-0000n.safetensors and
model.safetensors.index.json, as Hugging Face lays them out. One process writes it, without a process group or a GPU.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from tpformer.models import GPT, GPTConfig
from tpformer.ops.transport import dtype_name

from .checkpoint import MODEL, choose_step, read_tensors, saved_tensors, step_path
from .resolve import read_run_config

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
VOCABULARY_TABLES = ("embed_tokens.weight", "lm_head.weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    report: Callable[[str], None] = print,
) -> int:
    """Write the model of a run's checkpoint to the new directory `out`; returns the checkpoint's step.

    step: unset, the newest good checkpoint; bad ones are reported. dtype: float32 or bfloat16; unset, that of the
    parameters. Vocabulary tables keep vocab_size rows: their padding rows are zero, never predicted, and left out.
    Memory: one file's tensors (max_shard_bytes, or one tensor if it is larger) and one saved shard.
    Errors, before anything is written: FileNotFoundError without a run, a checkpoint or one of that step; ValueError if
    `out` is not empty; CheckpointError for a damaged checkpoint. A failure after that leaves no `out`.
    """
    config = read_run_config(run).model.architecture
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory: give --out a new one")
    step = choose_step(run / "checkpoints", step, report)
    source = step_path(run / "checkpoints", step)
    saved = saved_tensors(source, MODEL)
    dtypes = {name: DTYPES[dtype] if dtype else entry.properties.dtype for name, entry in saved.items()}
    temporary = out.absolute().with_name(f".exporting-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        names = sorted({dtype_name(one) for one in dtypes.values()})
        facts = {"dtype": ", ".join(names), "step": step, "source": str(source.absolute())}
        (temporary / CONFIG).write_text(json.dumps(dataclasses.asdict(config) | facts, indent=2) + "\n")
        _write_shards(temporary, source, config, saved, dtypes, max_shard_bytes)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return step


def _reading_order(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layers.2 before layers.10, as people would."""
    return [(len(word) if word.isdigit() else 0, word) for word in name.split(".")]


def _write_shards(
    directory: Path,
    source: Path,
    config: GPTConfig,
    saved: Mapping[str, TensorStorageMetadata],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
) -> None:
    files: list[list[str]] = [[]]
    filled = total = 0
    for name in sorted(saved, key=_reading_order):
        nbytes = saved[name].size.numel() * dtypes[name].itemsize
        if files[-1] and filled + nbytes > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: torch.empty(saved[name].size, dtype=dtypes[name]) for name in names}
        read_tensors(source, {MODEL + name: tensor for name, tensor in tensors.items()})
        for table in tensors.keys() & set(VOCABULARY_TABLES):
            tensors[table] = tensors[table][: config.vocab_size]
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, directory / file, metadata={"format": "pt"})
        shutil.copymode(directory / CONFIG, directory / file)  # safetensors lets only the owner read its files
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def export_config(directory: Path) -> GPTConfig:
    """The architecture of an export. GPT(export_config(directory)) is a model that takes its tensors."""
    values = json.loads((directory / CONFIG).read_text())
    return GPTConfig(**{field.name: values[field.name] for field in dataclasses.fields(GPTConfig)})


@torch.no_grad()
def load_export(directory: Path, model: GPT) -> None:
    """Fill a GPT, or a part of one, in place from an export. In any layout each rank reads its own slices.

    Values are converted to the parameters' dtypes; padding rows of the vocabulary become zero. No communication.
    ValueError for a parameter that the export lacks or holds in another shape.
    """
    index = directory / INDEX
    places = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for name, parameter in model.state_dict().items():
        path = directory / places.get(name, "model.safetensors")
        wanted = tuple(parameter.shape)
        if name in VOCABULARY_TABLES:
            wanted = (model.config.vocab_size, *wanted[1:])
        with safe_open(path, framework="pt") if path.is_file() else nullcontext() as file:
            values = file.get_slice(name) if file is not None and name in file.keys() else None
            shape = None if values is None else tuple(values.get_shape())
            if shape != wanted:
                raise ValueError(f"{directory} is of another model: it has {name} as {shape}, wanted {wanted}")
            _fill(parameter, values, wanted)


def _fill(parameter: Tensor, values: Any, shape: tuple[int, ...]) -> None:
    """Fill this process's part of a parameter from a safetensors slice. What lies beyond the slice becomes zero."""
    local, offsets = parameter, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        local, offsets = parameter.to_local(), parameter.__create_chunk_list__()[0].offsets
    bounds = [(first, min(first + n, size)) for first, n, size in zip(offsets, local.shape, shape, strict=True)]
    local.zero_()
    if all(first < last for first, last in bounds):
        there = tuple(slice(last - first) for first, last in bounds)
        local[there] = values[tuple(slice(*bound) for bound in bounds)].to(local)

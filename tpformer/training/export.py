"""A run's model as safetensors: for this library (`tpformer`), or for transformers and vLLM (`hf`).

An export is a directory with config.json and model.safetensors, or with several model-0000i-of-0000n.safetensors and
model.safetensors.index.json, as Hugging Face lays them out. One process writes it, without a process group or a GPU.
"""

import dataclasses
import fcntl
import functools
import glob
import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tpformer.config.fp8 import FP8
from tpformer.processes.files import fsync, make_folder, naming
from tpformer.weights.families import family_for
from tpformer.weights.files import MAX_FILE_BYTES, Spec, create_file, plan_files, write_index
from tpformer.weights.tensors import Place, TensorMap, their_specs
from tpformer.words import dtype_name

from .checkpoint_files import MODEL, read_parts, saved_tensors, step_path
from .companions import CONFIG, companions_of, copy_companions, token_ids, write_byte_tokenizer
from .export_blocks import QUANTIZATION_CONFIG, SCALES, block_specs, quantised, write_blocks
from .resolve import read_run_config
from .source import choose_checkpoint

LOCK = "tpformer.lock"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    file_format: str = "tpformer",
    weights: str = "16",
    max_shard_bytes: int = MAX_FILE_BYTES,
    report: Callable[[str], None] = print,
) -> int:
    """Write the model of a run's checkpoint to the new directory `out`; returns the checkpoint's step.

    step: unset, the newest good checkpoint; bad ones are reported. dtype: float32 or bfloat16; unset, that of the
    parameters. file_format: "tpformer", or "hf" for the names of the plainest family of transformers' models that can
    say the architecture, with the tokenizer and the settings of generation where the run has them. weights: "fp8" for
    blocks of e4m3 in the linears of layers, of the numbers in `dtype` (export_blocks.py); with "hf" alone.
    Vocabulary tables keep vocab_size rows: their padding rows are zero, never predicted, and left out.
    Memory: one saved shard of a tensor, or the stacked experts of a layer; the files are memory-mapped.
    Errors, before anything is written: FileNotFoundError without a run, a checkpoint or one of that step; ValueError if
    `out` is not empty, for an architecture that no family can say, and for weights that cannot be in FP8;
    CheckpointError for a checkpoint that is damaged, or of another model than config.toml describes. A failure after
    that leaves no `out`.
    """
    config = read_run_config(run)
    architecture = config.model.architecture
    family = family_for(architecture) if file_format == "hf" else None
    with new_directory(out) as temporary:
        step = choose_checkpoint(run, architecture, step, report)
        source = step_path(run / "checkpoints", step)
        saved = saved_tensors(source, MODEL)
        tensors = TensorMap(family, architecture)
        dtypes = {name: DTYPES[dtype] if dtype else entry.properties.dtype for name, entry in saved.items()}
        specs, in_blocks = their_specs(tensors, dtypes), {}
        if weights == FP8:
            in_blocks = quantised(tensors)
            specs = block_specs(specs, in_blocks)
        if family is None:
            facts = {"dtype": ", ".join(sorted(map(dtype_name, set(dtypes.values())))), "step": step}
            values = dataclasses.asdict(architecture) | facts | {"source": str(source.absolute())}
        else:
            values = family.write(architecture) | _companions(run, config.data.tokenizer, temporary, report)
            values["torch_dtype"] = dtype_name(functools.reduce(torch.promote_types, dtypes.values()))
            values |= {"quantization_config": QUANTIZATION_CONFIG} if in_blocks else {}
        (temporary / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        files = plan_files(specs, max_shard_bytes)
        _write(temporary, source, tensors, files, {name: dtypes[name] for name in in_blocks})
    return step


def _companions(run: Path, tokenizer: str | None, out: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Let the tokenizer and what goes with it travel along. Returns the ids of special tokens, for config.json."""
    if tokenizer == "bytes":
        return write_byte_tokenizer(out)
    directory = companions_of(run, tokenizer)
    if directory is None or not copy_companions(directory, out):
        report(
            f"no tokenizer travels along: {f'{run} has none' if tokenizer is None else f'{tokenizer} does not exist'}"
        )
    return token_ids(directory, tokenizer)


def _write(
    directory: Path,
    source: Path,
    tensors: TensorMap,
    files: Mapping[str, Mapping[str, Spec]],
    in_blocks: Mapping[str, torch.dtype],
) -> None:
    """in_blocks: the dtypes whose numbers are quantised, of the parameters that are in FP8."""
    for file, specs in files.items():
        made = create_file(directory / file, specs)
        for name, places in tensors.places.items():
            if name in in_blocks:
                _write_quantised(source, name, places[0], in_blocks[name], made)
                continue
            blocks = [place for place in places if place.theirs in made]
            _write_blocks(source, MODEL + name, blocks, made, whole=len(places) == 1)
        del made
        fsync(directory / file)
    write_index(directory, files)


def _write_quantised(
    source: Path, name: str, place: Place, dtype: torch.dtype, made: Mapping[str, torch.Tensor]
) -> None:
    """Write a parameter in FP8, and its scales, which another file may have."""
    if place.theirs in made or place.theirs + SCALES in made:
        weight = torch.empty(place.shape, dtype=dtype)
        read_parts(source, [(MODEL + name, weight, place.begin)])
        write_blocks(weight, place.theirs, made)


def _write_blocks(
    source: Path, name: str, blocks: Sequence[Place], made: Mapping[str, torch.Tensor], *, whole: bool
) -> None:
    """Write a parameter's blocks into the tensors of theirs. whole: it has one, which is read in place."""
    if not blocks:
        return
    if whole:
        (block,) = blocks
        read_parts(source, [(name, block.whole(made[block.theirs]), block.begin)])
        return
    # the experts that are stacked: read once, and not once for each expert
    entry = saved_tensors(source, MODEL)[name.removeprefix(MODEL)]
    stacked = torch.empty(entry.size, dtype=made[blocks[0].theirs].dtype)
    read_parts(source, [(name, stacked, (0,) * stacked.ndim)])
    for block in blocks:
        there = tuple(slice(at, at + size) for at, size in zip(block.begin, block.shape, strict=True))
        block.whole(made[block.theirs]).copy_(stacked[there])


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield an empty directory beside `out`, which becomes `out` at the end; after an error it is removed.

    What a killed process left there of an earlier attempt is removed, too.
    ValueError if `out` exists and is not an empty directory, before and also at the end, is the current one, or cannot
    be made. OSError, which names a path, where the disk is full.
    """
    taken = ValueError(f"{out} exists and is not an empty directory: give --out a new one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise taken
    if out.resolve() == Path.cwd():  # empty; the new one takes its place, and a shell would be left in the old one
        raise ValueError(f"{out} is the current directory: give --out a new one")
    out = out.absolute()
    try:
        make_folder(out.parent)
        _remove_dead(out)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out} cannot be made: {error.strerror}") from None
    try:
        with naming(out), (temporary / "new").open("w") as lock:
            with suppress(OSError):  # a file system without locks: then nobody takes this process for dead
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                print(platform.node(), file=lock, flush=True)
                (temporary / "new").rename(temporary / LOCK)
            whole = temporary / "whole"
            whole.mkdir()  # as readable as other directories, which mkdtemp's is not
            yield whole
            try:
                whole.rename(out)
            except OSError:
                if out.exists():
                    raise taken from None
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_dead(out: Path) -> None:
    """Remove the directories of new_directory whose process is dead: a process of this machine whose lock is free."""
    for path in out.parent.glob(f".{glob.escape(out.name)}-*/{LOCK}"):
        with suppress(OSError), path.open("r+") as lock:
            if lock.read().strip() == platform.node():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent)

"""`tpformer import`: weights of another library as a run, which generates, evaluates, exports and starts others."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpformer.config import GPTConfig, ModelSection, RunConfig, RunSection, to_toml
from tpformer.weights.files import Spec, create_file
from tpformer.weights.tensors import fill, parameter_shapes

from .checkpoint_files import step_path, write_checkpoint
from .companions import COMPANIONS, CONFIG, FOLDER, TOKENIZER, copy_companions
from .export import new_directory
from .source import WeightsSource, open_source


def import_weights(directory: Path, out: Path, report: Callable[[str], None] = print) -> GPTConfig:
    """Make the run `out` of a Hugging Face directory, or of an export. Returns its architecture.

    The run has config.toml, the checkpoint of step 0 with the tensors as they are, in their dtypes, and a folder with
    the tokenizer, the settings of generation and their config.json. Vocabulary tables are not padded
    (vocab_multiple = 1).
    Memory: one tensor; the files are memory-mapped. Disk: while it works, a second copy of all experts.
    Errors, before anything is written: those of open_source; ValueError if `directory` is a run, or if `out` exists and
    is not an empty directory. A failure after that leaves no `out`.
    """
    with new_directory(out) as temporary:
        source = open_source(directory, report=report)
        if not isinstance(source, WeightsSource):
            raise ValueError(f"{directory} is a run already: it needs no import")
        folder = temporary / FOLDER
        folder.mkdir()
        copied = copy_companions(directory, folder, (*COMPANIONS, CONFIG))
        if TOKENIZER not in copied:
            report(f"{directory} has no {TOKENIZER}: the run has no tokenizer")
        model = ModelSection(**dataclasses.asdict(source.architecture) | {"vocab_multiple": 1})
        config = RunConfig(run=RunSection(dir=str(out)), model=model)  # the folder says what the tokenizer is
        (temporary / "config.toml").write_text(to_toml(config), encoding="utf-8")
        with _tensors(source, temporary / "stacked.safetensors") as tensors:
            write_checkpoint(step_path(temporary / "checkpoints", 0), tensors, 0)
    return source.architecture


@contextmanager
def _tensors(source: WeightsSource, path: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the model's tensors by their names, memory-mapped. Those that stack experts, each of which has tensors of
    its own, are put together in a file at `path`, which is removed."""

    def read(theirs: str) -> Any:
        return source.files.slice(source.names[theirs])

    places = source.tensors.places
    shapes, specs = parameter_shapes(source.architecture), source.files.specs
    stacked = {}
    for name, blocks in places.items():
        if len(blocks) > 1:
            dtypes = [specs[source.names[block.theirs]].dtype for block in blocks]
            stacked[name] = Spec(shapes[name], functools.reduce(torch.promote_types, dtypes))
    found = create_file(path, stacked) if stacked else {}
    for name, blocks in places.items():
        if name in stacked:
            fill(found[name], blocks, read)
        else:
            found[name] = blocks[0].whole(read(blocks[0].theirs))
    yield found
    path.unlink(missing_ok=True)

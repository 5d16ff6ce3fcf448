"""`tpformer import`: weights of another library as a run, which generates, evaluates, exports and starts others."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from tpformer.config import GPTConfig, ModelSection, RunConfig, RunSection, to_toml

from .checkpoint_files import step_path, write_checkpoint
from .companions import CONFIG, FOLDER, TOKENIZER, copy_companions
from .export import new_directory
from .source import WeightsSource, open_source


def import_weights(directory: Path, out: Path, report: Callable[[str], None] = print) -> GPTConfig:
    """Make the run `out` of a Hugging Face directory, or of an export. Returns its architecture.

    The run has config.toml, the checkpoint of step 0 with the tensors as they are, in their dtypes, and a folder with
    the tokenizer, the settings of generation and their config.json. Vocabulary tables are not padded
    (vocab_multiple = 1).
    Memory: one tensor; the files are memory-mapped.
    Errors, before anything is written: those of open_source; ValueError if `directory` is a run, or if `out` exists and
    is not an empty directory. A failure after that leaves no `out`.
    """
    with new_directory(out) as temporary:
        source = open_source(directory, report=report)
        if not isinstance(source, WeightsSource):
            raise ValueError(f"{directory} is a run already: it needs no import")
        folder = temporary / FOLDER
        folder.mkdir()
        copied = copy_companions(directory, folder)
        shutil.copyfile(directory / CONFIG, folder / CONFIG)
        if TOKENIZER not in copied:
            report(f"{directory} has no {TOKENIZER}: the run has no tokenizer")
        model = ModelSection(**dataclasses.asdict(source.architecture) | {"vocab_multiple": 1})
        config = RunConfig(run=RunSection(dir=str(out)), model=model)  # the folder says what the tokenizer is
        (temporary / "config.toml").write_text(to_toml(config), encoding="utf-8")
        tensors = {
            name: place.whole(source.files.slice(source.names[place.theirs]))
            for name, place in source.tensors.places.items()
        }
        write_checkpoint(step_path(temporary / "checkpoints", 0), tensors, 0)
    return source.architecture

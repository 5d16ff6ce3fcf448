"""Complete a configuration from its data, or read one from a run's directory. Nothing here imports torch."""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpformer.config import RunConfig, build_config, preset, read_toml
from tpformer.processes.files import is_there
from tpformer.weights.family import read_json

from .companions import FOLDER, TOKENIZER, byte_tokenizer, kept_tokenizer
from .data import IndexedDataset, check_ends, check_vocab, dataset_paths, load_tokenizer, read_sidecar

# what of a tokenizer.json turns text into ids and back; the rest is templates, padding and truncation
_CONTENT = ("added_tokens", "decoder", "model", "normalizer", "pre_tokenizer")


def tokenizer_name(config: RunConfig) -> str:
    """The configured tokenizer, or else that of the first training dataset. ValueError if neither is known."""
    if config.data.tokenizer:
        return config.data.tokenizer
    if not config.data.train:
        raise ValueError(
            "the model has no tokenizer.json, so its tokenizer is unknown: set data.tokenizer in config.toml"
        )
    sidecar = read_sidecar(config.data.train[0])
    if sidecar is None:
        raise ValueError(
            f"{config.data.train[0]}.json does not exist, so the dataset's tokenizer is unknown: set data.tokenizer"
        )
    return sidecar["tokenizer"]


def same_tokenizer(one: str, other: str) -> bool | None:
    """Whether two tokenizers, each "bytes" or the path of a tokenizer.json, turn every text into the same ids.

    Files are compared by their parts that do so, and "bytes" by the file that an export makes of it. If a file does not
    exist, a run's copy is compared by the path that it was copied from, and anything else cannot be told: None.
    ValueError for a file that is no JSON object.
    """
    if one == other:
        return True
    contents = []
    for name in (one, other):
        if name != "bytes" and not Path(name).is_file():
            return True if _origin(one) == _origin(other) else None
        content = byte_tokenizer() if name == "bytes" else read_json(Path(name))
        contents.append([content.get(key) for key in _CONTENT])
    return contents[0] == contents[1]


def _origin(name: str) -> str | None:
    """The path that a run's copy of a tokenizer was made from; the name itself for anything else."""
    run = Path(name).parent.parent
    copied = Path(name) == run / FOLDER / TOKENIZER and (run / "config.toml").is_file()
    return build_config(read_stored(run / "config.toml")).data.tokenizer if copied else name


def check_tokenizers(tokenizer: str, datasets: Sequence[str], owner: str) -> None:
    """ValueError for a dataset that was built with another tokenizer, as far as that can be told.

    tokenizer: that of `owner`, which is a dataset's prefix or a model's directory.
    """
    for prefix in datasets:
        built = (read_sidecar(prefix) or {}).get("tokenizer", tokenizer)
        if same_tokenizer(built, tokenizer) is False:
            raise ValueError(
                f"{prefix} was built with the tokenizer {built}, but {owner} has {tokenizer}: build the data with "
                f"`tpformer data build --tokenizer {tokenizer}`, or set data.tokenizer if they agree"
            )


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with vocab_size, tokenizer, the optimizer's momentum and, if documents are separated,
    end_of_document filled in.

    An unset vocab_size is that of data.tokenizer, or else that of the first training dataset's sidecar, or else the
    preset's. The tokenizer stays unset where nothing says which it is. A resumed run does not need the tokenizer's
    file, because it keeps a copy.
    ValueError if the vocabulary is unknown, and for datasets of different tokenizers unless data.tokenizer is set; and
    the errors of load_tokenizer, read_sidecar and with_end_of_document.
    """
    data, name, size = config.data, config.data.tokenizer, config.model.vocab_size
    if name is not None and Path(name).is_dir():
        load_tokenizer(name)  # says which file is meant
    sidecar = read_sidecar(data.train[0])
    if name is None and sidecar is not None:
        name, size = sidecar["tokenizer"], size or sidecar["vocab_size"]
        check_tokenizers(sidecar["tokenizer"], (*data.train[1:], *data.valid), data.train[0])
    if size is None and name is not None:
        size = load_tokenizer(_here(name, config)).vocab_size
    if size is None and (size := config.model.known_vocab_size) is None:
        tokenizer_name(config)  # says what is missing
    data = dataclasses.replace(data, tokenizer=name)
    optimizer = dataclasses.replace(config.optimizer, momentum=config.optimizer.kept_momentum)
    config = dataclasses.replace(with_vocab_size(config, size), data=data, optimizer=optimizer)
    return with_end_of_document(config)


def _here(name: str, config: RunConfig) -> str | Path:
    """A tokenizer's name, or the copy of it that a resumed run keeps, if its own file does not exist."""
    kept = kept_tokenizer(Path(config.run.dir)) if config.run.resume else None
    return name if kept is None or Path(name).is_file() else kept


def with_end_of_document(config: RunConfig) -> RunConfig:
    """The configuration with the tokenizer's data.end_of_document, if documents are separated and it is unset.

    Tokenizer and vocab_size are filled in already. ValueError if nothing says which id it is, and for one that is
    outside of the vocabulary; and the errors of load_tokenizer.
    """
    data, size = config.data, config.model.vocab_size
    if not data.separate_documents:
        return config
    end = data.end_of_document
    if end is None:
        if data.tokenizer is None:
            raise ValueError(
                "data.separate_documents = true, but nothing says which id ends a document: set data.end_of_document, "
                "or data.tokenizer"
            )
        end = load_tokenizer(_here(data.tokenizer, config)).end_of_document
    if size is not None and end >= size:
        raise ValueError(
            f"data.end_of_document={end} is outside of the model's ids 0 to {size - 1}, so that no document would end: "
            f"set it to the id that ends one"
        )
    return dataclasses.replace(config, data=dataclasses.replace(data, end_of_document=end))


def with_vocab_size(config: RunConfig, size: int | None) -> RunConfig:
    """The configuration with another model.vocab_size."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def vocabulary_note(config: RunConfig) -> str | None:
    """A line for a resolved configuration whose vocabulary is not its preset's; None for any other."""
    model = config.model
    theirs = None if model.preset is None else preset(model.preset)["vocab_size"]
    if theirs is None or model.vocab_size == theirs:
        return None
    return f"model.vocab_size is {model.vocab_size:,}, where the preset {model.preset} has {theirs:,}"


def check_datasets(config: RunConfig) -> None:
    """Open every dataset. FileNotFoundError or ValueError names a file that is missing or damaged, or not readable."""
    for prefix in (*config.data.train, *config.data.valid):
        IndexedDataset(prefix)


def open_dataset(
    prefix: str, vocab_size: int, *, masked: bool = False, end_of_document: int | None = None
) -> IndexedDataset:
    """The dataset of a model with that vocabulary. Its tokens are checked as they are read (see IndexedDataset).

    A sidecar says how large the dataset's vocabulary is. Without one, or if it is larger, rank 0 reads the whole
    dataset once. It also reads the mask, if that counts, and the ends of documents, if they are to be separated.
    FileNotFoundError or ValueError, with the file, for a dataset that is missing or damaged, has ids outside the
    vocabulary, or documents that the id end_of_document does not end.
    """
    dataset, built = IndexedDataset(prefix, vocab_size, masked=masked), read_sidecar(prefix) or {}
    if os.environ.get("RANK", "0") == "0":
        if built.get("vocab_size", math.inf) > vocab_size:
            check_vocab(dataset, vocab_size)
        if masked:
            dataset.check_mask(built.get("n_targets"))
        if end_of_document is not None:
            check_ends(dataset, end_of_document)
    return dataset


def mask_notes(prefixes: Iterable[str], *, masked: bool) -> list[str]:
    """Lines about datasets whose mask does not count, or that have none although masks count."""
    notes = []
    for prefix in dict.fromkeys(prefixes):
        path = dataset_paths(prefix).mask
        if is_there(path) and not masked:
            notes.append(f"{path} does not count, so every token of {prefix} is a target: data.mask = true changes it")
        if masked and not is_there(path):
            notes.append(f"{path} does not exist, so every token of {prefix} is a target")
    return notes


def read_stored(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's config.toml. The errors of read_toml, and ValueError for an empty file."""
    values = read_toml(path)
    if not values:
        raise ValueError(f"{path} is empty, and no run writes such a file: bring back the settings that the run had")
    return values


def read_run_config(directory: Path, *layers: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The configuration of the run in `directory`, with the values of `layers` in place of its own.

    The tokenizer is the copy in the run's folder, wherever the run was moved to, if there is one. FileNotFoundError
    without a config.toml.
    """
    path, kept = directory / "config.toml", kept_tokenizer(directory)
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a run: it has no config.toml")
    values = read_stored(path)
    own = {}
    if kept is not None and build_config(values).data.tokenizer != "bytes":
        own = {"data": {"tokenizer": str(kept)}}
    return build_config(values, own, *layers)

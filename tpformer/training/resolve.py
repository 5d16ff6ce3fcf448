"""Complete a configuration from its data, or read one from a run's directory. Nothing here imports torch."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpformer.config import RunConfig, build_config, read_toml
from tpformer.weights.family import read_json

from .companions import FOLDER, TOKENIZER, byte_tokenizer
from .data import IndexedDataset, check_vocab, load_tokenizer, read_sidecar

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

    Files are compared by their parts that do so, and "bytes" by the file that an export makes of it. None if a file
    does not exist, so that it cannot be told; ValueError for a file that is no JSON object.
    """
    if one == other:
        return True
    contents = []
    for name in (one, other):
        if name != "bytes" and not Path(name).is_file():
            return None
        content = byte_tokenizer() if name == "bytes" else read_json(Path(name))
        contents.append([content.get(key) for key in _CONTENT])
    return contents[0] == contents[1]


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with vocab_size and tokenizer filled in from the data.

    The tokenizer stays unset where vocab_size is configured and the first training dataset has no sidecar. Errors:
    those of tokenizer_name and load_tokenizer.
    """
    name = config.data.tokenizer
    if config.model.vocab_size is None or read_sidecar(config.data.train[0]) is not None:
        name = tokenizer_name(config)
    vocab_size = config.model.vocab_size or load_tokenizer(name).vocab_size  # type: ignore[arg-type]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=vocab_size),
        data=dataclasses.replace(config.data, tokenizer=name),
    )


def check_datasets(config: RunConfig) -> None:
    """Open every dataset. FileNotFoundError or ValueError names a file that is missing or damaged."""
    for prefix in (*config.data.train, *config.data.valid):
        IndexedDataset(prefix)


def open_dataset(prefix: str, vocab_size: int) -> IndexedDataset:
    """The dataset of a model with that vocabulary.

    A sidecar says how large the dataset's vocabulary is. Without one, or if it is larger, rank 0 reads the whole
    dataset once. FileNotFoundError or ValueError, with the file, for a dataset that is missing or damaged, or has ids
    outside the vocabulary.
    """
    dataset, built = IndexedDataset(prefix), read_sidecar(prefix)
    fits = built is not None and built["vocab_size"] <= vocab_size
    if not fits and os.environ.get("RANK", "0") == "0":
        check_vocab(dataset, vocab_size)
    return dataset


def read_run_config(directory: Path, *layers: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The configuration of the run in `directory`, with the values of `layers` in place of its own.

    The tokenizer of an imported run is the one in its folder, wherever the run was moved to. FileNotFoundError without
    a config.toml.
    """
    path, tokenizer = directory / "config.toml", directory.absolute() / FOLDER / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a run: it has no config.toml")
    imported = {"data": {"tokenizer": str(tokenizer)}} if tokenizer.is_file() else {}
    return build_config(imported, read_toml(path), *layers)

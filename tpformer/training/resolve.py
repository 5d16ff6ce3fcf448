"""Complete a configuration from its data, or read one from a run's directory. Nothing here imports torch."""

import dataclasses
from pathlib import Path

from tpformer.config import RunConfig, build_config, read_toml

from .data import IndexedDataset, load_tokenizer, read_sidecar


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


def read_run_config(directory: Path) -> RunConfig:
    """The configuration of the run in `directory`; FileNotFoundError without a config.toml."""
    path = directory / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a run: it has no config.toml")
    return build_config(read_toml(path))

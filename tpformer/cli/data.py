"""Commands that make token datasets: data build, data stdlib."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildData:
    """Make a token dataset (PREFIX.bin, PREFIX.idx, PREFIX.json): one document per file, or per line of a .jsonl, or
    per row of a .parquet (needs tpformer[parquet])."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    """Prefix of the files to write; existing ones are never overwritten."""
    tokenizer: str = "bytes"
    """"bytes" or the path of a tokenizer.json (needs tpformer[hf])."""
    text_field: str = "text"
    """The key of a .jsonl line, or the column of a .parquet, that has the text."""
    valid_fraction: float | None = None
    """Write PREFIX_train and PREFIX_valid instead, the latter with about this share of the documents."""


def build_data_command(arguments: Sequence[str]) -> None:
    """`tpformer data build`: make a token dataset from files."""
    from tpformer.training.data import build_dataset, build_split

    options = tyro.cli(BuildData, prog="tpformer data build", args=list(arguments))
    where, field = (options.inputs, options.out, options.tokenizer), options.text_field
    if options.valid_fraction is None:
        build_dataset(*where, text_field=field)
    else:
        build_split(*where, options.valid_fraction, text_field=field)


def stdlib_command(arguments: Sequence[str]) -> None:
    """`tpformer data stdlib`: make the default corpus."""
    from tpformer.training.data import build_stdlib

    def stdlib(out: Annotated[Path, tyro.conf.arg(help="Folder for stdlib_train and stdlib_valid.")]) -> None:
        """Make the default corpus from the Python standard library's source (no download)."""
        build_stdlib(out)

    tyro.cli(stdlib, prog="tpformer data stdlib", args=list(arguments))

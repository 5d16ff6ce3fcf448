"""Commands that make token datasets: data build, data stdlib."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildData:
    """Make a token dataset (PREFIX.bin, PREFIX.idx, PREFIX.json): one document per file, or per line of a .jsonl."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path
    """Prefix of the files to write; existing ones are never overwritten."""
    tokenizer: str = "bytes"
    """"bytes" or the path of a tokenizer.json (needs tpformer[hf])."""


def build_data_command(arguments: Sequence[str]) -> None:
    """`tpformer data build`: make a token dataset from files."""
    from tpformer.training.data import build_dataset

    options = tyro.cli(BuildData, prog="tpformer data build", args=list(arguments))
    build_dataset(options.inputs, options.out, options.tokenizer)


def stdlib_command(arguments: Sequence[str]) -> None:
    """`tpformer data stdlib`: make the default corpus."""
    from tpformer.training.data import build_stdlib

    def stdlib(out: Annotated[Path, tyro.conf.arg(help="Folder for stdlib_train and stdlib_valid.")]) -> None:
        """Make the default corpus from the Python standard library's source (no download)."""
        build_stdlib(out)

    tyro.cli(stdlib, prog="tpformer data stdlib", args=list(arguments))

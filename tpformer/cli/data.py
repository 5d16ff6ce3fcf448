"""Commands that make token datasets: data build, data stdlib."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from .options import named, parsed


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildData:
    """Make a token dataset (PREFIX.bin, PREFIX.idx, PREFIX.json): one document per text file, or per JSON line, or per
    row of a .parquet (needs tpformer[parquet]). Of prompts and completions it has PREFIX.mask, too."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """Text files, files of JSON lines, .parquet files, and folders of them."""
    out: Annotated[str, tyro.conf.arg(metavar="PREFIX")]
    """Prefix of the files to write; existing ones are never overwritten."""
    tokenizer: str = "bytes"
    """"bytes" or the path of a tokenizer.json (needs tpformer[hf])."""
    text_field: str | None = None
    """The key of a JSON line, or the column of a .parquet, that has the text. Unset: text."""
    prompt_field: str | None = None
    """Instead of --text-field: the key or column of a prompt, which PREFIX.mask leaves out of the loss."""
    completion_field: str | None = None
    """With --prompt-field: the key or column of the completion, on which a run with data.mask trains."""
    valid_fraction: float | None = None
    """Write PREFIX_train and PREFIX_valid instead, the latter with about this share of the documents."""


def build_data_command(arguments: Sequence[str]) -> None:
    """`tpformer data build`: make a token dataset from files."""
    from tpformer.training.data import build_dataset, build_split

    options = parsed(BuildData, "data build", arguments)
    where = (options.inputs, named("--out", options.out), options.tokenizer)
    given = [name for name in (options.prompt_field, options.completion_field) if name is not None]
    if given and (len(set(given)) < 2 or options.text_field is not None):
        raise ValueError("give --prompt-field and --completion-field together, without --text-field, as two names")
    if options.text_field is not None:
        given = [options.text_field]
    if options.valid_fraction is None:
        build_dataset(*where, fields=given or None)
    else:
        build_split(*where, options.valid_fraction, fields=given or None)


def stdlib_command(arguments: Sequence[str]) -> None:
    """`tpformer data stdlib`: make the default corpus."""
    from tpformer.training.data import build_stdlib

    def stdlib(out: Annotated[Path, tyro.conf.arg(help="Folder for stdlib_train and stdlib_valid.")]) -> None:
        """Make the default corpus from the Python standard library's source (no download)."""
        build_stdlib(out)

    tyro.cli(stdlib, prog="tpformer data stdlib", args=list(arguments))

"""The options of a command, its numbers and the paths that it is to write: parsed, and checked before it works.

Nothing here imports torch.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from tpformer.config.ranges import AMOUNT, COUNT, check_inside
from tpformer.processes.files import longest_name

T = TypeVar("T")
# of every number among the options of commands, as in RANGES
OPTION_RANGES = {
    "batch": COUNT,
    "between_ms": "[0, 10000]",
    "device_memory": "(0, 1e9]",
    "gpus": "[1, 1e7]",
    "max_new_tokens": "[0, 1e6]",
    "min_p": "[0, 1]",
    "nodes_of": COUNT,
    "price": AMOUNT,
    "samples": "[1, 1e6]",
    "seed": "[-9e18, 9e18]",
    "seq_length": "[1, 1e9]",
    "sites": "[2, 1000]",
    "step": AMOUNT,
    "temperature": AMOUNT,
    "tensor_parallel": COUNT,
    "top": "[1, 1000]",
    "top_k": COUNT,
    "top_p": "(0, 1]",
    "valid_fraction": "(0, 1)",
}


def parsed(options: type[T], command: str, arguments: Sequence[str]) -> T:
    """The options that the arguments give. ValueError for a number out of its range."""
    return checked(tyro.cli(options, prog=f"tpformer {command}", args=list(arguments)))


def parsed_with_others(options: type[T], command: str, arguments: Sequence[str]) -> tuple[T, list[str]]:
    """The same, and the arguments that are none of these options."""
    found, rest = tyro.cli(options, prog=f"tpformer {command}", args=list(arguments), return_unknown_args=True)
    return checked(found), rest


def checked(options: Any) -> Any:
    """The options. ValueError for a number out of its range."""
    for field in dataclasses.fields(options):
        if (value := getattr(options, field.name)) is not None and field.name in OPTION_RANGES:
            check_inside(f"--{field.name.replace('_', '-')}", value, OPTION_RANGES[field.name])
    return options


def named(option: str, path: str) -> Path:
    """The path of something new in a folder. ValueError for an empty one, and for one that names a folder."""
    if not path.strip():
        raise ValueError(f"{option} is empty: give it a path")
    if path.endswith("/") or Path(path).name in ("", "..") or Path(path).is_dir():
        folder = path.rstrip("/") or "/"
        raise ValueError(f"{option} {path} is a folder: add a name, such as {option} {folder}/NAME")
    return Path(path)


def new_file(option: str, path: str) -> Path:
    """The path of a file that a command is to make. ValueError unless it is new, in a folder that exists."""
    found = named(option, path)
    if found.exists() or not found.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: give a new file in a folder that exists")
    if (size := len(os.fsencode(found.name))) > longest_name():
        raise ValueError(f"{option} has a name of {size} bytes: give one of at most {longest_name()}")
    return found


UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def number(option: str, text: str) -> float:
    """A number with one of UNITS, such as 1.5B."""
    try:
        value = float(text[:-1]) * UNITS[text[-1].upper()] if text[-1:].upper() in UNITS else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{option} {text}: write a number such as 1.5B")
    return value

"""Checks of values that several sections, layers and operations share, so that each mistake has one message."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tpformer.words import printable, shown


def check_positive(**sizes: int | None) -> None:
    """ValueError for the first of these sizes that is below 1. A size of None is unset, and passes."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """ValueError unless the value is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name}={shown(value)}: choose one of {', '.join(map(str, choices))}")


def check_packing(dtype: str) -> None:
    """ValueError unless activations of this dtype can be packed."""
    if dtype != "bfloat16":
        raise ValueError(
            f"pack_activations of {dtype}: only bfloat16 has an exponent of 8 bits that carry 3, beside 8 others; set "
            f'train.dtype = "bfloat16" (a model of its own: dtype=torch.bfloat16), or leave pack_activations out'
        )


def check_context_length(seq_length: int, ranks: int, names: tuple[str, str] = ("seq_length", "ranks")) -> None:
    """ValueError unless context-parallel ranks can share a sample's tokens. names: of the two in the message."""
    if seq_length % (2 * ranks):
        raise ValueError(
            f"{names[0]}={seq_length} tokens cannot be shared by {names[1]}={ranks} context-parallel ranks: each has 2 "
            f"of {2 * ranks} equal chunks, so make it a multiple of {2 * ranks}"
        )


def parsed(path: Path, kind: str, parse: Callable[[str], Any]) -> Any:
    """What a file of UTF-8 says, in JSON or TOML (`kind`). ValueError, which names it, if that fails."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{printable(path)} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(path)} is not valid {kind}: {printable(error, 200)}") from None


def check_known(name: str, names: Iterable[str], kind: str, where: str = "") -> None:
    """ValueError, with the nearest of the names, unless the name is one of them. where: the message's beginning."""
    names = tuple(names)
    if name not in names:
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {shown(close[0])}?" if close else f"known: {', '.join(names)}"
        raise ValueError(f"{where}unknown {kind} {shown(name)}: {hint}")

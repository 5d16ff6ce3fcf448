"""Values, names and texts of users and of strangers' files, as messages and terminals may show them.

Every message that has such a value takes it from here: `shown` for values, `listed` for names, `printable` for texts,
`dtype_name` for dtypes.
"""

import re
import reprlib
from collections.abc import Collection
from typing import Any

_LONGEST = 80  # characters of a value or a name in a message
_LONGEST_MESSAGE = 4000
# control characters could do anything to a terminal, and halves of surrogate pairs cannot be written; a new line and a
# tab may stay
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Brief(reprlib.Repr):
    """A repr that looks only at the beginning of a large value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, _LONGEST, _LONGEST

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 200 else f"a whole number of {x.bit_length()} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[:_LONGEST])


def shown(value: Any) -> str:
    """A value as Python writes it, cut to its beginning, without control characters."""
    return printable(_Brief().repr(value), _LONGEST)


def dtype_name(dtype: object) -> str:
    """A torch.dtype without "torch.", as in tables and reasons."""
    return str(dtype).removeprefix("torch.")


def printable(text: object, longest: int | None = None, *, lines: bool = False) -> str:
    """A text with all that is not printable as escapes, cut to `longest` characters. lines: new lines stay."""
    whole = str(text)
    cut = whole if longest is None or len(whole) <= longest else f"{whole[: longest - 3]}..."
    return (
        cut
        if cut.isprintable()
        else "".join(
            each if each.isprintable() or (lines and each == "\n") else each.encode("unicode_escape").decode()
            for each in cut
        )
    )


def message(error: object) -> str:
    """What is said of an error: its own words, of which new lines stay."""
    return printable(error, _LONGEST_MESSAGE, lines=True)


def harmless(text: str) -> str:
    """A text that a model or a stranger wrote, with U+FFFD for control characters other than new line and tab."""
    return _CONTROL.sub("\ufffd", text)


def listed(names: Collection[Any], limit: int = 3) -> str:
    """Some names for a message: the first ones, and how many there are more."""
    ordered = sorted(map(str, names))
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(printable(_ends(name)) for name in ordered[:limit]) + more


def _ends(name: str) -> str:
    """A name without its middle, if it is long: files differ at the end of their paths, keys often at the beginning."""
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 2]}...{name[1 - half :]}"

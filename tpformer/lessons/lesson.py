"""A lesson: an Exchange that has a name and options, which the text of parallel.exchange gives.

Belongs here: reading options, and what several lessons refuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from tpformer.config import Layout, check_known
from tpformer.config.ranges import check_inside
from tpformer.exchange import Exchange
from tpformer.words import shown

TRUTHS = {"true": True, "false": False}


@dataclass
class Lesson(Exchange):
    """Fields of a subclass are its options, all with defaults. text: the whole of parallel.exchange."""

    RANGES: ClassVar[dict[str, str]] = {}
    """The values that numbers among the options may have, as in config/ranges.py."""

    name: str
    text: str = field(compare=False)

    @classmethod
    def of(cls, name: str, text: str, options: Sequence[str]) -> Self:
        """With options such as "share=0.05". ValueError for one that is unknown, has no such value, or comes twice."""
        where, values = f"parallel.exchange={shown(text)}: ", dict[str, Any]()
        defaults = {field.name: field.default for field in dataclasses.fields(cls)[2:] if field.init}  # not name, text
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or key in values:
                raise ValueError(f"{where}{shown(option)} is not one OPTION=VALUE more")
            if not defaults:
                raise ValueError(f"{where}{name} has no options: leave {shown(option)} out")
            check_known(key, defaults, f"option of {name}", where)
            values[key] = _value(f"{where}{key}", value, defaults[key])
            if key in cls.RANGES:
                check_inside(f"{where}{key}", values[key], cls.RANGES[key])
        return cls(name, text, **values)

    def check_replicas(self, layout: Layout) -> None:
        """ValueError if there is but one replica."""
        if layout.data_parallel_replicate == 1:
            raise ValueError(
                f"parallel.exchange={self.text!r} is about sums over replicas, of which there is one: set "
                f"data_parallel_replicate, or leave it out"
            )


def _value(where: str, text: str, default: Any) -> Any:
    """An option's value, of its default's type."""
    try:
        return TRUTHS[text] if isinstance(default, bool) else type(default)(text)
    except (KeyError, ValueError):
        wanted = "true or false" if isinstance(default, bool) else f"a value such as {default}"
        raise ValueError(f"{where}={shown(text)}: write {wanted}") from None

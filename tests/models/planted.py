"""Mistakes that are made on purpose: other functions in place of those of a module or class.

Belongs here: how they are made, for the traps of contexts and of experts. No mistakes.
"""

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]


def instead(where: Any, name: str, wrong: Any) -> Mistake:
    """The wrong function has this name."""
    return lambda patch: patch.setattr(where, name, wrong)


def wrapped(where: Any, name: str, wrong_of: Callable[[Any], Any]) -> Mistake:
    """wrong_of(the right function) has its name."""
    return lambda patch: patch.setattr(where, name, wrong_of(getattr(where, name)))


def changed(where: Any, name: str, change: Callable[[Any], Any]) -> Mistake:
    """The function gives change(its right result)."""
    return wrapped(where, name, lambda right: lambda *args, **options: change(right(*args, **options)))

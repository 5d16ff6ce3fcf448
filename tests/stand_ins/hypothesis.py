"""Stands for hypothesis under `make gpu` where it is not installed: a file's tests of properties are skipped, its other
tests run.

Belongs here: as much of hypothesis as importing those files takes.
"""

from typing import Any

import pytest


class Anything:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> "Anything":
        return self

    def __call__(self, *arguments: Any, **options: Any) -> "Anything":
        return self

    __getitem__ = __call__


strategies = Anything()


def given(*arguments: Any, **options: Any) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason="hypothesis is not installed")


def settings(*arguments: Any, **options: Any) -> Any:
    return lambda function: function

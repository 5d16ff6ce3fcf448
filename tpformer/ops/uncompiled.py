"""Operations stay whole under torch.compile, which calls them and does not look inside. One decorator, and no more."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """torch.compiler.disable(function), but the compiler, which takes a second to import, is not imported for it.

    Where nobody has imported it nothing is being compiled, and the function is called as it is.
    """
    disabled: list[Callable[Arguments, Result]] = []

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call

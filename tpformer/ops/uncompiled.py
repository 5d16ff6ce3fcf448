"""Operations under torch.compile: the compiler calls them as they are, and does not look inside.

Belongs here: the two decorators that tell the compiler so, and the reason that it reports.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from tpformer.torch_private import compiler_is_imported, leave_frame_uncompiled, leave_uncompiled

from .refusals import explain

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
WHY = "operations of tpformer run as they are, and the compiler compiles what is around them: leave fullgraph=True out"


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function itself, marked as torch.compiler.disable marks what it returns; fullgraph=True reports WHY."""
    leave_uncompiled(function, WHY)
    return function


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """torch.compiler.disable(function), without importing the compiler, which takes a second.

    If nobody has imported the compiler, nothing is being compiled, and the function is called as it is.
    """
    disabled: list[Callable[Arguments, Result]] = []

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            if not compiler_is_imported():
                return function(*args, **kwargs)
            if not disabled:
                leave_frame_uncompiled(call)
                disabled.append(torch.compiler.disable(function, reason=WHY))
            return disabled[0](*args, **kwargs)
        except (AttributeError, TypeError, RuntimeError) as error:
            explain(error, function, args, kwargs)
            raise

    return untraced(call)

"""Triton's interpreter, twice as fast: imported by the fork server of the `interpreted` pool.

Belongs here: the one thing of the interpreter that is replaced, and why it may be. A kernel that calls a jitted
function makes the interpreter replace all of triton.language's functions again, a millisecond each time, though they
have been replaced since the launch began. Here a call inside a launch replaces only what the launch has not yet.
"""

from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter

replace_functions = interpreter._patch_lang
replaced: set[int] = set()  # the modules of triton.language whose functions are replaced for the launch that runs


def replace_once(function: FunctionType) -> interpreter._LangPatchScope:
    """As the interpreter's own; the scope of a launch, the outermost, restores what it replaced."""
    modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if modules <= replaced:
        return interpreter._LangPatchScope()
    outermost = not replaced
    scope = replace_functions(function)
    replaced.update(modules)
    if outermost:
        restore = scope.restore

        def end() -> None:
            restore()
            replaced.clear()

        scope.restore = end
    return scope


if hasattr(interpreter, "_LangPatchScope"):  # of triton 3.7; elsewhere tests only take longer
    interpreter._patch_lang = replace_once

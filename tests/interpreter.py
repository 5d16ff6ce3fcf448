"""Makes Triton's interpreter twice as fast; the fork server of the `interpreted` pool imports it.

Belongs here: the one function of the interpreter that is replaced, and why it may be. A kernel that calls a jitted
function makes the interpreter replace all of triton.language's functions again, which takes a millisecond each time,
though they have been replaced since the launch began. Here such a call replaces only what the launch has not yet.
"""

from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter

replace_functions = interpreter._patch_lang
replaced: set[int] = set()  # modules of triton.language whose functions the running launch has replaced


def replace_once(function: FunctionType) -> interpreter._LangPatchScope:
    """Replace what this launch has not yet replaced; the launch's own scope, the outermost one, restores it."""
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


if hasattr(interpreter, "_LangPatchScope"):  # triton 3.7 has it; without it tests only take longer
    interpreter._patch_lang = replace_once

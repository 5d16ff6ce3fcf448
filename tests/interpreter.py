"""Makes Triton's interpreter several times as fast; the fork server of the `interpreted` pool imports it.

Belongs here: what is replaced of the interpreter, and why it may be.
- A kernel that calls a jitted function makes the interpreter replace all of triton.language's functions again, which
  takes a millisecond each time, though they have been replaced since the launch began. Here such a call replaces only
  what the launch has not yet.
- It looks whether integers overflow, for which it does every sum and product again in 64 bits. What it finds it drops,
  because its option `debug` is off. That was half of its time.
- It makes a table of all types for every result, and objects for the sizes of every tensor. Here they are kept.
"""

import builtins
import dataclasses
import functools
import math
from types import FunctionType
from typing import Any

import numpy
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


make_dtype = interpreter._get_np_dtype
dtypes: dict[str, numpy.dtype] = {}  # by the name of Triton's type


def kept_dtype(kind: Any) -> numpy.dtype:
    """numpy's type for one of Triton's."""
    if kind.name not in dtypes:
        dtypes[kind.name] = make_dtype(kind)
    return dtypes[kind.name]


@functools.cache
def kept_shape(sizes: builtins.tuple) -> builtins.tuple:
    """(shape, number of elements) of tensors of these sizes."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def begin_tensor(tensor: tl.tensor, handle: Any, kind: Any) -> None:
    """In place of tensor.__init__."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = kept_shape(builtins.tuple(kind.shape) if kind.is_block() else ())


if hasattr(interpreter, "_LangPatchScope"):  # triton 3.7 has it; without it tests only take longer
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = kept_dtype
    tl.tensor.__init__ = begin_tensor
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

"""Makes Triton's interpreter several times as fast; the fork server of the `interpreted` pool imports it.

Belongs here: what is replaced of the interpreter, and why it may be.
- A launch makes the interpreter replace all of triton.language's functions, and restore them when it ends; so does each
  call of a jitted function. Here they are replaced once: in these processes the interpreter alone calls them.
- It looks whether integers overflow, for which it does every sum and product again in 64 bits. What it finds it drops,
  because its option `debug` is off. That was half of its time.
- It makes a table of all types for every result, and objects for the sizes of every tensor and of its type. Here they
  are kept.
"""

import builtins
import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy
import triton.language as tl
from triton.runtime import interpreter

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


begin_anew = tl.block_type.__init__


@functools.cache
def kept_block(sizes: builtins.tuple) -> builtins.tuple:
    """(shape, number of elements, shape as text) of types of blocks of these sizes, which have been checked."""
    block = object.__new__(tl.block_type)
    begin_anew(block, tl.int1, list(sizes))
    return block.shape, block.numel, str(block.shape)


def begin_block(block: tl.block_type, element_ty: Any, shape: Any) -> None:
    """In place of block_type.__init__."""
    sizes = builtins.tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    block.element_ty, (block.shape, block.numel, text) = element_ty, kept_block(sizes)
    block.name = f"<{text}, {element_ty}>"


if hasattr(interpreter, "_LangPatchScope"):  # triton 3.7 has it; without it tests only take longer
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()  # in which nothing is to be restored
    interpreter._get_np_dtype = kept_dtype
    tl.tensor.__init__, tl.block_type.__init__ = begin_tensor, begin_block
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

"""Finds each access of a kernel in Triton's interpreter that lies outside of the elements of its operands, and each
element that a launch stores twice.

Belongs here: which bytes a launch may touch, and the interpreter's loads and stores that are watched. Gaps between the
rows of an operand, and what else lies in its storage, may not be touched, although the memory is there.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

POISON = 0xFF


def tensors_of(argument: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, those in tuples and descriptors included."""
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, TensorDescriptor):
        yield argument.base
    elif isinstance(argument, tuple | list):
        for member in argument:
            yield from tensors_of(member)


def starts_of(tensor: Tensor) -> np.ndarray:
    """The address of every element."""
    offsets = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return tensor.data_ptr() + offsets.reshape(-1) * tensor.element_size()


class Allowed:
    """The bytes that a launch may touch, as intervals that do not meet."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        starts = np.concatenate([starts_of(tensor) for tensor in tensors])
        ends = starts + np.concatenate([np.full(tensor.numel(), tensor.element_size()) for tensor in tensors])
        order = np.argsort(starts)
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        first = np.append(True, starts[1:] > ends[:-1])
        self.starts, self.ends = starts[first], ends[np.append(first[1:], True)]

    def covers(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of so many bytes lie inside."""
        addresses = addresses.astype(np.int64)
        at = np.searchsorted(self.starts, addresses, "right") - 1
        return (at >= 0) & (addresses + size <= self.ends[at])


def place() -> str:
    """The line of a kernel that the interpreter is at."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith((".kernel", ".tile", ".rows", ".protocol")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "an unknown line"


# functions in which a program stores to a place again, behind a barrier; the executor has barriers, and judges them
AGAIN = ("(pack_blocks)", "(pack_kernel)")


class Watch:
    """What the interpreter has done since `watching` began."""

    def __init__(self) -> None:
        self.shared: list[Tensor] = []  # memory that kernels have the addresses of, and no argument for
        self.reports: list[str] = []
        self.allowed: Allowed | None = None
        # addresses of the elements that each store of a block has written in this launch, and its line
        self.stores: list[tuple[np.ndarray, str]] = []

    def launch(self, run: Callable) -> Callable:
        """The interpreter's launch, during which the operands' elements may be touched."""

        def call(executor, *arguments, **options):
            operands = tensors_of([*arguments, *options.values(), *self.shared])
            self.allowed = Allowed([tensor for tensor in operands if tensor.numel()])
            self.stores.clear()
            result = run(executor, *arguments, **options)
            self.find_stored_twice()
            return result

        return call

    def find_stored_twice(self) -> None:
        """Report elements that two blocks store. Only in the interpreter is it certain which store is the last."""
        stores = [each for each in self.stores if not each[1].endswith(AGAIN)]
        addresses = np.concatenate([np.zeros(0, np.int64), *[found for found, _ in stores]])
        number = np.repeat(np.arange(len(stores)), [len(found) for found, _ in stores])
        order = np.argsort(addresses, kind="stable")
        again = order[1:][np.diff(addresses[order]) == 0]
        if len(again):
            line = stores[number[again[0]]][1]
            self.reports.append(f"{len(again)} elements are stored a second time in one launch: {line}")

    def inside(self, what: str, pointers: Any, mask: Any) -> Any:
        """The mask without the lanes that are outside, which are reported."""
        assert self.allowed is not None
        size = pointers.get_element_ty().primitive_bitwidth // 8
        taken = np.asarray(mask.data).astype(bool)  # a descriptor's mask is an array itself
        outside = taken & ~self.allowed.covers(pointers.data, size)
        if outside.any():
            self.reports.append(f"{int(outside.sum())} elements of a {what} are outside of all operands: {place()}")
        return interpreter.TensorHandle(taken & ~outside, tl.int1)

    def load(self, run: Callable) -> Callable:
        """A load. Lanes that are given no value get one that shows; in the interpreter they would have zeros. A scalar
        is left alone, because the interpreter takes its `other=0.0` for none."""

        def call(builder, pointers, mask, other, *options, **named):
            if other is None and np.size(pointers.data) > 1:
                data = np.full(np.shape(pointers.data), POISON, np.uint8)
                kind = interpreter._get_np_dtype(pointers.get_element_ty())
                data = np.repeat(data[..., None], np.dtype(kind).itemsize, -1).view(kind)[..., 0]
                other = interpreter.TensorHandle(data, pointers.get_element_ty())
            return run(builder, pointers, self.inside("load", pointers, mask), other, *options, **named)

        return call

    def store(self, run: Callable) -> Callable:
        """A store."""

        def call(builder, pointers, value, mask, *options):
            inside = self.inside("store", pointers, mask)
            if inside.data.size > 1:  # words of the protocol, such as counters, are stored again
                stored = np.broadcast_to(pointers.data, inside.data.shape)[inside.data]
                self.stores.append((stored.astype(np.int64), place()))
            return run(builder, pointers, value, inside, *options)

        return call

    def atomic(self, run: Callable) -> Callable:
        """An atomic."""

        def call(builder, operation, pointers, value, mask, *options):
            return run(builder, operation, pointers, value, self.inside("atomic", pointers, mask), *options)

        return call


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Within, kernels run in the interpreter touch nothing outside of their operands: reports say what would have."""
    watch, builder = Watch(), interpreter.InterpreterBuilder
    with contextlib.ExitStack() as stack:
        for owner, name, hook in (
            (interpreter.GridExecutor, "__call__", watch.launch), (builder, "create_masked_load", watch.load),
            (builder, "create_masked_store", watch.store), (builder, "create_atomic_rmw", watch.atomic),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, hook(getattr(owner, name))))
        yield watch


def storage_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())

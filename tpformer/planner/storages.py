"""Counting memory by storages: what autograd keeps of a forward, by name, and what is alive in this process.

Belongs here: how bytes are counted, for the dry run, the benches and the tests. Which model is counted, and what
should come out, is said there.

A storage counts once and with its whole size, however many views it has. It is told apart by its object, because its
address may belong to another storage once the memory is freed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tpformer.torch_private import without_torch_function

OTHER, RESULT = "other", "result"
Names = Mapping[str, Mapping[int | str, str]]
NO_NAMES: Names = MappingProxyType({})
OF_PYTHON = 10_000  # a program freezes more objects; Python 3.12 has some hundreds, the immortal ones, among the frozen


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor. If a collective that makes it is still running, its result is awaited."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the elements in this rank's parts of the tensors. Views count as often as they are given."""
    return sum(local(x).numel() * x.dtype.itemsize for x in tensors if x is not None)


def storages(tensors: Iterable[Tensor]) -> set[torch.UntypedStorage]:
    """The storages that this rank's parts of the tensors lie in."""
    return {local(x).untyped_storage() for x in tensors}


def live_storages(wanted: Callable[[Tensor], bool]) -> set[torch.UntypedStorage]:
    """The storages of this process's tensors and of leaves' gradients for which `wanted` holds.

    Tensors that only C++ refers to, as autograd does, are not seen, and those of the compiler have symbols for sizes.
    Of torch.sparse_coo indices and values count, and of other layouts nothing.
    """
    found: set[torch.UntypedStorage] = set()
    with without_torch_function():  # the class of a tensor may refuse to be asked
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):  # isinstance would ask objects that answer for others
                for x in (each, each.grad if each.is_leaf else None):
                    if x is not None and wanted(inner := local(x)):
                        found.update(part.untyped_storage() for part in _dense(inner))
    return {storage for storage in found if type(storage.nbytes()) is int}


def _dense(x: Tensor) -> tuple[Tensor, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    return (x,) if x.layout is torch.strided else ()


@contextmanager
def new_objects() -> Iterator[None]:
    """Within, the garbage collector and `live_storages` look at objects made since alone. Among all those of a process
    that has imported torch, each look takes a third of a second."""
    if gc.get_freeze_count() > OF_PYTHON:  # whoever has frozen objects wants them to stay so
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Saved:
    """What autograd keeps while `recording` is open. left_out: tensors that do not count, such as parameters."""

    def __init__(self, *left_out: Tensor) -> None:
        self.kept: dict[torch.UntypedStorage, Tensor] = {}
        self.names: dict[torch.UntypedStorage, str] = {}
        self.left_out = storages(left_out)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these, whether they were kept already or not."""
        self.left_out |= storages(tensors)

    def name(self, x: Tensor, name: str) -> None:
        """Name what the storage of x holds; the first name stays."""
        self.names.setdefault(local(x).untyped_storage(), name)

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins: its parameters and buffers do not count. FSDP2 has just replaced them."""
        self.leave_out((*module.parameters(), *module.buffers()))

    def pack(self, x: Tensor) -> Tensor:
        """Note a tensor. autograd calls this with everything that it keeps."""
        inner = local(x)
        self.kept.setdefault(inner.untyped_storage(), inner)
        return x

    def sizes(self) -> dict[torch.UntypedStorage, int]:
        """Bytes of every storage that counts."""
        return {each: each.nbytes() for each in self.kept if each not in self.left_out and each.nbytes()}

    def items(self, leftover: Callable[[Tensor], str] = lambda _: OTHER) -> dict[str, int]:
        """Bytes by name. leftover(x) names a storage without a name; x is the tensor that was saved of it."""
        result: dict[str, int] = {}
        for storage, size in self.sizes().items():
            name = self.names.get(storage) or leftover(self.kept[storage])
            result[name] = result.get(name, 0) + size
        return result

    def total(self) -> int:
        """Bytes of all storages that count."""
        return sum(self.sizes().values())

    @contextmanager
    def recording(self, module: nn.Module | None = None, names: Names = NO_NAMES) -> Iterator[Self]:
        """Record what autograd keeps in this context. Parameters and buffers of `module` do not count.

        names: {path of a submodule: {position or keyword of an argument, or RESULT: name}}; "" is `module` itself.
        With a module, the arguments and the result of scaled_dot_product_attention are named, too.
        """
        attention = nullcontext() if module is None else _NamesOfAttention(self)
        hooks: list[Any] = []
        for path, called in () if module is None else module.named_modules():
            # other modules get no hook, because a hooked part of a layer would be called as a module, and not fused
            if path and path not in names and not isinstance(called, FSDPModule):
                continue
            given = names.get(path, {})
            hooks.append(called.register_forward_pre_hook(self._name_arguments(given), with_kwargs=True))
            if RESULT in given:
                name = given[RESULT]
                hooks.append(called.register_forward_hook(lambda _, args, y, name=name: self.name(y, name)))
        try:
            with saved_tensors_hooks(self.pack, lambda x: x), attention:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _name_arguments(self, given: Mapping[int | str, str]) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(called: nn.Module, args: tuple, kwargs: dict) -> None:
            self.enter(called)
            for key, name in given.items():
                if key != RESULT:
                    self.name(args[key] if isinstance(key, int) else kwargs[key], name)

        return hook


class _NamesOfAttention(TorchFunctionMode):
    """Names what scaled_dot_product_attention is called with and returns."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.saved = saved

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            for x, name in zip((*args[:3], result), ("q", "k", "v", "attention output"), strict=True):
                self.saved.name(x, name)
        return result

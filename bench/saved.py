"""What autograd keeps of a forward, by name, and which GEMMs run: counted, not timed.

Belongs here: the counting, for any module. Nothing about which module is counted or what should come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

OTHER, RESULT = "other", "result"
Names = Mapping[str, Mapping[int | str, str]]


def local(x: Tensor) -> Tensor:
    """This rank's tensor of a DTensor, and the gathered one of a collective that may still be under way."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            x = x.to_local()
    return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x


class Saved:
    """The storages that autograd keeps, each once and with its whole size, whatever view of it was saved.

    A storage is known by its object: an address may belong to another one after its memory was freed.
    """

    def __init__(self) -> None:
        self.kept: dict[torch.UntypedStorage, Tensor] = {}
        self.names: dict[torch.UntypedStorage, str] = {}
        self.left_out: set[torch.UntypedStorage] = set()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these: parameters, and tables that belong to all layers."""
        self.left_out |= {local(x).untyped_storage() for x in tensors}

    def name(self, x: Tensor, name: str) -> None:
        """What its storage holds; the first name stays."""
        self.names.setdefault(local(x).untyped_storage(), name)

    def items(self, leftover: Callable[[Tensor], str] = lambda _: OTHER) -> dict[str, int]:
        """Bytes by name; leftover(x) names a storage that has no name, by the tensor that was saved of it."""
        result: dict[str, int] = {}
        for storage, x in self.kept.items():
            if storage not in self.left_out:
                name = self.names.get(storage) or leftover(x)
                result[name] = result.get(name, 0) + storage.nbytes()
        return {name: size for name, size in result.items() if size}

    def total(self) -> int:
        return sum(self.items().values())

    def pack(self, x: Tensor) -> Tensor:
        inner = local(x)
        self.kept.setdefault(inner.untyped_storage(), inner)
        return x


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


@contextmanager
def record_saved(module: nn.Module, names: Names = MappingProxyType({})) -> Iterator[Saved]:
    """Counts what autograd keeps while the context is open; parameters and buffers of `module` are left out.

    names: by submodule ("" is `module` itself) and by position or keyword of what it is called with, or RESULT. What
    scaled_dot_product_attention is called with and returns is named too.
    """
    saved = Saved()

    def before(path: str) -> Callable[[nn.Module, tuple, dict], None]:
        def hook(called: nn.Module, args: tuple, kwargs: dict) -> None:
            # as they are now: FSDP2 replaces them when its unit is called
            saved.leave_out((*called.parameters(), *called.buffers()))
            for key, name in names.get(path, {}).items():
                if key != RESULT:
                    saved.name(args[key] if isinstance(key, int) else kwargs[key], name)

        return hook

    hooks = []
    for path, called in module.named_modules():
        # no others: a hook on a part of this library's layers would have it called as a module, not fused
        if path and path not in names and not isinstance(called, FSDPModule):
            continue
        hooks.append(called.register_forward_pre_hook(before(path), with_kwargs=True))
        if RESULT in names.get(path, {}):
            name = names[path][RESULT]
            hooks.append(called.register_forward_hook(lambda _, args, y, name=name: saved.name(y, name)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x), _NamesOfAttention(saved):
            yield saved
    finally:
        for hook in hooks:
            hook.remove()


class Gemms(TorchDispatchMode):
    """Adds up 2 M N K of every matrix product while it is the active mode; attention's own products are no GEMMs here.

    torch's FlopCounterMode leaves out products that are added in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = GEMM_OPERANDS.get(function.overloadpacket)
        if first is not None:
            a, b = args[first : first + 2]
            self.flops += 2 * a.numel() * b.shape[-1]
        return function(*args, **(kwargs or {}))


# the position of the left operand among each product's arguments
_ATEN = torch.ops.aten
GEMM_OPERANDS = {
    **dict.fromkeys((_ATEN.mm, _ATEN.bmm), 0),
    **dict.fromkeys((_ATEN.addmm, _ATEN.addmm_, _ATEN.baddbmm, _ATEN.baddbmm_), 1),
}

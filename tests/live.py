"""The most bytes that a piece of work has alive at once, by PyTorch's dispatch.

Belongs here: the counter. It counts storages that operations make, on any device, and not what was there before.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tpformer.torch_private import TorchDispatchMode, tree_leaves


class Live(TorchDispatchMode):
    """Counts while it is the active mode. before: tensors that are there already, and do not count."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.before = [StorageWeakRef(x.untyped_storage()) for x in before]  # held, so that no storage gets its number
        self.known = {each.cdata for each in self.before}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.known:
                    self.alive.setdefault(reference.cdata, (reference, storage.nbytes()))
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result

"""A CUDA graph's rules on a CPU: the calls of a step are recorded, refused where a capture would refuse them, and
made again with the very tensors that they had.

What the host decides from step to step is thus as fixed as in a graph, so a number that should have been in memory is a
wrong result. Belongs here: the recording. What is recorded is the tests' business.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from waits import CPU_READS, place, reads

from tpformer.torch_private import TorchDispatchMode

Call = tuple[Any, Any, Any, Any]  # function, arguments, keyword arguments, results


class Recording(TorchDispatchMode):
    """Records every call to torch's operators within. Tensors made before are held weakly, as a graph holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}  # by id, held: the graph's own memory
        self.before: dict[int, tuple[Any, Tensor]] = {}  # by id: a tensor made before, and what it held

    def was_before(self, x: Tensor) -> bool:
        return id(x) in self.before and self.before[id(x)][0]() is x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refused = reads(func, args) and not place().startswith(CPU_READS)
        assert not refused, f"a capture refuses {func} in {place()}: the host waits for its result"
        of_host = func is torch.ops.aten.lift_fresh.default  # of torch.tensor: made here, from the host's numbers
        for x in tensors((args, kwargs)):
            if of_host:
                self.made[id(x)] = x
            elif id(x) not in self.made and not self.was_before(x):
                self.before[id(x)] = ref(x), x.clone()
        results = func(*args, **kwargs)
        self.made |= {id(x): x for x in tensors(results) if not self.was_before(x)}
        weak = tree_map_only(Tensor, lambda x: ref(x) if self.was_before(x) else x, (args, kwargs, results))
        self.calls.append((func, *weak))
        return results

    def undo(self) -> None:
        """Give tensors made before the values that they had, as a capture does nothing."""
        with torch.no_grad():
            for find, value in self.before.values():
                if (x := find()) is not None:
                    x.copy_(value)

    def replay(self) -> None:
        """Make all calls again, into the same results."""
        with torch.no_grad():
            for func, *call in self.calls:
                args, kwargs, results = tree_map_only(ref, alive, call)
                again = func(*args, **kwargs)
                for old, new in zip(tensors(results), tensors(again), strict=True):
                    if old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def alive(find: Any) -> Tensor:
    x = find()
    assert x is not None, "a graph reads memory that nobody has kept"
    return x


def recorded(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A Capture (tpformer/training/graph.py) without CUDA."""
    recording = Recording()
    with recording:
        results = step()
    recording.undo()
    return recording.replay, results

"""What torch.utils.checkpoint in a model's own code is while the model is measured.

Belongs here: how a checkpoint lets its results be followed, and how a backward is seen to run a forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tpformer.torch_private import TorchDispatchMode, in_backward


@contextmanager
def checkpoints_with_graphs() -> Iterator[None]:
    """Within, a checkpoint with use_reentrant=True makes a graph in its forward. Its backward recomputes as ever."""

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    before = vars(CheckpointFunction).get("apply")
    CheckpointFunction.apply = staticmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = before


class Recomputation(TorchDispatchMode):
    """Sees whether a backward runs a forward again, which alone makes graphs there."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen |= in_backward() and torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))

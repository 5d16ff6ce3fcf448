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


def with_graph(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """A checkpoint with use_reentrant=True as one whose forward makes a graph. Its backward recomputes all the same."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextmanager
def reentrant_as(apply: Callable[..., Any]) -> Iterator[None]:
    """Within, a checkpoint with use_reentrant=True is apply(function, preserve_rng_state, *args)."""
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

"""Recomputation: a region keeps only its inputs, and the backward runs it again to get what its operations save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpformer.torch_private import base_of

from .transports.interface import REGISTRY
from .uncompiled import uncompiled


@uncompiled
def recompute(region: Callable[..., Any], *inputs: Any, keep_random_state: bool = True) -> Any:
    """region(*inputs), of which only the inputs are saved. The backward runs the region again, on all ranks alike.

    It is torch.utils.checkpoint (Chen et al. 2016, arXiv:1604.06174).
    keep_random_state: the second run draws the same numbers from torch's generator as the first. Other people's modules
    need that, and blocks without a dropout_key; dropout with a key does not.
    A row_linear that ends the region (`ends_region=True`) skips its GEMM and reduction in the second run, because
    nothing reads their result. RuntimeError if the region returns something else.
    The second run reads the parameters as they are then. Under torch.func.functional_call, run the backward within the
    call or do not recompute; otherwise gradients are taken at the module's own parameters (torch's checkpoint has that
    limit, too).
    """
    kept: list[Any] = []

    def run(*inputs: Any) -> Any:
        result = region(*inputs)
        end = None if (within := _RUN.get()) is None else within.end
        if end is not None and all(base_of(each) is not end for each in _tensors(result)):
            raise RuntimeError(
                "an operation with ends_region=True made no result of its region, so what follows would read what the "
                "second run leaves out: give it to the region's last operation, or leave it out"
            )
        return result

    return checkpoint(
        run,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=keep_random_state,
        context_fn=lambda: (_Run(kept, again=False), _Run(kept, again=True)),
    )


class _Run:
    """A run of a region: the first, or one in a backward. Both share the list of what the first run keeps (`once`).

    It also surrounds a region's first run, which may be part of an outer region's second run. A graph that is kept is
    run several times, so one object can be entered again.
    """

    def __init__(self, kept: list[Any], again: bool) -> None:
        self.kept, self.again = kept, again
        self.outer: _Run | None = None
        self.end: Tensor | None = None
        self.tokens: list[Token[_Run | None]] = []

    def __enter__(self) -> None:
        self.outer, self.taken = _RUN.get(), 0
        self.tokens.append(_RUN.set(self))

    def __exit__(self, *_: object) -> None:
        _RUN.reset(self.tokens.pop())
        self.outer = self.end = None

    def once(self, make: Callable[[], Any]) -> Any:
        """What make() gave in the first run; it may have been the second one of an outer region."""
        if not self.again:
            if self.outer is None:
                self.kept.append(make())
                REGISTRY.kept.tell(self.kept[-1])
            else:
                self.kept.append(self.outer.once(make))
            return self.kept[-1]
        self.taken += 1
        return self.kept[self.taken - 1]


_RUN: ContextVar[_Run | None] = ContextVar("run", default=None)


def _tensors(result: Any) -> Sequence[Tensor]:
    return [each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, Tensor)]


def ends(y: Tensor) -> Tensor:
    """y, which is what the innermost region around this call has to return, as the operation that made it ends it."""
    run = _RUN.get()
    if run is not None and torch.is_grad_enabled():  # a region without gradients has no run of its own
        run.end = base_of(y)
    return y


def running_again() -> bool:
    """Whether this call is part of the second run of the innermost region around it."""
    run = _RUN.get()
    return run is not None and run.again


def once(make: Callable[[], Any]) -> Any:
    """make(), but in the second run of a region what it gave in the first, which the region keeps beside its inputs.

    For decisions that must not be taken twice. A region calls it in the same order in both runs.
    """
    run = _RUN.get()
    return make() if run is None else run.once(make)


def record_kept() -> AbstractContextManager[list[Any]]:
    """A context that gives a list of what regions whose first run is in it keep beside their inputs (`once`)."""
    return REGISTRY.kept.listen()

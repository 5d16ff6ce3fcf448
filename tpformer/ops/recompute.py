"""Recomputation: a region keeps only its inputs, and the backward runs it again to get what its operations save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

from torch.utils.checkpoint import checkpoint

from .transports.interface import REGISTRY
from .uncompiled import uncompiled


@uncompiled
def recompute(region: Callable[..., Any], *inputs: Any, keep_random_state: bool = True) -> Any:
    """region(*inputs), of which only the inputs are saved. The backward runs the region again, on all ranks alike.

    It is torch.utils.checkpoint (Chen et al. 2016, arXiv:1604.06174).
    keep_random_state: the second run draws the same numbers from torch's generator as the first. Other people's modules
    need that, and blocks without a dropout_key; dropout with a key does not.
    A row_linear that ends the region (`ends_region=True`) skips its GEMM and reduction in the second run, because
    nothing reads their result.
    The second run reads the parameters as they are then. Under torch.func.functional_call, run the backward within the
    call or do not recompute; otherwise gradients are taken at the module's own parameters (torch's checkpoint has that
    limit, too).
    """
    kept: list[Any] = []
    return checkpoint(
        region,
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
        self.tokens: list[Token[_Run | None]] = []

    def __enter__(self) -> None:
        self.outer, self.taken = _RUN.get(), 0
        self.tokens.append(_RUN.set(self))

    def __exit__(self, *_: object) -> None:
        _RUN.reset(self.tokens.pop())
        self.outer = None

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

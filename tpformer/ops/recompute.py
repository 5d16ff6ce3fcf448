"""Recomputation: a region keeps only its inputs, and the backward runs it again to get what its operations save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tpformer.torch_private import base_of

from .transports.interface import REGISTRY
from .uncompiled import uncompiled


@dataclass
class _Region:
    """What the first run of a region leaves to the second."""

    skip_end: bool
    kept: list[Any] = field(default_factory=list)
    """What `once` has made, in order."""
    ends: set[int] = field(default_factory=set)
    """The numbers of the operations whose ends the second run leaves out, of those that may: the one that made the
    result, and the one that made what its end reads."""


@uncompiled
def recompute(region: Callable[..., Any], *inputs: Any, keep_random_state: bool = True, skip_end: bool = False) -> Any:
    """region(*inputs), of which only the inputs are saved. The backward runs the region again, on all ranks alike.

    It is torch.utils.checkpoint (Chen et al. 2016, arXiv:1604.06174).
    keep_random_state: the second run draws the same numbers from torch's generator as the first. Other people's modules
    need that, and blocks without a dropout_key; dropout with a key does not.
    skip_end: nothing within the region reads what it returns, no hook either. If a row_linear or experts makes that,
    it leaves out its last GEMM and reduction in the second run, whose result nobody reads; so does a row_linear that
    makes what exchanged_experts would have added there.
    The second run reads the parameters as they are then. Under torch.func.functional_call, run the backward within the
    call or do not recompute; otherwise gradients are taken at the module's own parameters (torch's checkpoint has that
    limit, too).
    """
    shared = _Region(skip_end)

    def run(*inputs: Any) -> Any:
        result = region(*inputs)
        within = _RUN.get()
        if within is not None and within.region is shared and not within.again and within.made is not None:
            if any(base_of(each) is within.made for each in _tensors(result)):
                shared.ends = within.ends()
        return result

    return checkpoint(
        run,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=keep_random_state,
        context_fn=lambda: (_RegionRun(shared, again=False), _RegionRun(shared, again=True)),
    )


class _RegionRun:
    """A run of a region: the first, or one in a backward.

    It also surrounds a region's first run, which may be part of an outer region's second run. A graph that is kept is
    run several times, so one object can be entered again.
    """

    def __init__(self, region: _Region, again: bool) -> None:
        self.region, self.again = region, again
        self.outer: _RegionRun | None = None
        self.made: Tensor | None = None
        """The result of the last operation that may leave out its end."""
        self.maker = 0
        """The number of that operation."""
        self.makers: dict[int, int] = {}
        """Of an operation that alone reads what another made: the numbers of both."""
        self.tokens: list[Token[_RegionRun | None]] = []

    def __enter__(self) -> None:
        self.outer, self.taken, self.count, self.made = _RUN.get(), 0, 0, None
        self.maker, self.makers = 0, {}
        self.tokens.append(_RUN.set(self))

    def __exit__(self, *_: object) -> None:
        _RUN.reset(self.tokens.pop())
        self.outer = self.made = None

    def ends(self) -> set[int]:
        """The operation that made the last result, and who made what its end reads."""
        number, found = self.maker, set[int]()
        while number:
            found.add(number)
            number = self.makers.get(number, 0)
        return found

    def once(self, make: Callable[[], Any]) -> Any:
        """What make() gave in the first run; it may have been the second one of an outer region."""
        kept = self.region.kept
        if not self.again:
            if self.outer is None:
                kept.append(make())
                REGISTRY.kept.tell(kept[-1])
            else:
                kept.append(self.outer.once(make))
            return kept[-1]
        self.taken += 1
        return kept[self.taken - 1]


_RUN: ContextVar[_RegionRun | None] = ContextVar("run", default=None)


def _tensors(result: Any) -> Sequence[Tensor]:
    return [each for each in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(each, Tensor)]


def leaves_out_end(reads: Tensor | None = None) -> bool:
    """Whether the operation that asks makes what the second run of the innermost region around it leaves out.

    Operations count themselves by asking, and say by `made` what they made. So the first run knows which of them made
    the region's result: the one that made it last, if it is what the region returns.
    reads: what the end of the operation reads, and nobody else. If the last operation that counts has made it, that one
    leaves out its own end together with this one.
    """
    run = _RUN.get()
    if run is None or not run.region.skip_end or not torch.is_grad_enabled():  # without gradients it has no second run
        return False
    run.count += 1
    if reads is not None and run.made is not None and base_of(reads) is run.made:
        run.makers[run.count] = run.maker
    return run.again and run.count in run.region.ends


def made(y: Tensor) -> Tensor:
    """y, which an operation has made that had asked leaves_out_end."""
    run = _RUN.get()
    if run is not None and run.region.skip_end and not run.again and torch.is_grad_enabled():
        run.made, run.maker = base_of(y), run.count
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

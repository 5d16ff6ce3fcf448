"""Weight gradients made later than the rest of a backward: pipeline schedules with split backwards need that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from .uncompiled import untraced
from .unsaved import check_unwritten, versions

GradientSink = Callable[[Tensor], None]


class WeightGradientQueue:
    """Remembers the weight gradients of linears whose backward has run, until `run` makes and accumulates them.

    Use one for each microbatch, or one for each pipeline stage, with `take` after each microbatch's backward:
    torch.distributed.pipelining does that with `PipelineStage(..., dw_builder=queue.take)`.

        with queue.collect():
            loss = model(x)
        loss.backward()   # input, norm and bias gradients
        queue.run()       # weight gradients

    `collect` surrounds the forward, not the backward, so that each linear remembers its own queue. Microbatches in
    flight then cannot mix, and it works on CUDA, where the backward runs in threads that do not see the context.
    Until `run`, a linear keeps its input and its output gradient, in memory that no later operation overwrites:
        column   this rank's normed rows, which `run` gathers again, and dy
        row      the activated input, and the gathered dy; if the input needs no gradient, `run` gathers dy
    `run` has the collectives and GEMMs of an ordinary backward, in the order of the queue, which must be the same on
    all ranks of a group.
    `run` adds to `.grad` itself, and gradient hooks of the parameters do not fire. Without `run` the parameters get no
    gradient. A backward with create_graph=True raises RuntimeError, because what `run` makes has no graph.
    """

    def __init__(self) -> None:
        self._closures: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._closures)

    def __bool__(self) -> bool:
        return True  # `if queue` asks whether there is a queue, not whether it holds something

    @contextmanager
    def collect(self) -> Iterator[WeightGradientQueue]:
        """Linears whose forward runs in this context, in this thread, queue their weight gradients here."""
        token = ACTIVE_QUEUE.set(self)
        try:
            yield self
        finally:
            ACTIVE_QUEUE.reset(token)

    def add(self, closure: Callable[[], None], *kept: Tensor | None) -> None:
        """Queue a function that makes and accumulates weight gradients, from tensors that others must not write."""
        held = [each for each in kept if each is not None]
        before = versions(*held)

        def run() -> None:
            check_unwritten("what a linear has kept for its weight gradient", before, *held)
            closure()

        self._closures.append(run)

    def take(self) -> Callable[[], None]:
        """Empty the queue into a function that makes what was queued, in order, and frees what each one held."""
        taken, self._closures = self._closures[::-1], []

        def run() -> None:
            with torch.no_grad():
                while taken:
                    taken.pop()()

        return run

    def run(self) -> None:
        """Make and accumulate everything queued so far. Collective: column-parallel inputs are gathered again."""
        self.take()()


ACTIVE_QUEUE: ContextVar[WeightGradientQueue | None] = ContextVar("weight_gradient_queue", default=None)


class Deferred(NamedTuple):
    """Where a linear's weight gradients go instead of to autograd: a queue, and for each weight a function to take its
    gradient."""

    queue: WeightGradientQueue
    sinks: Sequence[GradientSink]


def check_sinks(deferred: Deferred, weights: int) -> None:
    """ValueError unless each of so many weights has a sink."""
    if len(deferred.sinks) != weights:
        raise ValueError(f"deferred has {len(deferred.sinks)} sinks for {weights} weights: give one for each")


@untraced
def active_queue() -> WeightGradientQueue | None:
    """The queue whose `collect` surrounds this call; None without one."""
    return ACTIVE_QUEUE.get()

"""Weight gradients made later than the rest of a backward: what split-backward schedules fill their gaps with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from .uncompiled import untraced

GradientSink = Callable[[Tensor], None]


class WeightGradientQueue:
    """Holds the weight gradients of linears whose backward has run, until `run` makes and accumulates them.

    Use one per microbatch, or one per pipeline stage with `take` after each microbatch's backward, which is what
    torch.distributed.pipelining asks for: `PipelineStage(..., dw_builder=queue.take)`.

        with queue.collect():
            loss = model(x)
        loss.backward()   # input, norm and bias gradients
        queue.run()       # weight gradients

    `collect` surrounds the forward, not the backward: each linear then remembers its own queue, so microbatches in
    flight cannot mix, and it works on CUDA, where the backward runs in autograd's threads, which see no context.
    Until `run`, a linear keeps its input (column: this rank's rows, normed, gathered again in `run`; row: the activated
    input) and its output gradient (row: gathered, but where its input needs no gradient gathered in `run`), in memory
    of their own. Collectives and GEMMs are those of an ordinary backward, in the order of the queue, which all ranks of
    a group must share.
    `run` adds to `.grad` itself: gradient hooks of the parameters do not fire. Without `run` they get no gradient.
    A backward with create_graph=True raises RuntimeError: what `run` makes has no graph.
    """

    def __init__(self) -> None:
        self._closures: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._closures)

    def __bool__(self) -> bool:
        return True  # an empty queue is no missing one: `if queue` asks whether there is one

    @contextmanager
    def collect(self) -> Iterator[WeightGradientQueue]:
        """Linears whose forward runs in this context, in this thread, queue their weight gradients here."""
        token = ACTIVE_QUEUE.set(self)
        try:
            yield self
        finally:
            ACTIVE_QUEUE.reset(token)

    def add(self, closure: Callable[[], None]) -> None:
        self._closures.append(closure)

    def take(self) -> Callable[[], None]:
        """Empty the queue into a function that makes what was queued so far, first queued first, freeing as it goes."""
        taken, self._closures = self._closures[::-1], []

        def run() -> None:
            with torch.no_grad():
                while taken:
                    taken.pop()()

        return run

    def run(self) -> None:
        """Make and accumulate everything queued so far. Collective where a column-parallel input is gathered again."""
        self.take()()


ACTIVE_QUEUE: ContextVar[WeightGradientQueue | None] = ContextVar("weight_gradient_queue", default=None)


class Deferred(NamedTuple):
    """Where a linear's weight gradients go instead of to autograd: a queue, and what takes each weight's gradient."""

    queue: WeightGradientQueue
    sinks: Sequence[GradientSink]


@untraced
def active_queue() -> WeightGradientQueue | None:
    """The queue whose `collect` surrounds this call."""
    return ACTIVE_QUEUE.get()

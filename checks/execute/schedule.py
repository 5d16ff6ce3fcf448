"""Which program comes next: streams, launches, and a scheduler that parks those that poll in vain.

Belongs here: the order of events. What an event does is machine.py's.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .machine import CTA
from .memory import Fault

PATIENCE = 5000  # polls in a row, of all programs, at a time when nobody does anything else
BURST = 40  # segments that run at most before another program may
ROUND = 1000  # so many that each loop that polls comes round


class Schedule(NamedTuple):
    """How programs take turns."""

    seed: int = 0
    lockstep: bool = True
    """Whether a CTA's warps run together as long as they take the same branches; otherwise each runs by itself."""
    priorities: bool = False
    """Whether the same programs always go first, until a draw demotes one; otherwise programs are drawn, from a seed of
    1 on with stragglers among them."""
    impatient: bool = False
    """Whether programs that poll in vain go on polling; otherwise they stand aside until the word changes. Waits then
    expire while other programs have yet to begin."""


PLAIN = Schedule()


class Stream:
    """What a rank has yet to launch, and which clocks its next launch knows of."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[Stream], list[CTA] | None]] = []
        """Each makes the CTAs of a launch of this stream, or none; None if the stream must wait for another one."""
        self.running: list[CTA] = []
        self.known = np.zeros(1, np.int32)


def run(streams: list[Stream], schedule: Schedule) -> None:
    """Run all launches of all streams. Fault if they do not end."""
    generator = random.Random(schedule.seed)
    weights: dict[CTA, float] = {}
    polls = 0
    with np.errstate(all="ignore"):
        while True:
            for stream in streams:
                advance(stream, generator, weights, schedule)
            live = [cta for stream in streams for cta in stream.running if not cta.done]
            if not live:
                if any(stream.waiting for stream in streams):
                    continue  # a stream waits for one that has advanced after it
                return
            ready = [cta for cta in live if cta.gathered or any(warps.can_run for warps in cta.active)]
            polls = 0 if ready else polls + 1
            if polls > PATIENCE:
                polled = {str(cta.log.lines[warps.poll[0]]) for cta in live for warps in cta.active if warps.poll}
                raise Fault(f"hang: every program polls for what none will do: {'; '.join(sorted(polled))}")
            cta = choose(ready or live, weights, generator, schedule)
            turn(cta, generator, alone=not ready, impatient=schedule.impatient)


def advance(stream: Stream, generator: random.Random, weights: dict[CTA, float], schedule: Schedule) -> None:
    """Start the stream's next launch if all programs of the last one have ended."""
    while all(cta.done for cta in stream.running):
        for cta in stream.running:
            stream.known = np.maximum(stream.known, cta.known.max(0))
        stream.running = []
        begun = stream.waiting[0](stream) if stream.waiting else None
        if begun is None:
            return
        stream.waiting.pop(0)
        stream.running = begun
        for cta in stream.running:
            straggles = schedule.seed > 0 and not schedule.priorities
            weights[cta] = 10 ** generator.uniform(-3, 0) if straggles else 0.5 + generator.random()


def choose(ready: list[CTA], weights: dict[CTA, float], generator: random.Random, schedule: Schedule) -> CTA:
    """The program that comes next."""
    if not schedule.priorities:
        return generator.choices(ready, [weights[cta] for cta in ready])[0]
    first = max(ready, key=lambda cta: weights[cta])
    if generator.random() < 0.05:
        weights[first] = min(weights.values()) - 1
    return first


def turn(cta: CTA, generator: random.Random, alone: bool, impatient: bool) -> None:
    """Let some warps of a program run a while. alone: nobody can run, so that some go on that poll in vain, until they
    are parked again: a program that stopped halfway round its loop would look as if it could do something."""
    for _ in range(ROUND if alone else generator.randrange(1, BURST)):
        if cta.done:
            return
        if cta.gathered:
            cta.meet()
        able = [warps for warps in cta.active if warps.can_run]
        if not able and alone:
            alone, able = False, [warps for warps in cta.active if not warps.done and warps.barrier < 0]
        if not able:
            return
        warps = generator.choice(able)
        warps.step()
        warps.spins = warps.spins and not impatient

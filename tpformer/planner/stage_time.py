"""What the model of time gives: the items of a step, and what one microbatch takes in a stage.

Belongs here: sums of seconds by kind. How a step's items and stages are found is in step_time.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from .terms import PassSeconds


class StepTime(NamedTuple):
    """Seconds of a step by what the rank with the most to do spends them on."""

    compute: float
    tp: float
    """Tensor-parallel communication that no GEMM hides."""
    cp: float
    """Keys and values, and their gradients, between context-parallel ranks: nothing hides them."""
    ep: float
    """Tokens that ranks exchange for their experts, and their gradients: nothing hides them."""
    pp: float
    """Sending to the next stage, where ranks wait for it."""
    dp: float
    """Gathers and reductions over data-parallel ranks that no computation hides."""
    bubble: float
    optimizer: float
    host: float
    """What the host needs longer than the device to launch kernels, and what moves to and from its memory."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self)


@dataclasses.dataclass(frozen=True)
class StageTime:
    """One microbatch in one stage."""

    work: PassSeconds
    host: dict[str, float]
    """Seconds of launching F, I and W, or of moving what they save to the host and back if that takes longer."""
    sends: dict[str, float]
    """Seconds that F and I wait for their result to be sent."""

    def device(self, kind: str) -> float:
        """Seconds of computing and of exposed communication in the stage, of kind F, B, I or W."""
        forward, inputs, weights = (terms.seconds for terms in self.work)
        return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[kind]

    def launching(self, kind: str) -> float:
        """Seconds that the host takes longer."""
        host = self.host["I"] + self.host["W"] if kind == "B" else self.host[kind]
        return max(0.0, host - self.device(kind))

    def sending(self, kind: str) -> float:
        """Seconds of a step's send."""
        return self.sends.get({"B": "I"}.get(kind, kind), 0.0)

    @functools.cached_property
    def durations(self) -> dict[str, float]:
        """All of it, for F, B, I and W."""
        return {kind: self.device(kind) + self.launching(kind) + self.sending(kind) for kind in "FBIW"}

    def seconds(self, kind: str) -> float:
        """All of it, for one kind."""
        return self.durations[kind]

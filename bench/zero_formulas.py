"""What a rank should hold of parameters, gradients and optimizer state under ZeRO, in FSDP2's terms (docs/zero.md).

Belongs here: the formulas, and published ones beside them. No tensors, no measuring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .held import GATHERED, KINDS, OPTIMIZER, SHARDED, SHARDED_GRADIENTS, WHOLE_GRADIENTS, Held

MASTER, MOMENTS = 4, 8  # bytes of a float32 parameter or gradient, and of Adam's two moments


class PartSizes(NamedTuple):
    """Parameters of one part of the model. padded: with what FSDP2 adds to make shards equal."""

    stage: int
    total: int
    padded: int
    root: int
    """Of what is in no layer, padded: one unit of FSDP2, which stays gathered between forward and backward."""
    layer: int
    """Of the largest layer."""
    n_layers: int
    queued: int
    """Whose gradients split-backward schedules make last: the layers' matrices."""
    early: int
    """Of the head, where it is no more than the head: its gradient waits for the end of the backward."""


class Plan(NamedTuple):
    """A ZeRO stage over `shards` ranks; bytes of an element in compute, and of a gradient that is accumulated."""

    zero: int
    shards: int
    compute: int
    accumulate: int


class Move(NamedTuple):
    """One thing that a rank does with a microbatch: kind F, B, I or W; or R, the reduction at the end."""

    stage: int
    kind: str


class _State:
    """What FSDP2 holds of one part beside its shards."""

    def __init__(self, part: PartSizes, plan: Plan, n_backwards: int) -> None:
        self.part, self.plan, self.left = part, plan, n_backwards
        self.gathered, self.whole, self.reduced = 0, False, False

    def held(self) -> Held:
        part, plan = self.part, self.plan
        sizes = dict.fromkeys(KINDS, 0)
        sizes[SHARDED] = MASTER * part.padded // plan.shards
        sizes[OPTIMIZER] = MOMENTS * part.total // plan.shards
        sizes[GATHERED] = plan.compute * self.gathered
        sizes[WHOLE_GRADIENTS] = plan.accumulate * part.total * self.whole
        sizes[SHARDED_GRADIENTS] = MASTER * part.padded // plan.shards * self.reduced
        return sizes

    def move(self, kind: str) -> None:
        zero = self.plan.zero
        if kind == "F":
            self.gathered = self.part.root if zero == 3 else self.part.padded
        elif kind in "BW":
            self.left -= 1
            self.whole, self.reduced = zero < 2, self.reduced or zero >= 2
            if zero == 3 or (zero == 2 and self.left == 0):
                self.gathered = 0
        elif kind == "R":
            self.gathered, self.whole, self.reduced = 0, False, True

    def transient(self, kind: str, *, reduces: bool) -> float:
        """What a backward holds besides, at most: a layer's gathered parameters, gradients, and buffers.

        reduces: stages 0 and 1 reduce layer by layer in the last backward (without a pipeline).
        """
        part, (zero, shards, c, a) = self.part, self.plan
        cast = c if c != a else 0  # a gradient in the compute dtype, until it is added to the accumulated one
        if kind == "I":
            return cast * part.early
        if kind == "W":
            return cast * part.queued
        if zero < 2:
            last = (cast - c + MASTER / shards) * part.layer if reduces else 0.0
            return max(cast * (part.layer + part.early), last)
        buffer = a if part.n_layers > 1 else 0  # the reduction's input lives on in the next layer's backward
        if zero == 2:
            return (c + buffer) * part.layer + c * part.early
        # gathered and gradients of the layer; of 3 or more layers one in the middle also has the next one's gather
        both = max(3 * c, 2 * c + a) if part.n_layers == 2 else (3 * c + a if part.n_layers > 2 else 2 * c)
        return both * part.layer + c * part.early


class Expected(NamedTuple):
    moments: dict[str, Held]
    peak: int


MOMENT_NAMES = IDLE, FORWARD, BACKWARD, STEP = "idle", "end of forward", "end of backward", "after step"


def _total(states: Sequence[_State]) -> Held:
    held = [state.held() for state in states]
    return {kind: sum(each[kind] for each in held) for kind in KINDS}


def expected(parts: Sequence[PartSizes], plan: Plan, moves: Sequence[Move], *, pipeline: bool) -> Expected:
    """Bytes by kind at the four moments, and the largest sum at a layer's hooks, for a rank that does `moves`.

    End of forward: where it is largest over microbatches.
    """
    backwards = Counter(move.stage for move in moves if move.kind in "BW")
    states = {part.stage: _State(part, plan, backwards[part.stage]) for part in parts}
    idle = _total(list(states.values()))
    forward, peak = idle, 0.0
    for stage, kind in moves:
        state = states[stage]
        if kind in "BIW":
            if plan.zero == 3:
                state.gathered = max(state.gathered, state.part.root)
            now = sum(_total(list(states.values())).values())
            peak = max(peak, now + state.transient(kind, reduces=not pipeline))
        state.move(kind)
        now_held = _total(list(states.values()))
        peak = max(peak, sum(now_held.values()))
        if kind == "F" and sum(now_held.values()) > sum(forward.values()):
            forward = now_held
    end = _total(list(states.values()))
    return Expected({IDLE: idle, FORWARD: forward, BACKWARD: end, STEP: end}, round(peak))


def slides(parameters: int, plan: Plan) -> int:
    """2 M + 2 M + 16 M: bf16 parameters and gradients; float32 parameters, gradients and two moments."""
    return _published(parameters, plan, 16)


def paper(parameters: int, plan: Plan) -> int:
    """2 M + 2 M + 12 M (Rajbhandari et al., arXiv:1910.02054, section 3.1 and table 1): no float32 gradients."""
    return _published(parameters, plan, 12)


def _published(parameters: int, plan: Plan, optimizer: int) -> int:
    zero, n = plan.zero, plan.shards
    sizes = ((2, zero == 3), (2, zero >= 2), (optimizer, zero >= 1))
    return round(sum(size * parameters / (n if shared else 1) for size, shared in sizes))

"""A pipeline stage's mixes of ways to keep its layers, and what each needs and takes.

Belongs here: the columns of mixes, and which mixes there are. Their order, and whose stages they are, is in
rank_choice.py. Bytes are units.py's and moments.py's, seconds step_time.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from tpformer.config import PLAIN, LayerKeep, RunConfig

from .kept import kept_by_kind
from .moments import Layers
from .rank_memory import predicted_stage
from .step_time import StepModel
from .units import stage_units, with_keep

KEPT, PLACE, FORWARD, BACKWARD, MOVED = range(5)  # columns of mixes: bytes, the worst place, seconds, bytes
MOST = 1 << 20  # mixes of a stage that are looked at
BLOCK = 256  # of mixes that are compared at once with those that none is better than


class Stage:
    """One stage: what each of its layers would keep, need and take in each way, and what its places add to a peak."""

    def __init__(
        self, config: RunConfig, index: int, plain: StepModel, ways: Sequence[LayerKeep], of: Layers, gradients: float
    ) -> None:
        kept = kept_by_kind(config)
        units = [stage_units(with_keep(config, str(way)), index, kept=kept) for way in ways]
        self.time, self.bus = plain.stages[index], plain.device.host
        self.n, self.layers = len(units[0]), range(units[0][0].layers.start, units[0][-1].layers.stop)
        self.last = index == config.parallel.n_stages - 1
        count = predicted_stage(with_keep(config, PLAIN), index)
        rest = count.saved - sum(unit.kept for unit in stage_units(with_keep(config, PLAIN), index, kept=kept))
        self.rest, self.queued = rest, count.queued
        self.before = of.head if self.last else 0.0  # freed before the first place of a layer
        self.loss = of.loss if self.last else -np.inf
        made = (
            of.head_elements * self.last + np.cumsum([0.0, *(unit.elements for unit in reversed(units[0][1:]))])[::-1]
        )
        share = np.minimum(1.0, made / of.total) if of.by_layer else np.ones(self.n)
        self.kept = np.array([[unit.kept for unit in each] for each in units])  # (ways, layers), as the next ones
        self.moved = np.array([[unit.moved for unit in each] for each in units])
        self.need = np.array([[unit.working for unit in each] for each in units]) + of.of_layer + gradients * share
        self.none = 0.0 if of.by_layer else gradients  # gradients at the loss
        kinds = [config.model.has_experts(unit.layers.start) for unit in units[0]]
        work = {kind: [_seconds(plain, way, kind) for way in ways] for kind in set(kinds)}
        base = {kind: _seconds(plain, LayerKeep(), kind) for kind in set(kinds)}
        self.seconds = np.array(
            [[np.subtract(work[kind][w], base[kind]) for kind in kinds] for w in range(len(ways))]
        )  # (ways, layers, 2)

    def cost(self, values: np.ndarray) -> np.ndarray:
        """Seconds of a microbatch in this stage, by the columns of mixes."""
        moving = values[:, MOVED] / self.bus
        host = self.time.host
        forward = np.maximum(self.time.device("F") + values[:, FORWARD], np.maximum(host["F"], moving))
        launched = np.maximum(host["I"], moving) + host["W"]
        return forward + np.maximum(self.time.device("B") + values[:, BACKWARD], launched)

    def columns(self, chosen: np.ndarray) -> np.ndarray:
        """The columns of mixes: (mixes, 5). chosen: the ways of their layers, (mixes, layers)."""
        at = np.arange(self.n)
        kept, moved, seconds = self.kept[chosen, at], self.moved[chosen, at], self.seconds[chosen, at].sum(1)
        before = np.concatenate([np.zeros((len(chosen), 1)), moved[:, :-1]], 1)
        places = (np.cumsum(kept, 1) + moved + before + self.need[chosen, at]).max(1)
        return np.stack([kept.sum(1), places, seconds[:, 0], seconds[:, 1], moved.sum(1)], 1)


def _seconds(plain: StepModel, way: LayerKeep, experts: bool) -> np.ndarray:
    forward, inputs, weights = plain.layer.work(way.recompute, experts=experts, packs=way.pack)
    return np.array([forward.seconds, inputs.seconds + weights.seconds])


@functools.cache
def splits(steps: int) -> np.ndarray:
    """Where the second and the third of three ways begin, as shares of the layers: (splits, 2)."""
    return np.array([(a, b) for a in range(steps + 1) for b in range(a, steps + 1)]) / steps


def _sums(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of numbers (ways, layers) of a stage: the sums up to each layer in each way, (ways, layers + 1); and at least so
    much from each layer on, if it has this way or one behind it, (ways + 1, layers + 1)."""
    ways, n = numbers.shape
    least, rest = np.minimum.accumulate(numbers[::-1], 0)[::-1], np.full((ways + 1, n + 1), np.inf)
    rest[:, n] = 0.0
    rest[:ways, :n] = np.cumsum(least[:, ::-1], 1)[:, ::-1]
    return np.concatenate([np.zeros((ways, 1)), np.cumsum(numbers, 1)], 1), rest


def ends_of(above: np.ndarray, kept: np.ndarray, gap: float, left: float) -> np.ndarray | None:
    """Where each way ends, (mixes, ways), in all mixes of a stage whose layers are together at most `gap` above the
    bound and keep at most `left` bytes; None if they are too many."""
    (costs_to, costs_on), (sizes_to, sizes_on) = _sums(above), _sums(kept)
    every = np.arange(above.shape[1] + 1)
    ends, cost, size = np.zeros((1, 1), np.int16), np.zeros(1), np.zeros(1)
    for way in range(len(above)):
        begin = ends[:, -1]
        costs = (cost - costs_to[way][begin])[:, None] + costs_to[way]
        sizes = (size - sizes_to[way][begin])[:, None] + sizes_to[way]
        can = (every >= begin[:, None]) & (costs + costs_on[way + 1] <= gap) & (sizes + sizes_on[way + 1] <= left)
        row, end = np.nonzero(can)
        if len(row) > MOST:
            return None
        ends = np.concatenate([ends[row], end[:, None].astype(np.int16)], 1)
        cost, size = costs[row, end], sizes[row, end]
    return ends[:, 1:]


def undominated(points: np.ndarray) -> np.ndarray:
    """The indices of the points, (points, columns), than which no other one is as small in all columns."""
    order = np.lexsort(points.T[::-1])
    front, found = np.empty((0, points.shape[1])), []
    for some in np.split(order, range(BLOCK, len(order), BLOCK)):
        some = some[~(front[None] <= points[some][:, None]).all(-1).any(1)]
        here = points[some]
        some = some[~np.tril((here[None] <= here[:, None]).all(-1), -1).any(1)]
        front = np.concatenate([front, points[some]])
        found.append(some)
    return np.concatenate(found)

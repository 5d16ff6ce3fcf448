"""A pipeline stage's mixes of ways to keep its layers, and what each needs and takes.

Belongs here: the columns of mixes, and which mixes there are. Their order, and whose stages they are, is in
rank_choice.py. Bytes are units.py's and moments.py's, seconds step_time.py's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import PLAIN, LayerKeep, RunConfig

from .kept import kept_by_kind
from .moments import Layers, outputs, queued_by_layers
from .rank_memory import predicted_stage
from .step_time import StepModel
from .units import stage_units, with_keep

KEPT, PLACE, FORWARD, BACKWARD, MOVED = range(5)  # columns of mixes: bytes, the worst place, seconds, bytes
MOST = 1 << 18  # beginnings of a stage's mixes that are looked at at once
FEW = 1 << 13  # beginnings that are not compared with each other: going on with all of them takes less time
BLOCK = 256  # of mixes that are compared at once with those that none is better than
FRONT, PAYS = 256, 0.8  # with how many of these, unless at most this share of the mixes stays


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
        waits, queues = outputs(config, count)
        self.rest, self.queued = rest + waits, count.queued + queues
        self.before = of.head if self.last else 0.0  # freed before the first place of a layer
        made = (
            of.head_elements * self.last + np.cumsum([0.0, *(unit.elements for unit in reversed(units[0][1:]))])[::-1]
        )
        share = np.minimum(1.0, made / of.total) if of.by_layer else np.ones(self.n)
        self.kept = np.array([[unit.kept for unit in each] for each in units])  # (ways, layers), as the next ones
        self.moved = np.array([[unit.moved for unit in each] for each in units])
        freed = np.array([[unit.freed for unit in each] for each in units])
        beside = of.beside(freed, np.array(queued_by_layers(config, count)), last=self.last)
        self.need = np.array([[unit.working for unit in each] for each in units]) + beside + gradients * share
        none = 0.0 if of.by_layer else gradients  # gradients at the loss
        self.at_forward = (of.loss if self.last else of.forward) + none  # what these moments need
        self.at_weights = of.weights + none
        kinds = [config.model.has_experts(unit.layers.start) for unit in units[0]]
        work = {kind: [_seconds(plain, way, kind) for way in ways] for kind in set(kinds)}
        base = {kind: _seconds(plain, LayerKeep(), kind) for kind in set(kinds)}
        self.seconds = np.array(
            [[np.subtract(work[kind][w], base[kind]) for kind in kinds] for w in range(len(ways))]
        )  # (ways, layers, 2)

    @property
    def slowest(self) -> float:
        """Seconds that no mix exceeds."""
        moved, seconds = self.moved.max(0).sum(), self.seconds.max(0).sum(0)
        return float(self.cost(np.array([[0.0, 0.0, *seconds, moved]]))[0])

    @property
    def adds_up(self) -> bool:
        """Whether a mix's seconds follow from the sum of its forward's and backward's: nothing else takes longer."""
        moving, host = self.moved.max(0).sum() / self.bus, self.time.host
        forward = self.time.device("F") + self.seconds[..., 0].min(0).sum()
        backward = self.time.device("B") + self.seconds[..., 1].min(0).sum()
        return forward >= max(host["F"], moving) and backward >= max(host["I"], moving) + host["W"]

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
        places = self.places(chosen).max(1)
        return np.stack([kept.sum(1), places, seconds[:, 0], seconds[:, 1], moved.sum(1)], 1)

    def places(self, chosen: np.ndarray) -> np.ndarray:
        """Bytes at the places of a backward, (mixes, layers): what layers up to there keep, and what is needed."""
        at = np.arange(self.n)
        kept, moved = self.kept[chosen, at], self.moved[chosen, at]
        moved[:, 1:] += moved[:, :-1].copy()
        return np.cumsum(kept, 1) + moved + self.need[chosen, at]


def _seconds(plain: StepModel, way: LayerKeep, experts: bool) -> np.ndarray:
    forward, inputs, weights = plain.layer.work(way.recompute, experts=experts, packs=way.pack)
    return np.array([forward.seconds, inputs.seconds + weights.seconds])


@functools.cache
def splits(steps: int) -> np.ndarray:
    """Where the second and the third of three ways begin, as shares of the layers: (splits, 2)."""
    return np.array([(a, b) for a in range(steps + 1) for b in range(a, steps + 1)]) / steps


class StageMixes(NamedTuple):
    """Mixes of a stage. ways: (mixes, layers). values: their columns. seconds, above: of each, as in `within`."""

    ways: np.ndarray
    values: np.ndarray
    seconds: np.ndarray
    above: np.ndarray


def many(ways: int, layers: int) -> bool:
    """Whether mixes of so many layers are too many to look at each."""
    return math.comb(ways + layers - 1, layers) > 2 * MOST


def within(
    stage: Stage, above: np.ndarray, gap: float, fits: Callable[[np.ndarray], np.ndarray], *, timed: bool = True
) -> StageMixes | None:
    """A stage's mixes whose layers, each of them above[way, layer], are together at most `gap`, and that fit; without
    those than which another one is as small in all columns. None if they are too many.

    fits: of columns (mixes, 5), which may be less than a mix's in the end, whether there is room.
    Way after way, all places where it may end are tried. Where that is much, of beginnings that end at one layer only
    those are continued than which no other one is as small in all that counts: what may follow is the same. timed:
    whether seconds and what is moved count, beside bytes.
    """
    kept_on, above_on = _least_on(stage.kept), _least_on(above)
    parts = np.stack([stage.kept, *np.moveaxis(stage.seconds, 2, 0), stage.moved, above])
    sums = np.concatenate([np.zeros((*parts.shape[:2], 1)), parts.cumsum(2)], 2)  # (parts, ways, layers + 1)
    every, drops = np.arange(stage.n + 1), not timed or many(len(above), stage.n)
    ends, values, last, cost = np.zeros((1, 1), np.int16), np.zeros((1, 5)), np.zeros(1), np.zeros(1)
    for way in range(len(above)):
        begin = ends[:, -1]
        costs = (cost - sums[4, way][begin])[:, None] + sums[4, way]
        row, end = np.nonzero((every >= begin[:, None]) & (costs + above_on[way + 1] <= gap))
        if timed and len(row) > MOST:
            return None
        begin, added = begin[row], sums[:4, way][:, end] - sums[:4, way][:, begin[row]]
        place = values[row, KEPT] - sums[0, way][begin] + _worst(stage, way, sums[0, way], begin, end, last[row])
        values = values[row] + added[[0, 0, 1, 2, 3]].T
        values[:, PLACE] = np.where(end > begin, np.maximum(values[:, PLACE] - added[0], place), values[:, PLACE])
        last = np.where(end > begin, stage.moved[way][end - 1], last[row])
        at_least = values.copy()
        at_least[:, KEPT] += kept_on[way + 1][end]
        may = np.flatnonzero(np.isfinite(at_least[:, KEPT]))
        may = may[fits(at_least[may])]
        ends = np.concatenate([ends[row], end[:, None].astype(np.int16)], 1)
        if drops and (not timed or len(may) > FEW):
            counted = values[may] if timed else values[may, : PLACE + 1]
            if timed and stage.adds_up:
                counted[:, FORWARD] += counted[:, BACKWARD]
                counted[:, BACKWARD] = 0.0
            keeps = (np.diff(ends[may], axis=1) * np.arange(way + 1)).sum(1)
            points = np.concatenate([counted, last[may, None], -keeps[:, None]], 1).round(12)
            groups = [at for at in (np.flatnonzero(end[may] == e) for e in every) if len(at)]
            may = may[np.concatenate([at[undominated(points[at])] for at in groups])] if groups else may
        ends, values, last, cost = ends[may], values[may], last[may], costs[row[may], end[may]]
    ways = (np.arange(stage.n)[:, None] >= ends[:, None, 1:]).sum(-1)
    values = stage.columns(ways)
    return StageMixes(ways, values, stage.cost(values), cost)


def _least_on(numbers: np.ndarray) -> np.ndarray:
    """Of numbers (ways, layers): the least sum from each layer on, if it has this way or one behind it,
    (ways + 1, layers + 1)."""
    (ways, n), least = numbers.shape, np.minimum.accumulate(numbers[::-1], 0)[::-1]
    rest = np.full((ways + 1, n + 1), np.inf)
    rest[:, n] = 0.0
    rest[:ways, :n] = np.cumsum(least[:, ::-1], 1)[:, ::-1]
    return rest


def _worst(
    stage: Stage, way: int, kept: np.ndarray, begin: np.ndarray, end: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """What the worst place needs of layers that have one way, from `begin` to `end`, in bytes beside what is kept in
    front of the first layer. kept: sums of the way. before: what the layer in front of `begin` has moved."""
    n, own = stage.n, kept[1:] + stage.moved[way] + stage.need[way]
    most = np.full((n + 2, n + 1), -np.inf)  # from a layer to one before another one
    behind = own + np.concatenate([[0.0], stage.moved[way][:-1]])
    for first in range(n):
        most[first, first + 1 :] = np.maximum.accumulate(behind[first:])
    return np.maximum(most[begin + 1, end], own[np.minimum(begin, n - 1)] + before)


def undominated(points: np.ndarray) -> np.ndarray:
    """The indices of the points, (points, columns), than which no other one is as small in all columns but the last; of
    those that are alike in these the one with the smallest last stays. Some may be left that another one is as small
    as, where finding them would take longer than they do."""
    order = np.lexsort(points.T[::-1])
    # places in each column's order compare as its numbers do; those of the first column are in order
    places = [np.unique(column[order], return_inverse=True)[1].astype(np.int32) for column in points.T[1:-1]]
    front, found = np.empty((len(places), 0), np.int32), []
    for first in range(0, max(1, len(order)), BLOCK):
        here = np.stack([column[first : first + BLOCK] for column in places])
        left = np.flatnonzero(~_as_small(front, here).any(1))
        here = here[:, left]
        left = left[~np.tril(_as_small(here, here), -1).any(1)]
        found.append(order[first + left])
        if front.shape[1] < FRONT or sum(map(len, found)) < PAYS * BLOCK * len(found):  # else it finds next to none
            front = np.concatenate([front, np.stack([column[first + left] for column in places])], 1)
    return np.concatenate(found)


def _as_small(front: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Whether points of the front, (columns, front), are as small in all columns as those here: (here, front)."""
    small = np.ones((here.shape[1], front.shape[1]), bool)
    for known, column in zip(front, here, strict=True):
        small &= known <= column[:, None]
    return small

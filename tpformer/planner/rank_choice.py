"""The fastest mix of what the layers of one pipeline rank keep, over all mixes in one order.

Belongs here: the search in a rank, by the seconds of its microbatch. A stage's mixes are stage_mixes.py's. How ranks'
mixes become a run's is in keep_choice.py.

Layers of a stage are in the order of the ways: what is offloaded first, because it has the longest time to return, then
what makes most again, where least waits; what keeps all comes last. The fastest mix is found in two steps: first of
those of up to three ways, then of all that could be faster. For that, what is held at the moments of a step has prices,
and so have moved bytes (prices.py). Each way of a layer is by so many seconds above its cheapest one, and each mix of a
stage by no less than its layers together. No mix of the rank that fits takes less than the cheapest ways of all layers
and what its stages are above them. So a mix that beats the first step's has few ways that are above. Of a stage no mix
may be as cheap as its layers are alone: what it is above at least, the other stages have less.

Say a rank takes 1.0 s if its layers keep all, the first mix takes 1.2 s, and prices say that none takes less than 1.19.
Then the layers of a faster mix are together above their cheapest ways by less than 0.01 s: if `full` is by 0.004 s, at
most two layers have it. And if `mlp` makes the backward longer by 0.06 s, at most three have it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import PLAIN, LayerKeep, RunConfig

from .memory import pipeline_buffers
from .moments import rank_layers
from .prices import Bound, Prices
from .rank_memory import ALONE, cached_occupancies, predicted_memory, predicted_stage, stages_size
from .stage_mixes import KEPT, MOVED, PLACE, Stage, StageMixes, splits, undominated, within
from .states import GRADIENTS
from .step_time import StepModel
from .units import with_keep

FIRST = 1e-4  # of the slowest mix: how far above the bound mixes are looked at first
STEPS = 40  # in which shares of three ways are tried; of as many layers of a stage, or fewer, all are
PAIRS = 1 << 20  # of the mixes of a rank's stages that are looked at at once
PARTS = 64  # so often, at most


def _less_than_before(numbers: np.ndarray) -> np.ndarray:
    """Which of the numbers are less than all before them."""
    return numbers < np.concatenate([[np.inf], np.minimum.accumulate(numbers)[:-1]])


class Mixes(NamedTuple):
    """What the layers of a rank keep.

    ways: of each stage's layers, as indices. seconds: of a microbatch. least: a lower bound of those of any mixes that
    fit. need: the least bytes of the rank in which these fit.
    """

    ways: list[np.ndarray]
    seconds: float
    least: float
    need: float


class Rank:
    """A pipeline rank: its stages, and what else it holds."""

    def __init__(self, config: RunConfig, rank: int, plain: StepModel, ways: Sequence[LayerKeep]) -> None:
        layout, self.ways = config.parallel, ways
        self.indices = layout.stages_of(rank)
        self.moments = ALONE
        if layout.pipeline_parallel > 1:
            sizes = layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank
            self.moments = cached_occupancies(layout.pipeline_schedule, *sizes, tuple(self.indices), rank)
        bare = with_keep(config, PLAIN)
        whole = predicted_memory(bare, rank)
        parts = dict(whole.parts)
        varying = (
            "pipeline buffers",
            "saved activations",
            "on their way to or from the host",
            "queued weight gradients",
            "temporaries *",
        )
        of_rank = stages_size(bare, [predicted_stage(bare, index) for index in self.indices])
        of = rank_layers(bare, self.indices, of_rank)
        gradients = 0.0 if layout.cpu_offload or GRADIENTS not in parts else whole.states[1].nbytes
        self.base = sum(size for name, size in parts.items() if name not in (*varying, GRADIENTS))
        if layout.pipeline_parallel > 1:
            self.base += pipeline_buffers(bare, self.indices, 0)
        self.stages = [Stage(bare, index, plain, ways, of, gradients) for index in self.indices]
        moments = self.moments
        split = np.where(np.isin(moments.kinds, ["B", "I"]), "B", moments.kinds)
        what = np.stack([moments.stages, split == "B", split == "F"], 1)
        rows = np.unique(np.concatenate([moments.forward, moments.queued, what], 1), axis=0)
        self.flights, waiting = rows[:, : len(self.stages)], rows[:, len(self.stages) : -3]
        columns, at_place, at_forward = rows[:, -3].astype(int), rows[:, -2] > 0, rows[:, -1] > 0
        self.columns = np.where(at_place, columns, -1)  # the stage whose places count, if it is in its backward
        self.known: list[tuple[Mixes, float]] = []  # what was proven fastest, and in which room
        self.fastest = sum(float(stage.cost(np.zeros((1, 5)))[0]) for stage in self.stages) * (1 + 1e-9)  # all kept
        self.slowest = sum(stage.slowest for stage in self.stages) * (1 + 1e-9)
        self.fixed = waiting @ [stage.queued for stage in self.stages] + self.flights @ [s.rest for s in self.stages]
        others = np.array([[s.at_weights, s.at_forward] for s in self.stages])[columns, at_forward.astype(int)]
        self.fixed += np.where(at_place, 0.0, others)
        rows = np.unique(np.concatenate([self.columns[:, None], self.flights, self.fixed[:, None]], 1), axis=0)
        alike = rows[None, :, 0] == rows[:, None, 0]
        # moments that another one of the kind holds as much in, or more, are no peak
        more = alike & (rows[None] >= rows[:, None]).all(-1) & (rows[None] > rows[:, None]).any(-1)
        self.columns, self.flights, self.fixed = np.split(rows[~more.any(1)], [1, len(self.stages) + 1], 1)
        self.columns, self.fixed = self.columns[:, 0].astype(int), self.fixed[:, 0]

    def choose(self, room: float) -> Mixes | None:
        """The fastest mixes that fit into so many bytes of the rank; None if none do.

        Of equally fast ones the order is that of every room: what is chosen in some bytes is so in all fewer ones that
        it fits into.
        """
        for known, most in self.known:
            if known.need <= room <= most:
                return known
        found = self._choose(room - self.base)
        if found is not None and found.least == found.seconds:
            self.known.append((found, room))
        return found

    @functools.cached_property
    def _smallest(self) -> list[StageMixes]:
        """Each stage's mixes than which no other one keeps less and needs less in its worst place."""
        every = functools.partial(within, gap=np.inf, fits=lambda values: np.ones(len(values), bool), timed=False)
        found = (every(stage, np.zeros_like(stage.kept)) for stage in self.stages)
        return [mixes for mixes in found if mixes is not None]

    @functools.cached_property
    def least(self) -> float:
        """The least bytes of the rank in which some mix fits."""
        pairs = np.stack([each.ravel() for each in np.indices([len(mixes.ways) for mixes in self._smallest])])
        values = [mixes.values[at] for mixes, at in zip(self._smallest, pairs, strict=True)]
        return (self.base + float(self._needs(values).min())) * (1 + 1e-12)  # more than what sums are rounded by

    @functools.cached_property
    def _prices(self) -> Prices:
        return Prices(self.stages, self.flights, self.columns, self.fixed)

    def _choose(self, room: float) -> Mixes | None:
        seconds, mixes = self._stair(room) or self._together(self._smallest, np.inf, np.inf, room) or (np.inf, [])
        if not mixes:
            return None
        bound, slack = self._prices.bound(room, mixes), 1e-9 * self.slowest  # sums of floats differ by their order
        floors = np.zeros(len(self.stages))  # how far stages are above the bound, at least
        least, gap, most = bound.seconds, FIRST * self.slowest, seconds - slack
        while least < seconds - slack:  # what is found early leaves less to look at
            above = min(float(floors.sum()) + gap, seconds - bound.seconds + slack)
            looked = self._faster(bound, floors, above, most, room)
            if looked is None:
                break
            if looked[0] < np.inf:
                seconds, mixes = looked
                most = min(most, seconds + slack)  # the last look sees all that are as fast
            least, gap = bound.seconds + above, 2 * gap
        values = [stage.columns(mix[None]) for stage, mix in zip(self.stages, mixes, strict=True)]
        least = least if least < seconds - slack else seconds
        return Mixes(mixes, seconds, least, self.base + float(self._needs(values)[0]))

    def _three(self, ways: tuple[int, int, int]) -> list[np.ndarray]:
        """The ways of each stage's layers, (splits, layers), in all splits of three ways that differ, or in the one."""
        shares = splits(min(STEPS, max(stage.n for stage in self.stages))) if ways[0] < ways[1] else np.zeros((1, 2))
        found = []
        for stage in self.stages:
            ends, at = np.rint(shares * stage.n)[:, :, None], np.arange(stage.n)
            found.append(np.where(at < ends[:, 0], ways[0], np.where(at < ends[:, 1], ways[1], ways[2])))
        return found

    @functools.cached_property
    def _stairs(self) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """(three ways, columns) of the mixes of up to three ways, in the same shares in every stage, that need less
        than all faster ones. Columns: seconds, need, which three ways, which split. Of equally fast ones that which
        moves least is first, and then that which keeps most."""
        every, columns = itertools.combinations_with_replacement(range(len(self.ways)), 3), []
        threes = [(a, b, c) for a, b, c in every if a == b == c or a < b < c]  # two ways are among splits of three
        for number, three in enumerate(threes):
            chosen = self._three(three)
            values = [stage.columns(mix) for stage, mix in zip(self.stages, chosen, strict=True)]
            cost = np.round(sum(stage.cost(each) for stage, each in zip(self.stages, values, strict=True)), 12)
            moved, keeps = np.round(sum(each[:, MOVED] for each in values)), sum(mix.sum(1) for mix in chosen)
            which = np.full(len(cost), number), np.arange(len(cost))
            columns.append(np.stack([cost, moved, -keeps, self._needs(values), *which]))
        table = np.concatenate(columns, 1)
        table = table[:, np.lexsort(table[2::-1])]
        return threes, table[:, _less_than_before(table[3])][[0, 3, 4, 5]]

    def _stair(self, room: float) -> tuple[float, list[np.ndarray]] | None:
        """(seconds, each stage's ways) of the fastest mix of up to three ways that fits."""
        threes, table = self._stairs
        fits = np.flatnonzero(table[1] <= room)
        if len(fits) == 0:
            return None
        seconds, _, three, split = table[:, fits[0]]
        return float(seconds), [mix[int(split)] for mix in self._three(threes[int(three)])]

    def _faster(
        self, bound: Bound, floors: np.ndarray, above: float, most: float, room: float
    ) -> tuple[float, list[np.ndarray]] | None:
        """(seconds, each stage's ways) of the fastest mix that fits and takes at most `most` seconds, of all whose
        stages are together at most `above` above the bound; inf if there is none. None if they are too many.

        floors: how far each stage is above, at least. They rise to what is found.
        """
        found: list[StageMixes] = []
        least, layer = self._lowest.copy(), 0
        for index, stage in enumerate(self.stages):
            gap = above - (floors.sum() - floors[index])
            fits = functools.partial(self._may_fit, index, room=room, most=most, least=self._lowest)
            mixes = within(stage, bound.above[:, layer : layer + stage.n], gap, fits)
            layer += stage.n
            if mixes is None:
                return None
            paid = mixes.seconds + self._holds(index, mixes.values) @ bound.bytes - bound.least[index]
            floors[index] = max(floors[index], min([gap, *paid]))
            stay = (paid <= gap) & self._may_fit(index, mixes.values, room, most, least)
            mixes = StageMixes(*(part[stay] for part in mixes._replace(above=paid)))
            if len(mixes.ways) == 0:
                return np.inf, []
            least[index] = mixes.values.min(0)
            found.append(self._better(mixes) if len(self.stages) > 1 else mixes)
        return self._together(found, above, most, room)

    def _together(
        self, found: Sequence[StageMixes], above: float, most: float, room: float
    ) -> tuple[float, list[np.ndarray]] | None:
        """_faster's result, of all that combine a mix of each stage."""
        found = [StageMixes(*(part[each.seconds.argsort(kind="stable")] for part in each)) for each in found]
        held = [self._holds(index, each.values) for index, each in enumerate(found)]
        full = self.fixed + sum(each.max(0) for each in held)
        first = np.argsort(-full)[: max(1, int((full > room).sum()))]  # the moments that leave fewest; others leave all
        held = [each[:, first] for each in (held[0] + self.fixed, *held[1:])]
        rows = np.zeros((1, 0), np.int64)
        for each in found:
            part = max(1, PAIRS // len(each.ways))  # so many rows at a time, for the sake of memory
            if len(rows) > PARTS * part:
                return None
            starts = range(0, max(1, len(rows)), part)
            rows = np.concatenate([self._joined(found, held, rows[at : at + part], above, most, room) for at in starts])
        if len(rows) == 0:
            return np.inf, []
        stages = [each.seconds[row] for each, row in zip(found, rows.T, strict=True)]
        moved = [each.values[row, MOVED] for each, row in zip(found, rows.T, strict=True)]
        keeps = [each.ways.sum(1)[row] for each, row in zip(found, rows.T, strict=True)]
        best, taken = np.arange(len(rows)), np.round(sum(stages), 12)
        for key in (taken, np.round(sum(moved)), -sum(keeps), *stages):  # an order that does not depend on prices
            best = best[key[best] == key[best].min()]
        return float(taken[best[0]]), [each.ways[at] for each, at in zip(found, rows[best[0]], strict=True)]

    def _joined(
        self,
        found: Sequence[StageMixes],
        held: Sequence[np.ndarray],
        rows: np.ndarray,
        above: float,
        most: float,
        room: float,
    ) -> np.ndarray:
        """Rows of stages' mixes, (rows, stages), each with every mix of the next stage; without those that do not fit,
        take too long or are too far above the bound, whichever mixes the stages that follow have. held: what the mixes
        of each stage hold."""
        index, other = rows.shape[1], np.zeros((len(rows), held[0].shape[1]))
        cost, over = np.zeros(len(rows)), np.zeros(len(rows))
        for stage, (each, of) in enumerate(zip(held, found, strict=True)):
            if stage < index:
                row = rows[:, stage]
                other, cost, over = other + each[row], cost + of.seconds[row], over + of.above[row]
            elif stage > index:
                other, cost, over = other + each.min(0), cost + of.seconds[0], over + of.above.min()
        own, mixes = held[index], found[index]
        # in order of seconds: from the first that may fit in the first moment to the last that takes no longer
        start = np.searchsorted(-np.minimum.accumulate(own[:, 0]), other[:, 0] - room)
        number = np.maximum(np.searchsorted(mixes.seconds, most - cost, "right") - start, 0)
        row = np.repeat(np.arange(len(rows)), number)
        column = np.arange(len(row)) - np.repeat(np.cumsum(number) - number - start, number)
        fits = over[row] + mixes.above[column] <= above
        row, column = row[fits], column[fits]
        for before, here in zip(other.T, own.T, strict=True):  # moment by moment
            fits = before[row] + here[column] <= room
            row, column = row[fits], column[fits]
        return np.concatenate([rows[row], column[:, None]], 1)

    @functools.cached_property
    def _lowest(self) -> np.ndarray:
        """Columns than which no mix of a stage has less, (stages, 5)."""
        least = np.zeros((len(self.stages), 5))
        least[:, : PLACE + 1] = [mixes.values[:, : PLACE + 1].min(0) for mixes in self._smallest]
        return least

    def _may_fit(self, index: int, values: np.ndarray, room: float, most: float, least: np.ndarray) -> np.ndarray:
        """Whether mixes of a stage fit, and take at most `most` seconds, if other stages have the least columns."""
        every = list(least[:, None])  # a row of each stage
        every[index] = values
        seconds = sum(stage.cost(each) for stage, each in zip(self.stages, every, strict=True))
        return (self._needs(every) <= room) & (seconds <= most)

    def _better(self, mixes: StageMixes) -> StageMixes:
        """Those mixes of a stage than which no other one is better in all that counts, now that its seconds are
        known."""
        seconds, keeps = np.round(mixes.seconds, 12), mixes.ways.sum(1)
        order = np.lexsort((-keeps, np.round(mixes.values[:, MOVED]), seconds)).argsort()
        better = undominated(np.stack([order, mixes.values[:, KEPT], mixes.values[:, PLACE], order], 1))
        return StageMixes(*(each[better] for each in mixes))

    def _needs(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The bytes beside `base` that mixes need: values has each stage's columns, with as many rows, or one."""
        return (sum(self._holds(index, each) for index, each in enumerate(values)) + self.fixed).max(1)

    def _holds(self, index: int, values: np.ndarray) -> np.ndarray:
        """What mixes of a stage hold in each moment, (mixes, moments), by their columns."""
        place = values[:, PLACE] - values[:, KEPT] - self.stages[index].before
        return np.outer(values[:, KEPT], self.flights[:, index]) + np.outer(place, self.columns == index)

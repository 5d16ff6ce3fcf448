"""The fastest mix of what layers keep whose predicted peak fits into some bytes, over all mixes in one order.

Belongs here: the choice, a pure function of a configuration and a device. Bytes are units.py's and moments.py's,
seconds step_time.py's. A budget's text, and what is said where nothing fits, is in memory_budget.py.

Layers of a stage are in the order of WAYS: what is offloaded first, because it has the longest time to return, then
what makes most again, where least waits; what keeps all comes last. Of these mixes the fastest is found in two steps:
first of those of up to three ways, then of all that could be faster. For that, kept and moved bytes have prices, and
each way of a layer is by so many seconds above its cheapest one. No mix that fits takes less than the cheapest ways of
all layers and these seconds. So a mix that beats the first step's has few of them, and there are few such mixes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import PLAIN, LayerKeep, RunConfig, keep_text

from .devices import Device
from .kept import kept_by_kind
from .moments import Layers, rank_layers
from .rank_memory import ALONE, cached_occupancies, predicted_memory, predicted_stage, stages_size
from .software import Software, ours
from .states import GRADIENTS
from .step_time import StepModel
from .units import stage_units

WAYS = (
    LayerKeep("full", offload=True),
    LayerKeep("mlp", offload=True),
    LayerKeep(pack=True, offload=True),
    LayerKeep(offload=True),
    LayerKeep("full"),
    LayerKeep("full", pack=True),
    LayerKeep("mlp"),
    LayerKeep("mlp", pack=True),
    LayerKeep(pack=True),
    LayerKeep(),
)
KEPT, PLACE, FORWARD, BACKWARD, MOVED = range(5)  # columns of mixes: bytes, the worst place, seconds, bytes
PRICES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0])  # shares of a bus that bounds weigh
MOST = 1 << 20  # mixes that are looked at in the second step
MOMENTS = 4  # of a rank with several stages, whose bounds are compared
STEPS = 40  # in which shares of three ways are tried; of as many layers of a stage, or fewer, all are


class Choice(NamedTuple):
    """What every layer keeps. memory: the predicted peak of the rank that needs most, in bytes. seconds: of a step.

    short: by which share of its time the slowest rank's microbatch could be faster with a mix that was not looked at,
    at most; 0 if all that could be faster were.
    """

    keep: str
    memory: float
    seconds: float
    short: float


def ways_of(config: RunConfig) -> tuple[LayerKeep, ...]:
    """The ways that a run may choose from, in order. On a CPU offloading saves nothing and packing's passes take more
    memory than they save; only bfloat16 is packed. train.dtype and train.device must be set."""
    cuda, packs = config.train.device != "cpu", config.train.dtype == "bfloat16"
    return tuple(way for way in WAYS if (cuda or not way.offload) and ((cuda and packs) or not way.pack))


def with_keep(config: RunConfig, keep: str) -> RunConfig:
    """The configuration with this text of parallel.keep, and nothing else that says what layers keep."""
    layout = dataclasses.replace(
        config.parallel,
        recompute="none",
        recompute_layers="",
        recompute_interval=1,
        pack_activations=False,
        pack_layers="",
        offload_activations=False,
        keep=keep,
    )
    return dataclasses.replace(config, parallel=layout)


def peak(config: RunConfig) -> float:
    """The predicted peak of the pipeline rank that needs most, in bytes."""
    return max(predicted_memory(config, rank).total for rank in range(config.parallel.pipeline_parallel))


def choose(
    config: RunConfig,
    device: Device,
    room: float,
    ways: Sequence[LayerKeep] | None = None,
    software: Software | None = None,
) -> Choice | None:
    """The fastest Choice whose predicted peak is at most `room` bytes on every rank; None if there is none.

    Each pipeline rank's layers are chosen for its own microbatches in flight, and so that its own microbatch takes
    least time: then the slowest rank is as fast as it can be. One way for all layers is taken if it makes the step
    faster still. train.dtype, train.device and the vocabulary must be set.
    """
    ways, software = ways or ways_of(config), software or ours(config.parallel, device)
    plain = StepModel(with_keep(config, PLAIN), device, software)
    if (most := peak(with_keep(config, PLAIN))) <= room:  # nothing is faster
        return Choice(PLAIN, most, plain.step().seconds, 0.0)
    found: dict[int, LayerKeep] = {}
    slowest, least = 0.0, 0.0
    for rank in range(config.parallel.pipeline_parallel):
        chosen = _Rank(config, rank, plain, ways).choose(room)
        if chosen is None:
            return None
        found |= chosen[0]
        slowest, least = max(slowest, chosen[1]), max(least, chosen[2])
    keep = keep_text([found[layer] for layer in range(config.model.n_layers)])
    changed = with_keep(config, keep)
    if (most := peak(changed)) > room * (1 + 1e-9):  # by what does not depend on layers, as an optimizer's workspace
        return None
    best = Choice(keep, most, StepModel(changed, device, software).step().seconds, max(0.0, 1 - least / slowest))
    # ranks of a pipeline have looked at their own microbatches, of which a schedule makes a step
    for way in ways if config.parallel.pipeline_parallel > 1 else ():
        alike = with_keep(config, str(way))
        if (most := peak(alike)) <= room and (
            seconds := StepModel(alike, device, software).step().seconds
        ) < best.seconds:
            best = Choice(str(way), most, seconds, best.short)
    return best


class _Stage:
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


class _Bound(NamedTuple):
    """seconds: no mix that fits is faster than this and what all its layers are above it: (ways, layers), of the stages
    one after the other. In one moment layers may keep `left` bytes; kept: (ways, layers), what they keep then."""

    seconds: float
    above: np.ndarray
    kept: np.ndarray
    left: float


class _Sums:
    """Sums over layers of numbers (ways, layers), for mixes whose ways come in order in each stage. ends: of stages."""

    def __init__(self, numbers: np.ndarray, ends: Sequence[int]) -> None:
        ways, n = numbers.shape
        self.sums = np.concatenate([np.zeros((ways, 1)), np.cumsum(numbers, 1)], 1)
        least, behind = np.minimum.accumulate(numbers[::-1], 0)[::-1], 0.0  # of this way and those behind it
        # rest[stage][way][layer]: at least so much from this layer on, if it has this way or one behind it
        self.rest: list[np.ndarray] = []
        for begin, end in reversed(list(zip([0, *ends], ends, strict=False))):
            rest = np.full((ways + 1, n + 1), np.inf)
            rest[:, end] = behind
            rest[:ways, begin:end] = np.cumsum(least[:, begin:end][:, ::-1], 1)[:, ::-1] + behind
            self.rest.insert(0, rest)
            behind = rest[0, begin]

    def of(self, way: int, begin: np.ndarray) -> np.ndarray:
        """Of layers from each of these on to each other one, in this way."""
        return self.sums[way][None, :] - self.sums[way][begin][:, None]


@functools.cache
def _splits(steps: int) -> np.ndarray:
    """Where the second and the third of three ways begin, as shares of the layers: (splits, 2)."""
    return np.array([(a, b) for a in range(steps + 1) for b in range(a, steps + 1)]) / steps


def _seconds(plain: StepModel, way: LayerKeep, experts: bool) -> np.ndarray:
    forward, inputs, weights = plain.layer.work(way.recompute, experts=experts, packs=way.pack)
    return np.array([forward.seconds, inputs.seconds + weights.seconds])


class _Rank:
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
        varying = ("saved activations", "on their way to or from the host", "queued weight gradients", "temporaries *")
        of_rank = stages_size(bare, [predicted_stage(bare, index) for index in self.indices])
        of = rank_layers(bare, self.indices, of_rank)
        gradients = 0.0 if layout.cpu_offload or GRADIENTS not in parts else whole.states[1].nbytes
        self.base = sum(size for name, size in parts.items() if name not in (*varying, GRADIENTS))
        self.stages = [_Stage(bare, index, plain, ways, of, gradients) for index in self.indices]
        rows = np.concatenate([self.moments.forward, self.moments.queued], 1)
        # moments that another one holds as much in, or more, are no peak
        more = (rows[None] >= rows[:, None]).all(-1) & (rows[None] > rows[:, None]).any(-1)
        rows = rows[~more.any(1)]
        self.flights, waiting = rows[:, : len(self.stages)], rows[:, len(self.stages) :]
        self.fixed = waiting @ [stage.queued for stage in self.stages] + self.flights @ [s.rest for s in self.stages]

    def choose(self, room: float) -> tuple[dict[int, LayerKeep], float, float] | None:
        """(the way of each of the rank's layers, a microbatch's seconds, a lower bound of those of any mix that fits);
        None if nothing fits. room: bytes that the rank may need."""
        room = room - self.base
        seconds, mixes = self._mixes(room)
        if seconds == np.inf:
            return None
        bound = self._bound(room)
        for share in (0.1, 0.3, 1.0):  # what is found early leaves less to look at
            slack = 1e-9 * seconds  # sums of floats differ by their order
            found = self._faster(bound, share * (seconds - bound.seconds) + slack, room)
            if found is not None and found[0] < seconds - slack:
                seconds, mixes = found
        least = bound.seconds if found is None else seconds  # the last had all that could be faster
        chosen = {
            layer: self.ways[way]
            for stage, mix in zip(self.stages, mixes, strict=True)
            for layer, way in zip(stage.layers, mix, strict=True)
        }
        return chosen, seconds, least

    def _bound(self, room: float) -> _Bound:
        """The highest bound of MOMENTS in which most microbatches wait."""
        found, most = [], np.argsort(-self.flights.sum(1), kind="stable")
        for at in most[self.flights[most].any(1)][:MOMENTS]:
            here = [stage for stage, flights in zip(self.stages, self.flights[at], strict=True) if flights]
            place = max(max(stage.need[:, -1].min() - stage.before, stage.loss + stage.none) for stage in here)
            found.append(self._priced(self.flights[at], float(room - self.fixed[at] - place)))
        return max(found, key=lambda bound: bound.seconds)

    def _priced(self, flights: np.ndarray, left: float) -> _Bound:
        """The bound of a moment with so many microbatches of each stage, whose layers may keep `left` bytes."""
        stages, bus = self.stages, self.stages[0].bus
        kept = np.concatenate([stage.kept * number for stage, number in zip(stages, flights, strict=True)], 1)
        seconds, moved = (np.concatenate(each, 1) for each in zip(*((s.seconds, s.moved) for s in stages), strict=True))
        forward, backward = (sum(stage.time.device(kind) for stage in stages) for kind in "FB")
        host = sum(stage.time.host["W"] for stage in stages)
        best, at = -np.inf, np.zeros(4)
        rates = seconds.sum(-1).max() / max(kept.max(), 1.0) * np.geomspace(0.01, 10, 60)
        shares, near = np.array([*((a, 0.0) for a in PRICES), *((1.0, b) for b in PRICES[1:])]), 1.0
        parts = np.stack([kept, seconds[..., 0], seconds[..., 1], moved], -1)
        for _ in range(5):
            # prices of kept bytes, of the forward, of the backward, and of moved bytes
            w = np.array([(rate, 1 - a, 1 - b, (a + b) / bus) for rate in (0.0, *rates) for a, b in shares])
            work = w[:, 1] * forward + w[:, 2] * backward + (1 - w[:, 2]) * host
            found = (parts @ w.T).min(0).sum(0) + work - w[:, 0] * left
            if found.max() > best:
                best, at = float(found.max()), w[int(found.argmax())]
            near /= 4  # again, closer to the best prices
            share = np.clip(2 - at[1] - at[2] + near * np.linspace(-1, 1, 9), 0, 2)
            shares = np.stack([np.minimum(share, 1), np.maximum(share - 1, 0)], 1)
            rates = at[0] * np.exp(near * np.linspace(-1, 1, 17))
        priced = parts @ at
        return _Bound(best, priced - priced.min(0), kept, left)

    def _mixes(self, room: float) -> tuple[float, list[np.ndarray]]:
        """(seconds, each stage's ways) of the fastest mix of up to three ways that fits, in the same shares in every
        stage; of equally fast ones that which moves least, and keeps most. Seconds are inf if none fits."""
        best: tuple[float, float, float, list[np.ndarray]] = np.inf, np.inf, np.inf, []
        for one, two, three in itertools.combinations_with_replacement(range(len(self.ways)), 3):
            if one == two != three or one != two == three:  # two ways are among the splits of three
                continue
            stages, cost, moved, does = [], np.zeros(1), np.zeros(1), np.zeros(1)
            splits = _splits(min(STEPS, max(stage.n for stage in self.stages))) if one < two else np.zeros((1, 2))
            for stage in self.stages:
                ends = np.rint(splits * stage.n)[:, :, None]
                at = np.arange(stage.n)
                chosen = np.where(at < ends[:, 0], one, np.where(at < ends[:, 1], two, three))
                stages.append((chosen, self._values(stage, chosen)))
                cost, moved = cost + stage.cost(stages[-1][1]), moved + stages[-1][1][:, MOVED]
                does = does - chosen.sum(1)
            cost = np.round(cost, 12)  # sums of floats differ by their order
            fits = np.flatnonzero(self._fits([values for _, values in stages], room))
            if len(fits):
                first = int(fits[np.lexsort((does[fits], moved[fits], cost[fits]))[0]])
                order = float(cost[first]), float(moved[first]), float(does[first])
                if order < best[:3]:
                    best = *order, [chosen[first] for chosen, _ in stages]
        return best[0], best[3]

    def _faster(self, bound: _Bound, gap: float, room: float) -> tuple[float, list[np.ndarray]] | None:
        """(seconds, each stage's ways) of the fastest mix that fits, of all whose layers are at most `gap` above the
        bound; inf if none fits. None if they are too many."""
        lasts = list(itertools.accumulate(stage.n for stage in self.stages))
        above, kept, ways = _Sums(bound.above, lasts), _Sums(bound.kept, lasts), len(bound.above)
        every = np.arange(lasts[-1] + 1)
        ends = np.zeros((1, 1), np.int16)  # where each way ends in each stage, behind where the first one begins
        cost, size = np.zeros(1), np.zeros(1)
        for stage, way in itertools.product(range(len(lasts)), range(ways)):
            begin = ends[:, -1]
            costs, sizes = cost[:, None] + above.of(way, begin), size[:, None] + kept.of(way, begin)
            can = (costs + above.rest[stage][way + 1] <= gap) & (every >= begin[:, None])
            row, end = np.nonzero(can & (sizes + kept.rest[stage][way + 1] <= bound.left * (1 + 1e-9)))
            if len(row) > MOST:
                return None
            made = np.concatenate([ends[row], end[:, None].astype(np.int16)], 1)
            ends, cost, size = made, costs[row, end], sizes[row, end]
        best: tuple[float, list[np.ndarray]] = np.inf, []
        for some in np.array_split(ends[:, 1:], max(1, len(ends) * lasts[-1] >> 20)):
            firsts = zip([0, *lasts], lasts, np.split(some, len(lasts), 1), strict=False)
            mixes = [(every[begin:end, None] >= each[:, None, :]).sum(-1) for begin, end, each in firsts]
            values = [self._values(stage, mix) for stage, mix in zip(self.stages, mixes, strict=True)]
            taken = np.sum([stage.cost(each) for stage, each in zip(self.stages, values, strict=True)], 0)
            seconds = np.where(self._fits(values, room), taken, np.inf)
            # of equally fast ones that which moves least, and keeps most
            moved, does = np.sum([each[:, MOVED] for each in values], 0), np.sum([mix.sum(1) for mix in mixes], 0)
            order = np.lexsort((-does, moved, np.round(seconds, 12)))
            if len(order) and seconds[order[0]] < best[0]:
                best = float(seconds[order[0]]), [mix[order[0]] for mix in mixes]
        return best

    @staticmethod
    def _values(stage: _Stage, chosen: np.ndarray) -> np.ndarray:
        """The columns of mixes: (mixes, 5). chosen: the ways of their layers, (mixes, layers)."""
        at = np.arange(stage.n)
        kept, moved, seconds = stage.kept[chosen, at], stage.moved[chosen, at], stage.seconds[chosen, at].sum(1)
        before = np.concatenate([np.zeros((len(chosen), 1)), moved[:, :-1]], 1)
        places = (np.cumsum(kept, 1) + moved + before + stage.need[chosen, at]).max(1)
        return np.stack([kept.sum(1), places, seconds[:, 0], seconds[:, 1], moved.sum(1)], 1)

    def _fits(self, values: Sequence[np.ndarray], room: float) -> np.ndarray:
        """Whether mixes fit: values has each stage's columns, all with as many rows."""
        kept = np.stack([each[:, KEPT] for each in values], 1)
        fits = np.ones(len(kept), bool)
        waiting = kept @ self.flights.T + self.fixed  # (mixes, moments)
        for column, (stage, each) in enumerate(zip(self.stages, values, strict=True)):
            here = self.flights[:, column] > 0
            if here.any():
                most = waiting[:, here].max(1)
                place = each[:, PLACE] - each[:, KEPT] - stage.before
                fits &= most + np.maximum(place, stage.loss + stage.none) <= room
        return fits

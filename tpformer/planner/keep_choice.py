"""What the layers of a run keep under so many bytes: the mix of each pipeline rank, and the fastest step of them.

Belongs here: the choice, a pure function of a configuration and a device. A rank's fastest mix is rank_choice.py's,
bytes are units.py's and moments.py's, seconds step_time.py's. A budget's text, and what is said where nothing fits, is
in memory_budget.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tpformer.config import PLAIN, LayerKeep, RunConfig, keep_text

from .devices import Device
from .rank_choice import Mixes, Rank
from .rank_memory import predicted_memory, predicted_stage
from .software import Software, ours
from .step_time import StepModel
from .units import with_keep

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
FINEST = 2**16  # bytes between rooms that are told apart
NEAREST = (0.0, *(2.0**-n for n in range(12, 0, -1)))  # how far below a border a step is looked for
DIGITS = 10  # of seconds that are compared: sums of floats differ by their order


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
    least time. A schedule makes a step of these, and may make a shorter one of longer microbatches: `_ordered` leaves
    such steps out. One way for all layers is taken where that is faster. So less room never has a faster step, nor a
    larger peak. train.dtype, train.device and the vocabulary must be set.
    """
    ways, software = ways or ways_of(config), software or ours(config.parallel, device)
    plain = StepModel(with_keep(config, PLAIN), device, software)
    bare = _step(plain, PLAIN)
    if bare.memory <= room:  # nothing is faster
        return Choice(PLAIN, bare.memory, bare.seconds, 0.0)
    ranks = [Rank(config, rank, plain, ways) for rank in range(config.parallel.pipeline_parallel)]

    def mixes(most: float) -> list[Mixes]:
        return [each for each in (rank.choose(most) for rank in ranks) if each is not None]

    floor = max(rank.least for rank in ranks)

    def fastest(most: float) -> _Step:  # a border may lie just below what the fullest rank needs
        return _step(plain, _text(config, ranks, mixes(max(most, floor))))

    steps, short = [], 0.0
    if len(found := mixes(room)) == len(ranks):
        short = 1 - max(each.least for each in found) / max(each.seconds for each in found)
        if len(ranks) == 1 or all(each.seconds <= rank.fastest for rank, each in zip(ranks, found, strict=True)):
            steps.append(fastest(room))  # no more room has faster ones
        else:
            steps.append(_ordered(fastest, fastest(floor), bare, room))
    if len(ranks) > 1:
        steps += sorted(_step(plain, str(way)) for way in ways)
    # what does not depend on layers may need more, as an optimizer's workspace
    steps = [step for step in steps if step.memory <= room * (1 + 1e-9)]
    best = min(steps, key=lambda step: step.seconds, default=None)  # the first of equally fast ones
    return None if best is None else Choice(best.keep, best.memory, best.seconds, max(0.0, short))


class _Step(NamedTuple):
    """A step that fits into -`minus` bytes. Of two with the same seconds that which moves less to the host is less, and
    then that which keeps more: what the model of time calls free is done no more than it must be."""

    seconds: float
    moved: float
    minus: float
    keep: str

    @property
    def memory(self) -> float:
        """The predicted peak in bytes."""
        return -self.minus


def _step(plain: StepModel, keep: str) -> _Step:
    changed = with_keep(plain.config, keep)
    moved = sum(predicted_stage(changed, stage).offloaded for stage in range(changed.parallel.n_stages))
    return _Step(float(f"{plain.variant(changed).step().seconds:.{DIGITS}g}"), moved, -peak(changed), keep)


def _ordered(fastest: Callable[[float], _Step], low: _Step, high: _Step, room: float) -> _Step:
    """The step in a room, of a row of steps from `high` to `low` that take ever longer and need ever less.

    fastest: the step of the ranks' fastest mixes in so many bytes, which may be faster in fewer. The rooms between the
    two are halved, and so is the half with `room`. A border's step is the fastest there if that is between the steps of
    the borders around. If it is faster than the upper one's, it is that of the nearest smaller room where it is not;
    else the lower one's, which fits. Borders do not depend on `room`: any two rooms have steps of one row.

    Say all kept needs 64 GiB and takes 10 s, and the least is 32 GiB with 14 s. For 43 GiB the first border is 48,
    where the fastest mixes take 11 s; the next one is 40, where they take 10.9 s: longer microbatches that the schedule
    overlaps better. Had 40 this step, 48 would be slower than it. So 40 has that of 39.998, or of 39.996, and so on,
    until one takes 11 s or more. Then 44 is asked, 42, and 43, until both ends of what is left have the same step.
    """
    bottom, top = low.memory, high.memory
    while low != high and top - bottom > FINEST:
        middle, step = (bottom + top) / 2, high
        if high.memory > middle:
            most = middle
            for share in NEAREST:
                step = fastest(min(most, middle - share * (middle - bottom)))
                if step.seconds >= high.seconds:
                    break
                most = step.memory - 1
            if not high.seconds <= step.seconds <= low.seconds or not bottom < step.memory <= middle * (1 + 1e-9):
                step = low
        if room < middle:
            top, high = middle, step
        else:
            bottom, low = middle, step
    return high if high.memory <= room else low


def _text(config: RunConfig, ranks: Sequence[Rank], mixes: Sequence[Mixes]) -> str:
    """parallel.keep of the ranks' mixes."""
    found = {
        layer: rank.ways[way]
        for rank, each in zip(ranks, mixes, strict=True)
        for stage, of_stage in zip(rank.stages, each.ways, strict=True)
        for layer, way in zip(stage.layers, of_stage, strict=True)
    }
    return keep_text([found[layer] for layer in range(config.model.n_layers)])

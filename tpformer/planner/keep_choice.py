"""What the layers of a run keep under so many bytes: the mix of each pipeline rank, and the fastest step of them.

Belongs here: the choice, a pure function of a configuration and a device. A rank's fastest mix is rank_choice.py's,
bytes are units.py's and moments.py's, seconds step_time.py's. A budget's text, and what is said where nothing fits, is
in memory_budget.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    least time. A schedule makes a step of these, and may make a shorter one of longer microbatches. So the step is the
    fastest of those of the ranks' mixes in this room and in every smaller one, and of one way for all layers. These do
    not depend on the room, only which of them fit does: less room never has a faster step, nor a larger peak.
    train.dtype, train.device and the vocabulary must be set.
    """
    ways, software = ways or ways_of(config), software or ours(config.parallel, device)
    plain = StepModel(with_keep(config, PLAIN), device, software)
    if (most := peak(plain.config)) <= room:  # nothing is faster
        return Choice(PLAIN, most, plain.step().seconds, 0.0)
    fastest = plain.step().seconds * (1 + 1e-9)
    ranks = [Rank(config, rank, plain, ways) for rank in range(config.parallel.pipeline_parallel)]
    best: _Step | None = None
    short = 0.0
    if len(ranks) > 1:
        steps = (_step(plain, str(way)) for way in ways)
        best = min((step for step in steps if step.memory <= room), default=None)
    for number, mixes in enumerate(_downwards(ranks, room)):
        if number == 0:
            short = 1 - max(each.least for each in mixes) / max(each.seconds for each in mixes)
        elif best is not None and _least(plain, mixes) >= best.seconds:
            break
        step = _step(plain, _text(config, ranks, mixes))
        if step.memory > room * (1 + 1e-9):  # by what does not depend on layers, as an optimizer's workspace
            break
        best = step if best is None else min(best, step)
        if len(ranks) == 1 or best.seconds <= fastest:
            break
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


def _downwards(ranks: Sequence[Rank], room: float) -> Iterator[list[Mixes]]:
    """The ranks' fastest mixes in so many bytes, then those in ever fewer, while something fits on every rank."""
    while True:
        mixes = [rank.choose(room) for rank in ranks]
        found = [each for each in mixes if each is not None]
        if len(found) < len(ranks):
            return
        yield found
        room = max(each.need for each in found) - 1


def _text(config: RunConfig, ranks: Sequence[Rank], mixes: Sequence[Mixes]) -> str:
    """parallel.keep of the ranks' mixes."""
    found = {
        layer: rank.ways[way]
        for rank, each in zip(ranks, mixes, strict=True)
        for stage, of_stage in zip(rank.stages, each.ways, strict=True)
        for layer, way in zip(stage.layers, of_stage, strict=True)
    }
    return keep_text([found[layer] for layer in range(config.model.n_layers)])


def _least(plain: StepModel, mixes: Sequence[Mixes]) -> float:
    """A lower bound of the step's seconds in as much room as the ranks' mixes need, and in less."""
    ranks = range(plain.layout.pipeline_parallel)
    fixed = sum(max(map(part, ranks)) for part in (plain.optimizer, plain.moving))
    return plain.least_span_of([each.least for each in mixes]) + fixed

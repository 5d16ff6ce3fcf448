"""The moment of a step at which a rank holds most, by its place in the schedule and in the stage that computes then.

Belongs here: how what units keep and need (units.py) adds up over a step. A peak is at the loss, while all layers wait;
or in the backward of a layer, while those before it wait and gradients of those after it are there; or when all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import RunConfig
from tpformer.layers.embedding import padded_vocab
from tpformer.ops import VocabSlice, default_chunk_tokens
from tpformer.parallel.zero import uses_fsdp

from .counting import StageCount
from .kept import kept_by_kind
from .memory import Occupancies, loss_workspace, microbatch_tokens, reduction_workspace
from .states import GRADIENTS, Elements, Precision, accumulates, model_states
from .units import Unit, head_elements, head_kept, stage_units


class Place(NamedTuple):
    """A place in the backward of a stage, in bytes beside all that waits before it.

    freed: of what its microbatch kept. moving: on its way from the host. working: temporaries. gradients: the share
    that is there of the rank's.
    """

    freed: float
    moving: float
    working: float
    gradients: float


class Moment(NamedTuple):
    """The fullest moment of a rank, in bytes; gradients: the share that is there."""

    saved: float
    output: float
    queued: float
    moving: float
    working: float
    gradients: float


class Layers(NamedTuple):
    """What `places` asks of a rank besides its units. Bytes.

    of_layer: gradients of a layer until they are added up, and what the reduction of the one before holds. head: what
    the loss keeps, and elements: of parameters behind the layers. loss: its workspace, and what is double in it and
    `head`. of: the rank's elements, and whether its gradients appear layer by layer.
    """

    of_layer: float
    head: float
    head_elements: float
    loss: float
    total: float
    by_layer: bool


def rank_layers(config: RunConfig, stages: Sequence[int], of_rank: Elements) -> Layers:
    """The Layers of a rank with these stages. of_rank: their Elements."""
    layout, precision, model = config.parallel, Precision.of(config), config.model
    adds = accumulates(config)
    item, t = precision.compute.itemsize, layout.tensor_parallel
    own = item * of_rank.layer if uses_fsdp(layout, precision.compute) or adds else 0.0
    at_end = layout.pipeline_parallel > 1 and layout.zero < 2  # then activations are freed already
    reduction = 0.0 if at_end else reduction_workspace(of_rank, layout, precision, accumulates=adds)
    head = behind = loss = 0.0
    if layout.n_stages - 1 in stages:
        tokens, entries = microbatch_tokens(config), model.vocab_size or 0
        width = -(-padded_vocab(entries, model.vocab_multiple) // t)
        chunk = default_chunk_tokens(VocabSlice(0, width, entries), str(config.train.device))
        stream = kept_by_kind(config)[False].stream
        head, behind = head_kept(config, stream, item), head_elements(model, of_rank, t)
        # of what the loss keeps, its gradients are parts of what it needs while it runs; but where rows are gathered
        # the rank's own rows, and its part of their gradient, lie beside these
        workspace = loss_workspace(model, tokens, width, chunk, item, on_cpu=config.train.device == "cpu")
        loss = workspace - (head - stream) + 2 * stream * (layout.sequence_parallel and t > 1)
    return Layers(own + reduction, head, behind, loss, of_rank.total, not adds)


def places(units: Sequence[Unit], of: Layers, *, last: bool) -> list[Place]:
    """The places of a stage's backward, the last layers first. last: whether the loss is behind them."""
    found = [Place(0.0, units[-1].moved, of.loss, 0.0 if of.by_layer else 1.0)] if last else []
    freed, made = of.head * last, of.head_elements * last
    for unit, before in zip(reversed(units), [*reversed(units[:-1]), None], strict=True):
        gradients = min(1.0, made / of.total) if of.by_layer else 1.0
        moving = unit.moved + (before.moved if before is not None else 0.0)
        found.append(Place(freed, moving, unit.working + of.of_layer, gradients))
        freed, made = freed + unit.kept, made + unit.elements
    return found


def fullest_moment(
    config: RunConfig, stages: Sequence[StageCount], moments: Occupancies, of_rank: Elements, *, worst: bool = False
) -> Moment:
    """The fullest Moment of a rank. stages: its own, counted or predicted. moments: of its schedule. of_rank: their
    Elements. worst: as in kept_by_kind.

    In any moment of the schedule the next backward may be that of any stage that has a microbatch waiting.
    """
    layout, precision = config.parallel, Precision.of(config)
    of = rank_layers(config, [stage.stage for stage in stages], of_rank)
    states = {s.name: s.nbytes for s in model_states(of_rank, layout, precision, accumulates=not of.by_layer)}
    gradients = 0.0 if layout.cpu_offload else states[GRADIENTS]
    weights = [
        np.array([weight(stage) for stage in stages], float)
        for weight in (lambda stage: stage.saved - stage.offloaded, lambda s: s.output, lambda s: s.queued)
    ]
    waiting = moments.forward @ weights[0], moments.forward @ weights[1], moments.queued @ weights[2]
    # when all gradients are there nothing waits; in a pipeline they are reduced then
    at_end = reduction_workspace(of_rank, layout, precision, accumulates=not of.by_layer, at_end=True)
    best = Moment(0.0, 0.0, 0.0, 0.0, at_end if layout.pipeline_parallel > 1 and layout.zero < 2 else 0.0, 1.0)
    most = best.working + gradients
    kept = kept_by_kind(config, worst=worst)
    for column, stage in enumerate(stages):
        of_stage = np.where(moments.forward[:, column] > 0, sum(waiting), -np.inf)
        at = int(of_stage.argmax())
        if of_stage[at] == -np.inf:
            continue
        saved, output, queued = (float(part[at]) for part in waiting)
        units = stage_units(config, stage.stage, kept=kept, worst=worst)
        for place in places(units, of, last=stage.stage == layout.n_stages - 1):
            found = Moment(saved - place.freed, output, queued, *place[1:])
            size = sum(found[:-1]) + found.gradients * gradients
            if size > most:
                best, most = found, size
    return best

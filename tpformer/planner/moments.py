"""The moment of a step at which a rank holds most, by its place in the schedule and in the stage that computes then.

Belongs here: how what units keep and need (units.py) adds up over a step. A peak is at the loss, while all layers wait;
or in the backward of a layer, while those before it wait and gradients of those after it are there; or when all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import MLP_ACTIVATIONS, RunConfig
from tpformer.layers.embedding import padded_vocab
from tpformer.ops import VocabSlice, default_chunk_tokens
from tpformer.parallel.zero import uses_fsdp

from .counting import StageCount
from .kept import kept_by_kind
from .memory import (
    Occupancies,
    boundary_bytes,
    forward_workspace,
    loss_workspace,
    microbatch_tokens,
    reduction_workspace,
)
from .states import GRADIENTS, Elements, Precision, accumulates, in_backward, model_states
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

    of_layer: gradients of a layer until they are added up. head: what the loss keeps, and elements: of parameters
    behind the layers. loss: its workspace, and what is double in it and `head`. total: the rank's elements, and whether
    its gradients appear layer by layer. reduction: what that of the layer before holds. matrix: the gradient that is
    made while all that the MLP reads is there. forward: workspace of a layer's. weights: the most gradients that one
    operation makes. waiting: the head's gradients, until a backward ends. splits: whether backwards are split.
    """

    of_layer: float
    head: float
    head_elements: float
    loss: float
    total: float
    by_layer: bool
    reduction: float = 0.0
    matrix: float = 0.0
    forward: float = 0.0
    weights: float = 0.0
    waiting: float = 0.0
    splits: bool = False

    def beside(self, freed: np.ndarray, queued: np.ndarray, *, last: bool) -> np.ndarray:
        """Bytes at the places of a stage's layers beside its units, (..., layers), the first layers first.

        freed: the units'. queued: queued_by_layers', which grows layer by layer where backwards are split; one that is
        not split makes a layer's gradients instead. last: whether the loss is behind.
        """
        made = np.maximum(self.matrix, self.of_layer - freed)
        n = made.shape[-1]
        done = np.arange(n)[::-1]
        if self.splits:
            made = np.maximum(made, queued * done / n)
        return made + self.reduction * (done > 0) + self.waiting * last


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
        if layout.zero == 3 and uses_fsdp(layout, precision.compute):  # the next layer is not yet gathered again
            loss -= item * (of_rank.two_layers - of_rank.layer)
    dense, gated = model.n_experts is None, MLP_ACTIVATIONS[model.activation][1]
    matrix = item * model.ffn_size * model.hidden_size / t if own and dense else own
    # FSDP2 reduces the head's gradients when the backward ends
    held = in_backward(of_rank, layout, precision, accumulates=adds).gradients > 0
    waiting = item * behind if held and uses_fsdp(layout, precision.compute) else 0.0
    return Layers(
        own,
        head,
        0.0 if waiting else behind,
        loss,
        of_rank.total,
        not adds,
        reduction,
        matrix,
        max(forward_workspace(config, experts=experts) for experts in (False, not dense)),
        matrix * (1 + gated) if dense else own,
        waiting,
        layout.pipeline_parallel > 1 and layout.schedule.splits_backward,
    )


def outputs(config: RunConfig, stage: StageCount, keeps_sent: bool = True) -> tuple[float, float]:
    """Bytes of a stage's results, for each microbatch that waits for a backward and for each that is queued for weight
    gradients. Where pipeline_buffers counts all that a step sends they are negative: of the first the gradient has yet
    to be sent, of the second the queue has it, too. keeps_sent: as there."""
    layout = config.parallel
    if layout.stages_per_rank == 1 or not keeps_sent:
        return float(stage.output), 0.0
    pair, ranks = {stage.stage - 1, stage.stage}, range(layout.pipeline_parallel)
    remote = stage.stage > 0 and not any(pair <= {*layout.stages_of(rank)} for rank in ranks)
    return (-float(boundary_bytes(config) * remote),) * 2


def queued_by_layers(config: RunConfig, stage: StageCount) -> float:
    """What a stage's layers queue of a microbatch: all but the stage's input and its gradient."""
    return max(0.0, stage.queued - 2 * boundary_bytes(config) * (stage.stage > 0))


def places(units: Sequence[Unit], of: Layers, *, last: bool, queued: float = 0.0) -> list[Place]:
    """The places of a stage's backward, the last layers first. last: whether the loss is behind them; then it is the
    first place. queued: queued_by_layers'."""
    found = [Place(0.0, units[-1].moved, of.loss, 0.0 if of.by_layer else 1.0)] if last else []
    freed, made = of.head * last, of.head_elements * last
    beside = of.beside(np.array([unit.freed for unit in units]), np.array(queued), last=last)[::-1]
    for unit, before, more in zip(reversed(units), [*reversed(units[:-1]), None], beside, strict=True):
        gradients = min(1.0, made / of.total) if of.by_layer else 1.0
        moving = unit.moved + (before.moved if before is not None else 0.0)
        found.append(Place(freed, moving, unit.working + float(more), gradients))
        freed, made = freed + unit.kept, made + unit.elements
    return found


def fullest_moment(
    config: RunConfig,
    stages: Sequence[StageCount],
    moments: Occupancies,
    of_rank: Elements,
    *,
    worst: bool = False,
    keeps_sent: bool = True,
) -> Moment:
    """The fullest Moment of a rank. stages: its own, counted or predicted. moments: of its schedule. of_rank: their
    Elements. worst: as in kept_by_kind. keeps_sent: as in pipeline_buffers.

    A forward's peak is at its end, at the loss if that is behind it.
    """
    layout, precision = config.parallel, Precision.of(config)
    of = rank_layers(config, [stage.stage for stage in stages], of_rank)
    states = {s.name: s.nbytes for s in model_states(of_rank, layout, precision, accumulates=not of.by_layer)}
    gradients = 0.0 if layout.cpu_offload else states[GRADIENTS]
    sent = np.array([outputs(config, stage, keeps_sent) for stage in stages])
    saved = np.array([stage.saved - stage.offloaded for stage in stages], float)
    queued = np.array([stage.queued for stage in stages], float)
    waiting = (
        moments.forward @ saved,
        moments.forward @ sent[:, 0] + moments.queued @ sent[:, 1],
        moments.queued @ queued,
    )
    # when all gradients are there nothing waits; in a pipeline they are reduced then
    at_end = reduction_workspace(of_rank, layout, precision, accumulates=not of.by_layer, at_end=True)
    best = Moment(0.0, 0.0, 0.0, 0.0, at_end if layout.pipeline_parallel > 1 and layout.zero < 2 else 0.0, 1.0)
    most = best.working + gradients
    kept = kept_by_kind(config, worst=worst)
    for column, stage in enumerate(stages):
        units, last = stage_units(config, stage.stage, kept=kept, worst=worst), stage.stage == layout.n_stages - 1
        backward = places(units, of, last=last, queued=queued_by_layers(config, stage))
        forward = [backward.pop(0) if last else Place(0.0, 0.0, of.forward, 1.0)]
        for kinds, some in (("F", forward), ("BI", backward), ("W", [Place(0.0, 0.0, of.weights, 1.0)])):
            here = (moments.stages == column) & np.isin(moments.kinds, list(kinds))
            if not here.any():
                continue
            at = int(np.where(here, sum(waiting), -np.inf).argmax())
            kept_here, output, queues = (float(part[at]) for part in waiting)
            for place in some:
                found = Moment(kept_here - place.freed, output, queues, *place[1:])
                size = sum(found[:-1]) + found.gradients * gradients
                if size > most:
                    best, most = found, size
    return best

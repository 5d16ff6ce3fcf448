"""What one rank needs at the peak of its step: the sum of all formulas, for stages that were counted or predicted.

Belongs here: the sum, and the formula of what a stage keeps of a microbatch (the dry run counts the same). Its parts
are in kept.py, memory.py and states.py. No tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import FP8, SCHEDULES, RunConfig
from tpformer.models import GPTConfig
from tpformer.parallel import Layout, exchange_named

from .bubbles import Order, schedule_order
from .counting import StageCount
from .gathers import received_bytes
from .kept import Kept, factor_bytes, kept_by_kind
from .memory import (
    Occupancies,
    Peak,
    fused_workspaces,
    kept_blocks,
    kv_heads,
    microbatch_tokens,
    occupancies,
    pipeline_buffers,
    schedule_peak,
)
from .moments import fullest_moment
from .muon import muon_workspace
from .software import OURS, Software
from .states import (
    GRADIENTS,
    Elements,
    Precision,
    State,
    accumulates,
    elements,
    exchanging_ranks,
    model_states,
    most_at_once,
)
from .units import head_kept, stage_ranges, stage_units

ROUNDS = 3  # of as many microbatches as ranks: then a rank has as many in flight as with any number of them
ALONE = Occupancies(np.ones((2, 1)), np.zeros((2, 1)), np.zeros(2, int), np.array(["F", "B"]))  # without a pipeline
WHOLE = ("naive", "GPipe", "LoopedBFS")  # schedules in which all microbatches are in flight


class RankMemory(NamedTuple):
    """One rank's memory.

    states: the model states by formula. peak: the schedule's Peak. parts: (name, bytes) of all that the device needs at
    its peak. host: bytes of host memory.
    """

    states: list[State]
    peak: Peak
    parts: list[tuple[str, float]]
    host: float

    @property
    def total(self) -> float:
        """Bytes that the device needs at its peak."""
        return sum(nbytes for _, nbytes in self.parts)


def stages_size(config: RunConfig, stages: Sequence[StageCount]) -> Elements:
    """The Elements of a rank's stages."""
    layout = config.parallel
    return elements(config.model, [s.layers for s in stages], layout.tensor_parallel, exchanging_ranks(layout))


@functools.lru_cache(maxsize=4096)
def different_ranks(model: GPTConfig, layout: Layout) -> tuple[int, ...]:
    """The pipeline ranks that may need most memory or time: the ends, and of ranks that are alike the first and last.

    Ranks are alike if their stages have as many layers with experts, and as many without.
    """
    last = layout.pipeline_parallel - 1
    ranges = stage_ranges(model, layout.pipeline_split, layout.n_stages)
    alike: dict[tuple, list[int]] = {}
    for rank in range(1, last):
        kinds = (tuple(sorted(map(model.has_experts, ranges[stage]))) for stage in layout.stages_of(rank))
        alike.setdefault(tuple(kinds), []).append(rank)
    return tuple(sorted({0, last, *(rank for ranks in alike.values() for rank in (ranks[0], ranks[-1]))}))


@functools.lru_cache(maxsize=256)
def cached_order(schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int) -> Order:
    """schedule_order, remembered."""
    return schedule_order(schedule, ranks, n_microbatches, stages_per_rank)


def few_microbatches(schedule: str, ranks: int, n_microbatches: int) -> int:
    """The number of microbatches from which on the schedule repeats itself."""
    few, rest = ROUNDS * ranks, n_microbatches % ranks
    whole = schedule in WHOLE or (rest and SCHEDULES[schedule].looped)  # torch allows no other number of these
    return n_microbatches if whole or n_microbatches < few + rest else few + rest


@functools.lru_cache(maxsize=65536)
def cached_occupancies(
    schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int, stages: tuple[int, ...], rank: int
) -> Occupancies:
    """The Occupancies of a rank with so many microbatches, remembered."""
    few = few_microbatches(schedule, ranks, n_microbatches)
    return occupancies(cached_order(schedule, ranks, few, stages_per_rank)[rank], stages)


def predicted_stage(config: RunConfig, stage: int, kept: Mapping[bool, Kept] | None = None) -> StageCount:
    """What the dry run counts of a stage, by formula. kept: kept_by_kind's."""
    model, layout = config.model, config.parallel
    layers = stage_ranges(model, layout.pipeline_split, layout.n_stages)[stage]
    kept, item = kept or kept_by_kind(config), Precision.of(config).compute.itemsize
    stream, of_layer = kept[False].stream, {i: kept[model.has_experts(i)] for i in layers}
    tokens, t = microbatch_tokens(config), layout.tensor_parallel
    units = stage_units(config, stage, kept=kept)
    moved = sum(unit.moved for unit in units)
    saved = sum(unit.kept for unit in units) + moved
    shares = layout.context_parallel > 1
    if layers.start == 0 and (t > 1 or shares):  # token ids and which of them are this rank's; positions of its rows
        looked_up = model.position == "learned" and (layout.sequence_parallel or shares)
        saved += tokens * (8 + (t > 1) + 8 * looked_up)
    if last := layers.stop == model.n_layers:
        saved += head_kept(config, stream, item)
    queued = 0.0
    if layout.pipeline_parallel > 1 and layout.schedule.splits_backward:
        q, kv = model.query_size / t, kv_heads(model, t)[0] * model.head_size
        kept_size = factor_bytes(config)
        rows = len(layers) * (tokens * 2 * (model.hidden_size + q + kv) * kept_size + 2 * stream * kept_size / item)
        queued = rows + sum(each.waiting for each in of_layer.values())
        if config.train.precision != FP8:  # attention's result itself waits, and with it the graph that made it
            queued += 2 * stream if stage else 0
            if shares and (model.position == "rope" or model.qk_norm):  # the other half of a storage of keys and values
                queued += len(layers) * tokens * kv * item
            if model.position == "rope":  # positions, and their cosines and sines in float32
                queued += 8 * tokens + 4 * model.seq_length * model.head_size
    output = 0 if last else round(stream)
    return StageCount(stage, layers, round(saved), round(moved), output, round(queued))


def predicted_memory(
    config: RunConfig, pipeline_rank: int, software: Software = OURS, *, worst: bool = False
) -> RankMemory:
    """The memory that a pipeline rank needs, without building it. Errors: ValueError of an impossible schedule.

    software: adds what another stack holds besides, such as attention scores of a layer or all logits of a microbatch.
    worst: as in kept_by_kind, in every layer and microbatch.
    """
    layout = config.parallel
    indices = layout.stages_of(pipeline_rank)
    moments, kept = ALONE, kept_by_kind(config, worst=worst)
    if layout.pipeline_parallel > 1:
        sizes = layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank
        moments = cached_occupancies(layout.pipeline_schedule, *sizes, tuple(indices), pipeline_rank)
    stages = [predicted_stage(config, stage, kept) for stage in indices]
    plan = rank_memory(config, stages, moments, software, worst=worst)
    tokens, model, t = microbatch_tokens(config), config.model, layout.tensor_parallel
    scores = software.held_scores * tokens * model.seq_length * model.n_heads / t
    logits = software.held_logits * tokens * (model.vocab_size or 0) / t
    held = scores if layout.n_stages - 1 not in indices else max(scores, logits)
    held += software.held_parameters * stages_size(config, stages).total
    return plan if held == 0 else plan._replace(parts=[*plan.parts, ("of this stack *", held)])


def least_memory(config: RunConfig) -> float:
    """A lower bound of the first pipeline rank's bytes in any schedule: its states, and what its layers keep.

    In a pipeline of p ranks at least p microbatches, or all, wait on the first rank at once, in one of its stages each.
    """
    layout, precision = config.parallel, Precision.of(config)
    ranges = stage_ranges(config.model, layout.pipeline_split, layout.n_stages)
    own = [ranges[stage] for stage in layout.stages_of(0)]
    of_rank = elements(config.model, own, layout.tensor_parallel, exchanging_ranks(layout))
    states = model_states(of_rank, layout, precision, accumulates=accumulates(config))
    kept = 0.0
    if not layout.offloads and layout.recompute_interval == 1:
        waiting, of_kind = min(config.n_microbatches, layout.pipeline_parallel), kept_by_kind(config)
        ways, model = layout.kept(config.model.n_layers), config.model
        sizes = {
            (way, kind): sum(each.storages(way.recompute, way.pack))
            for way in set(ways)
            for kind, each in of_kind.items()
        }
        kept = waiting * min(sum(sizes[ways[i], model.has_experts(i)] for i in stage) for stage in own)
    if layout.cpu_offload:
        return sum(state.nbytes for state in states[3:]) + kept
    held = most_at_once(states)
    # before the first backward there may be no gradients yet
    return held + kept if accumulates(config) else max(held, held - states[1].nbytes + kept)


def rank_memory(
    config: RunConfig,
    stages: Sequence[StageCount],
    moments: Occupancies,
    software: Software = OURS,
    *,
    worst: bool = False,
) -> RankMemory:
    """The memory that a rank needs. stages: its own, counted or predicted. moments: of its schedule. worst: as above.

    train.dtype, train.device and the vocabulary must be set.
    """
    layout, precision, of_rank = config.parallel, Precision.of(config), stages_size(config, stages)
    states = model_states(of_rank, layout, precision, accumulates=accumulates(config))
    indices = [stage.stage for stage in stages]
    peak = schedule_peak(moments, stages)
    on_device, host = [(state.name, state.nbytes) for state in states], 0.0
    if layout.cpu_offload:
        host += sum(state.nbytes for state in states[:3])
        on_device = on_device[3:]
    elif len(states) == 5:  # accumulated gradients turn into shards unit by unit, so only the larger of the two counts
        on_device.pop(1 if states[1].nbytes <= states[4].nbytes else 4)
    if layout.offloads:
        host += peak.in_flight * max(stage.offloaded for stage in stages)
    exchange, shard = exchange_named(layout.exchange), of_rank.shard(layout)
    if kept := exchange.kept_bytes(shard, precision.reduce.itemsize):
        on_device.append(("what the exchange keeps", kept))
    at = fullest_moment(config, stages, moments, of_rank, worst=worst, keeps_sent=software.keeps_sent)
    if not layout.cpu_offload:
        on_device = [(n, at.gradients * size if n == GRADIENTS else size) for n, size in on_device]
    parts = [*on_device, ("saved activations", at.saved)]
    if at.moving:
        parts.append(("on their way to or from the host", at.moving))
    if at.queued:
        parts.append(("queued weight gradients", at.queued))
    if layout.pipeline_parallel > 1:
        buffers = pipeline_buffers(config, indices, round(at.output), software.keeps_sent)
        parts.append(("pipeline buffers", float(buffers)))
    if (workspaces := _workspaces(config)) > 0:
        parts.append(("fused workspaces *", float(workspaces)))
    if (blocks := kept_blocks(config, of_rank)) > 0:
        parts.append(("weights in blocks *", blocks))
    if (received := received_bytes(config)) > 0:
        parts.append(("gathers in blocks *", received))
    parts.append(("temporaries *", at.working))
    if config.optimizer.name == "muon":  # when it steps, activations and temporaries are gone, and all gradients there
        later = 0.0 if layout.cpu_offload else (1 - at.gradients) * states[1].nbytes
        more = muon_workspace(config, [stage.layers for stage in stages]) + later
        more -= at.saved + at.moving + at.working + blocks
        parts += [("matrices of Muon *", more)] if more > 0 else []
    return RankMemory(states, peak, parts, host)


def _workspaces(config: RunConfig) -> int:
    layout, item = config.parallel, Precision.of(config).compute.itemsize
    fused = layout.transport in ("auto", "fused") and config.train.device == "cuda" and item == 2
    if not fused or layout.tensor_parallel == 1:
        return 0
    return fused_workspaces(
        microbatch_tokens(config),
        config.model.hidden_size,
        item,
        layout.tensor_parallel,
        layout.sequence_parallel,
        config.train.precision == FP8,
    )

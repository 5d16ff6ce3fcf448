"""What one rank needs at the peak of its step: the sum of all formulas, for stages that were counted or predicted.

Belongs here: the sum, and the formula of what a stage keeps of a microbatch (the dry run counts the same). Its parts
are in memory.py and states.py. No tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import MLP_ACTIVATIONS, SCHEDULES, RunConfig, recomputed_layers
from tpformer.layers.embedding import padded_vocab
from tpformer.models import GPTConfig, regions
from tpformer.ops import VocabSlice, default_chunk_tokens
from tpformer.ops.offload import SMALLEST
from tpformer.parallel import Layout, split_stages

from .bubbles import Order, schedule_order
from .counting import StageCount
from .memory import (
    Occupancies,
    Peak,
    fused_workspaces,
    kv_heads,
    layer_workspace,
    loss_workspace,
    microbatch_rows,
    occupancies,
    pipeline_buffers,
    reduction_workspace,
    schedule_peak,
)
from .software import OURS, Software
from .states import Elements, Precision, State, accumulates, elements, model_states, most_at_once

ROUNDS = 3  # of as many microbatches as ranks: then a rank has as many in flight as with any number of them
ALONE = Occupancies(np.array([[1]]), np.array([[0]]))  # without a pipeline
WHOLE = ("naive", "GPipe", "LoopedBFS")  # schedules in which all microbatches are in flight


class Plan(NamedTuple):
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
    return elements(config.model, [stage.layers for stage in stages], config.parallel.tensor_parallel)


@functools.lru_cache(maxsize=4096)
def stage_ranges(model: GPTConfig, by: str, n_stages: int) -> tuple[range, ...]:
    """The layers of each stage. by: parameters or time."""
    return tuple(split_stages(model.layer_costs(by), n_stages))


@functools.lru_cache(maxsize=4096)
def different_ranks(model: GPTConfig, layout: Layout) -> tuple[int, ...]:
    """The pipeline ranks that may need most memory or time: the ends, and of ranks that are alike the first and last.

    Ranks are alike if their stages have as many layers.
    """
    last = layout.pipeline_parallel - 1
    ranges = stage_ranges(model, layout.pipeline_split, layout.n_stages)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(1, last):
        alike.setdefault(tuple(len(ranges[stage]) for stage in layout.stages_of(rank)), []).append(rank)
    return tuple(sorted({0, last, *(rank for ranks in alike.values() for rank in (ranks[0], ranks[-1]))}))


@functools.lru_cache(maxsize=256)
def cached_order(schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int) -> Order:
    """schedule_order, remembered."""
    return schedule_order(schedule, ranks, n_microbatches, stages_per_rank)


def few_microbatches(schedule: str, ranks: int, n_microbatches: int) -> int:
    """So many of the microbatches that the schedule repeats itself from there on."""
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


class Kept(NamedTuple):
    """Bytes that a layer keeps of one microbatch, by storage."""

    stream: float
    """Each of two inputs of its branches, which are rows of the residual stream."""
    heads: tuple[float, ...]
    """Queries, keys, values, attention's result; with qk_norm queries and keys before their norms, too."""
    hidden: tuple[float, ...]
    """What the activation reads."""
    of_attention: float
    """Statistics of the attention branch: its norm's, those of qk_norm, attention's log-sum-exp; a window's mask."""
    of_mlp: float
    """Statistics of the MLP branch's norm."""

    def storages(self, recompute: str) -> list[float]:
        """Those that are kept. recompute: none, mlp or full."""
        if recompute == "full":
            return [self.stream]
        kept = [self.stream, self.stream, *self.heads, self.of_attention]
        return kept if recompute == "mlp" else [*kept, *self.hidden, self.of_mlp]


def layer_kept(config: RunConfig) -> Kept:
    """The Kept of every layer. docs/memory.md has the table."""
    model, layout = config.model, config.parallel
    t, item = layout.tensor_parallel, Precision.of(config).compute.itemsize
    statistic = max(4, item)
    tokens = config.microbatch_size * model.seq_length
    rows = microbatch_rows(model, layout, config.microbatch_size)
    norm = rows * statistic * (2 if model.norm == "layernorm" else 1)
    q, (own, attended) = model.n_heads // t, kv_heads(model, t)
    heads = [q, attended, attended, q] + ([q, own] if model.qk_norm else [])
    per_head = q + (q + own if model.qk_norm else 0)
    repeated = 16 * q if attended > own else 0  # which heads are repeated: two tensors of 8 bytes for each
    windowed = (model.sliding_window or model.seq_length) < model.seq_length
    flash = config.train.device != "cpu" and item == 2  # its kernels make no mask
    mask = item * model.seq_length**2 if windowed and not flash else 0
    hidden = [-(-model.ffn_size // t)] * (2 if MLP_ACTIVATIONS[model.activation][1] else 1)  # the first rank's
    return Kept(
        rows * model.hidden_size * item,
        tuple(tokens * each * model.head_size * item for each in heads),
        tuple(tokens * each * item for each in hidden),
        norm + tokens * per_head * statistic + repeated + mask,
        norm,
    )


def predicted_stage(config: RunConfig, stage: int, kept: Kept | None = None) -> StageCount:
    """What the dry run counts of a stage, by formula. kept: layer_kept's."""
    model, layout = config.model, config.parallel
    layers = stage_ranges(model, layout.pipeline_split, layout.n_stages)[stage]
    kept, item = kept or layer_kept(config), Precision.of(config).compute.itemsize
    tokens, t = config.microbatch_size * model.seq_length, layout.tensor_parallel
    again: dict[str, int] = {}
    if layout.recompute != "none":
        pattern, interval = layout.recompute_layers, layout.recompute_interval
        again = regions(layers, recomputed_layers(layout.recompute, pattern, interval, model.n_layers), interval)
    repeated, whole = kept.storages(layout.recompute), kept.storages("none")
    # a region of several layers keeps the input of its first one
    units = [repeated if str(i) in again else whole for i in layers if again.get(str(i), i) == i]
    saved = sum(map(sum, units))
    moved = 0.0
    if layout.offload_activations:
        moved = sum(each for unit in units[:-1] for each in unit if each >= SMALLEST)
    if layers.start == 0 and t > 1:  # token ids and which of them are this rank's; positions of its sequence shard
        saved += tokens * (17 if layout.sequence_parallel and model.position == "learned" else 9)
    if last := layers.stop == model.n_layers:
        saved += _head_kept(config, kept.stream, item)
    queued = 0.0
    if layout.pipeline_parallel > 1 and layout.schedule.splits_backward:
        q, kv = model.query_size / t, kv_heads(model, t)[0] * model.head_size
        features = 2 * model.hidden_size + 2 * (q + kv) + sum(kept.hidden) / tokens / item + -(-model.ffn_size // t)
        queued = len(layers) * (tokens * features * item + 2 * kept.stream) + (2 * kept.stream if stage else 0)
        if model.position == "rope":  # positions, and their cosines and sines in float32
            queued += 8 * tokens + 4 * model.seq_length * model.head_size
    output = 0 if last else round(kept.stream)
    return StageCount(stage, layers, round(saved), round(moved), output, round(queued))


def _head_kept(config: RunConfig, stream: float, item: int) -> float:
    """Bytes that the fused loss keeps: its input, the gradients of this and of the table, the norm's statistics.

    In float16 the table's gradient waits in float32.
    """
    model, layout = config.model, config.parallel
    rows = -(-padded_vocab(model.vocab_size or 0, model.vocab_multiple) // layout.tensor_parallel)
    table = rows * model.hidden_size * (4 if config.train.dtype == "float16" else item)
    statistics = stream / model.hidden_size / item * max(4, item) * (2 if model.norm == "layernorm" else 1)
    return 2 * stream + table + statistics


def predicted_memory(config: RunConfig, pipeline_rank: int, software: Software = OURS) -> Plan:
    """The memory that a pipeline rank needs, without building it. Errors: ValueError of an impossible schedule.

    software: adds what another stack holds besides, such as attention scores of a layer or all logits of a microbatch.
    """
    layout = config.parallel
    indices = layout.stages_of(pipeline_rank)
    moments, kept = ALONE, layer_kept(config)
    if layout.pipeline_parallel > 1:
        sizes = layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank
        moments = cached_occupancies(layout.pipeline_schedule, *sizes, tuple(indices), pipeline_rank)
    stages = [predicted_stage(config, stage, kept) for stage in indices]
    plan = rank_memory(config, stages, moments, software)
    tokens, model, t = config.microbatch_size * config.model.seq_length, config.model, layout.tensor_parallel
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
    states = model_states(
        elements(config.model, own, layout.tensor_parallel), layout, precision, accumulates=accumulates(config)
    )
    kept = 0.0
    if not layout.offload_activations and layout.recompute_interval == 1 and not layout.recompute_layers:
        waiting = min(config.n_microbatches, layout.pipeline_parallel)
        kept = waiting * min(map(len, own)) * sum(layer_kept(config).storages(layout.recompute))
    held = sum(state.nbytes for state in states[3:]) if layout.cpu_offload else most_at_once(states)
    return held + kept


def rank_memory(
    config: RunConfig, stages: Sequence[StageCount], moments: Occupancies, software: Software = OURS
) -> Plan:
    """The memory that a rank needs. stages: its own, counted or predicted. moments: of its schedule.

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
    if layout.offload_activations:
        host += peak.in_flight * max(stage.offloaded for stage in stages)
    parts = [*on_device, ("saved activations", float(peak.saved))]
    if peak.queued:
        parts.append(("queued weight gradients", float(peak.queued)))
    if layout.pipeline_parallel > 1:
        parts.append(("pipeline buffers", float(pipeline_buffers(config, indices, peak.output, software.keeps_sent))))
    if (workspaces := _workspaces(config)) > 0:
        parts.append(("fused workspaces *", float(workspaces)))
    parts.append(("temporaries *", _temporaries(config, stages[-1].stage, of_rank, peak.saved)))
    return Plan(states, peak, parts, host)


def _tokens(config: RunConfig) -> int:
    return config.microbatch_size * config.model.seq_length


def _workspaces(config: RunConfig) -> int:
    layout, item = config.parallel, Precision.of(config).compute.itemsize
    fused = layout.transport in ("auto", "fused") and config.train.device == "cuda" and item == 2
    if not fused or layout.tensor_parallel == 1:
        return 0
    return fused_workspaces(
        _tokens(config), config.model.hidden_size, item, layout.tensor_parallel, layout.sequence_parallel
    )


def _temporaries(config: RunConfig, last_stage: int, of_rank: Elements, saved: int) -> float:
    """Bytes of temporaries: the loss's, or those of a layer's backward and of reducing gradients if they are more."""
    layout, precision, tokens = config.parallel, Precision.of(config), _tokens(config)
    backward = layer_workspace(config.model, layout, tokens, of_rank.layer, precision)
    at_end = layout.pipeline_parallel > 1 and layout.zero < 2  # then activations are freed already
    reduction = reduction_workspace(of_rank, layout, precision, accumulates=accumulates(config), at_end=at_end)
    most = max(backward, reduction - saved) if at_end else backward + reduction
    if last_stage != layout.n_stages - 1:
        return most
    entries = config.model.vocab_size or 0
    width = -(-padded_vocab(entries, config.model.vocab_multiple) // layout.tensor_parallel)
    chunk = default_chunk_tokens(VocabSlice(0, width, entries), str(config.train.device))
    return max(most, float(loss_workspace(config.model, tokens, width, chunk, precision.compute.itemsize)))

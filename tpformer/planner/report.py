"""The dry run's report: what each rank holds and communicates, whether it fits, and what would make it fit.

Belongs here: the sums of counts (dry_run.py) and of formulas (memory.py, states.py), and their tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tpformer.config import RunConfig
from tpformer.distributed.mesh import AXES
from tpformer.layers.embedding import padded_vocab
from tpformer.ops import VocabSlice, default_chunk_tokens

from .bubbles import RATIOS, Order, Step, bubble_ratio, schedule_order
from .dry_run import RankCount, count_parameters, count_rank
from .memory import (
    Peak,
    fused_workspaces,
    layer_workspace,
    loss_workspace,
    pipeline_buffers,
    reduction_workspace,
    schedule_peak,
)
from .states import Elements, Precision, State, accumulates, elements, model_states, most_at_once

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SHOWN_FIRST, SHOWN_LAST = 10, 4  # how many of a schedule's first and last actions are shown
NOT_COUNTED = "not counted: CUDA context and libraries (about 1 GB), NCCL's buffers, and what the allocator cannot use"


def size(nbytes: float) -> str:
    """Bytes as text with a decimal unit, such as "1.50 GB"."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"


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


def rank_size(config: RunConfig, count: RankCount) -> Elements:
    """The Elements of a rank's stages."""
    return elements(config.model, [stage.layers for stage in count.stages], config.parallel.tensor_parallel)


def rank_plan(config: RunConfig, count: RankCount, order: Order | None) -> Plan:
    """The memory that a rank needs. order: that of the pipeline's schedule, None without a pipeline."""
    layout, precision, of_rank = config.parallel, Precision.of(config), rank_size(config, count)
    states = model_states(of_rank, layout, precision, accumulates=accumulates(config))
    indices = [stage.stage for stage in count.stages]
    steps = [(Step(indices[0], "F", 0),)] if order is None else order[count.coordinates["pp"]]
    peak = schedule_peak(steps, count.stages)
    on_device, host = [(state.name, state.nbytes) for state in states], 0.0
    if layout.cpu_offload:
        host += sum(state.nbytes for state in states[:3])
        on_device = on_device[3:]
    elif len(states) == 5:  # accumulated gradients turn into shards unit by unit, so only the larger of the two counts
        on_device.pop(1 if states[1].nbytes <= states[4].nbytes else 4)
    if layout.offload_activations:
        host += peak.in_flight * max(stage.offloaded for stage in count.stages)
    parts = [*on_device, ("saved activations", float(peak.saved))]
    if peak.queued:
        parts.append(("queued weight gradients", float(peak.queued)))
    if order is not None:
        parts.append(("pipeline buffers", float(pipeline_buffers(config, indices, peak.output))))
    if (workspaces := _workspaces(config)) > 0:
        parts.append(("fused workspaces *", float(workspaces)))
    parts.append(("temporaries *", _temporaries(config, count, of_rank, peak.saved)))
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


def _temporaries(config: RunConfig, count: RankCount, of_rank: Elements, saved: int) -> float:
    """Bytes of temporaries: the loss's, or those of a layer's backward and of reducing gradients if they are more."""
    layout, precision, tokens = config.parallel, Precision.of(config), _tokens(config)
    backward = layer_workspace(config.model, layout, tokens, of_rank.layer, precision)
    at_end = layout.pipeline_parallel > 1 and layout.zero < 2  # then activations are freed already
    reduction = reduction_workspace(of_rank, layout, precision, accumulates=accumulates(config), at_end=at_end)
    most = max(backward, reduction - saved) if at_end else backward + reduction
    if count.stages[-1].stage != layout.n_stages - 1:
        return most
    entries = config.model.vocab_size or 0
    width = -(-padded_vocab(entries, config.model.vocab_multiple) // layout.tensor_parallel)
    chunk = default_chunk_tokens(VocabSlice(0, width, entries), str(config.train.device))
    return max(most, float(loss_workspace(config.model, tokens, width, chunk, precision.compute.itemsize)))


def remedies(config: RunConfig, count: RankCount, plan: Plan) -> list[tuple[str, float]]:
    """(change of the configuration, bytes that it saves on this rank by formula), largest first."""
    layout, model, of_rank = config.parallel, config.model, rank_size(config, count)
    found: list[tuple[str, float]] = []
    ranks, replicated = layout.data_parallel, layout.data_parallel_replicate > 1
    for stage in range(1, 4) if ranks > 1 else ():
        changed = dataclasses.replace(
            layout, data_parallel_replicate=1, data_parallel_shard=ranks, zero_stage=stage, cpu_offload=False
        )
        with contextlib.suppress(ValueError):  # the schedule does not allow this stage
            changed.check()
            states = model_states(of_rank, changed, Precision.of(config), accumulates=accumulates(config))
            where = f" with data_parallel_shard = {ranks}" if replicated else ""
            found.append((f"zero_stage = {stage}{where}", most_at_once(plan.states) - most_at_once(states)))
    if not layout.cpu_offload:
        found.append(("cpu_offload = true", sum(state.nbytes for state in plan.states[:3])))
    saved = float(plan.peak.saved)
    hidden, kept = model.hidden_features, model.kept_features
    if layout.recompute == "none":
        found.append(('recompute = "mlp"', saved * hidden / kept))
        found.append(('recompute = "full"', saved * (1 - model.hidden_size / kept)))
    if config.microbatch_size > 1:
        found.append(("microbatch_size halved", saved / 2))
    return sorted((each for each in found if each[1] > 0), key=lambda each: -each[1])


def verdict(config: RunConfig, count: RankCount, plan: Plan, device_memory: float) -> Iterator[str]:
    """Lines that say whether a rank fits into device_memory bytes, and if not, which changes would help."""
    room = device_memory - plan.total
    of = f"predicted: {size(plan.total)} of {size(device_memory)}"
    if room >= 0:
        yield f"  {of}: fits, {size(room)} are left"
        return
    yield f"  {of}: does not fit, {size(-room)} too much. Changes in [parallel] or [train], with bytes saved (formula):"
    options = remedies(config, count, plan)
    for text, saves in options:
        yield f"    {text:48} {size(saves):>10}{'  enough' if saves >= -room else ''}"
    yield "    more pipeline_parallel or tensor_parallel, if none of these is enough"


def short_order(steps: Sequence[Sequence[Step]]) -> str:
    """A rank's first and last actions in torch's notation: stage, kind and microbatch, such as 0F3."""
    names = ["+".join(f"{step.stage}{step.kind}{step.microbatch}" for step in together) for together in steps]
    if len(names) > SHOWN_FIRST + SHOWN_LAST:
        names[SHOWN_FIRST:-SHOWN_LAST] = ["..."]
    return " ".join(names)


def head(config: RunConfig) -> Iterator[str]:
    """The lines that hold for all ranks. Parameters are counted on the built model."""
    layout, m = config.parallel, config.n_microbatches
    axes = f"pp {layout.pipeline_parallel} x dp_replicate {layout.data_parallel_replicate}"
    axes += f" x dp_shard {layout.data_parallel_shard} x tp {layout.tensor_parallel}"
    n = count_parameters(config)
    parameters = f"{n / 1e9:.1f}B" if n >= 1e8 else f"{n / 1e6:.2f}M"
    yield f"{parameters} parameters, world size {layout.world_size}: {axes}"
    regions = f" by {layout.recompute_interval} layers" if layout.recompute_interval > 1 else ""
    yield (
        f"ZeRO-{layout.zero}, {config.train.dtype}, recompute {layout.recompute}{regions}; samples of "
        f"{config.model.seq_length} tokens: {config.train.global_batch_size} in a step, {m} microbatches of "
        f"{config.microbatch_size} on a rank"
    )
    p, name = layout.pipeline_parallel, layout.pipeline_schedule
    if p > 1:
        ratio = bubble_ratio(name, p, m, layout.stages_per_rank)
        value = "has no closed form for this many microbatches" if ratio is None else f"= {ratio:.1%}"
        yield f"{name}, {layout.n_stages} stages: bubble / computing time {RATIOS[name]} {value} (theory)"


def rank_lines(config: RunConfig, count: RankCount, order: Order | None, device_memory: float) -> Iterator[str]:
    """The lines about one rank."""
    plan, of_rank = rank_plan(config, count, order), rank_size(config, count)
    where = ", ".join(f"{axis} {index}" for axis, index in count.coordinates.items())
    stages = ", ".join(f"stage {s.stage}: layers {s.layers.start} to {s.layers.stop - 1}" for s in count.stages)
    yield ""
    yield f"rank {count.rank} ({where}); {stages}"
    yield f"  M = {of_rank.total:,.0f} parameters of its stages on one tensor-parallel rank"
    counted = (count.parameters, count.gradients, count.optimizer, count.copies, count.accumulated)
    yield f"  {'model states':24} {'formula':24} {'by formula':>18} {'counted':>18}"
    for state, found in zip(plan.states, counted, strict=False):
        note = "" if found == round(state.nbytes) else f"  {found - state.nbytes:+,.0f}"
        yield f"  {state.name:24} {state.formula:24} {state.nbytes:18,.0f} {found:18,.0f}{note}"
    for stage in count.stages:
        parts = [f"{size(stage.saved)} saved"]
        parts += [f"{size(stage.offloaded)} of it in host memory"] if stage.offloaded else []
        parts += [f"{size(stage.queued)} queued for weight gradients"] if stage.queued else []
        yield f"  one microbatch of stage {stage.stage} keeps: {', '.join(parts)} (counted)"
    if order is not None:
        steps = order[count.coordinates["pp"]]
        yield f"  {len(steps)} actions, microbatches in flight at most {plan.peak.in_flight}: {short_order(steps)}"
    yield f"  {'collectives of a step':24} {'times':>8} {'bytes each':>18} {'together':>12}"
    for call, times in sorted(count.collectives.items(), key=lambda item: (AXES.index(item[0].axis), item[0])):
        name = f"{call.axis} {call.operation}"
        yield f"  {name:24} {times:8,d} {call.nbytes:18,d} {size(times * call.nbytes):>12}"
    yield f"  {'memory at its peak':24} {'':>8} {'bytes':>18}"
    for name, nbytes in plan.parts:
        yield f"  {name:24} {'':>8} {nbytes:18,.0f} {size(nbytes):>12}"
    if plan.host:
        yield f"  {'in host memory':24} {'':>8} {plan.host:18,.0f} {size(plan.host):>12}"
    yield from verdict(config, count, plan, device_memory)


def report(config: RunConfig, ranks: Sequence[int], device_memory: float) -> Iterator[str]:
    """The dry run's lines for a configuration that plan_config returned. device_memory: bytes of one device."""
    yield from head(config)
    layout, order = config.parallel, None
    if layout.pipeline_parallel > 1:
        order = schedule_order(
            layout.pipeline_schedule, layout.pipeline_parallel, config.n_microbatches, layout.stages_per_rank
        )
    for rank in ranks:
        yield from rank_lines(config, count_rank(config, rank), order, device_memory)
    yield ""
    yield "* a model, not a count: docs/dry_run.md"
    yield NOT_COUNTED

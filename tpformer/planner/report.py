"""The dry run's report: what each rank holds and communicates, whether it fits, and what would make it fit.

Belongs here: tables of counts (dry_run.py) and of the sums of both (rank_memory.py), and what would make a rank fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tpformer.config import RunConfig
from tpformer.parallel.diloco import DiLoCo
from tpformer.parallel.exchange import exchange_named

from .bubbles import RATIOS, Order, Step, bubble_ratio, schedule_order
from .dry_run import RankCount, count_parameters, count_rank
from .memory import exchanged_rows, expert_rows, occupancies
from .placement import axis_names
from .rank_memory import ALONE, RankMemory, predicted_memory, rank_memory, stages_size
from .states import Precision, accumulates, exchanging_ranks, model_states, most_at_once

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
SHOWN_FIRST, SHOWN_LAST = 10, 4  # how many of a schedule's first and last actions are shown
NOT_COUNTED = "not counted: CUDA context and libraries (about 1 GB), NCCL's buffers, and what the allocator cannot use"


def size(nbytes: float) -> str:
    """Bytes as text with a decimal unit, such as "1.50 GB"."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"


def rank_plan(config: RunConfig, count: RankCount, order: Order | None) -> RankMemory:
    """The memory that a counted rank needs. order: the pipeline's schedule, or None without a pipeline."""
    indices = [stage.stage for stage in count.stages]
    moments = ALONE if order is None else occupancies(order[count.coordinates["pp"]], indices)
    return rank_memory(config, count.stages, moments)


def remedies(config: RunConfig, count: RankCount, plan: RankMemory) -> list[tuple[str, float]]:
    """(change of the configuration, bytes that it saves on this rank by formula), largest first."""
    layout, of_rank = config.parallel, stages_size(config, count.stages)
    found: list[tuple[str, float]] = []
    ranks, replicated = layout.data_parallel, layout.data_parallel_replicate > 1
    for stage in range(1, 4) if layout.copies > 1 else ():
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
    saved, layers = float(plan.peak.saved), [layer for stage in count.stages for layer in stage.layers]
    hidden, kept = (sum(map(of, layers)) for of in (config.model.activated_features, config.model.kept_features))
    if layout.recompute == "none" and not layout.keep:
        found.append(('recompute = "mlp"', saved * hidden / kept))
        found.append(('recompute = "full"', saved * (1 - len(layers) * config.model.hidden_size / kept)))
    if config.microbatch_size > 1:
        found.append(("microbatch_size halved", saved / 2))
    return sorted((each for each in found if each[1] > 0), key=lambda each: -each[1])


def verdict(config: RunConfig, count: RankCount, plan: RankMemory, device_memory: float) -> Iterator[str]:
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
    yield "    more pipeline_parallel, tensor_parallel or context_parallel, if none of these is enough"


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
    axes += f" x dp_shard {layout.data_parallel_shard}"
    axes += f" x cp {layout.context_parallel}" * (layout.context_parallel > 1) + f" x tp {layout.tensor_parallel}"
    if exchanging_ranks(layout) is not None:
        axes += f"; experts: ereplica {layout.expert_replicas} x eshard {layout.expert_shards}"
        axes += f" x ep {layout.expert_parallel}"
    n, active = count_parameters(config), config.model.n_active_parameters
    parameters = f"{n / 1e9:.1f}B" if n >= 1e8 else f"{n / 1e6:.2f}M"
    if config.model.n_experts is not None:
        parameters += f" ({active / 1e9:.2f}B active)" if active >= 1e8 else f" ({active / 1e6:.2f}M active)"
    yield f"{parameters} parameters, world size {layout.world_size}: {axes}"
    regions = f" by {layout.recompute_interval} layers" if layout.recompute_interval > 1 else ""
    keeps = f"layers keep {layout.keep}" if layout.keep else f"recompute {layout.recompute}{regions}"
    yield (
        f"ZeRO-{layout.zero}, {config.train.dtype}, {keeps}; samples of "
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
    plan, of_rank = rank_plan(config, count, order), stages_size(config, count.stages)
    where = ", ".join(f"{axis} {index}" for axis, index in count.coordinates.items())
    stages = ", ".join(f"stage {s.stage}: layers {s.layers.start} to {s.layers.stop - 1}" for s in count.stages)
    yield ""
    yield f"rank {count.rank} ({where}); {stages}"
    exchanged = f", X = {of_rank.exchanged:,.0f} of them of experts" if of_rank.exchanged else ""
    yield f"  M = {of_rank.total:,.0f} parameters of its stages on one tensor-parallel rank{exchanged}"
    counted = (count.parameters, count.gradients, count.optimizer, count.copies, count.accumulated)
    yield f"  {'model states':24} {'formula':24} {'by formula':>18} {'counted':>18}"
    for state, found in zip(plan.states, counted, strict=False):
        note = "" if found == round(state.nbytes) else f"  {found - state.nbytes:+,.0f}"
        yield f"  {state.name:24} {state.formula:24} {state.nbytes:18,.0f} {found:18,.0f}{note}"
    for stage in count.stages:
        parts = [f"{size(stage.saved)} saved" + ", activations packed" * config.parallel.packs]
        parts += [f"{size(stage.offloaded)} of it in host memory"] if stage.offloaded else []
        parts += [f"{size(stage.queued)} queued for weight gradients"] if stage.queued else []
        yield f"  one microbatch of stage {stage.stage} keeps: {', '.join(parts)} (counted)"
    if order is not None:
        steps = order[count.coordinates["pp"]]
        yield f"  {len(steps)} actions, microbatches in flight at most {plan.peak.in_flight}: {short_order(steps)}"
    yield f"  {'collectives of a step':24} {'times':>8} {'bytes each':>18} {'together':>12}"
    order_of = axis_names(config.parallel).index
    for call, times in sorted(count.collectives.items(), key=lambda item: (order_of(item[0].axis), item[0])):
        name = f"{call.axis} {call.operation}"
        yield f"  {name:24} {times:8,d} {call.nbytes:18,d} {size(times * call.nbytes):>12}"
    exchange = exchange_named(config.parallel.exchange)
    if isinstance(exchange, DiLoCo):
        sent = exchange.sent_bytes(count.parameters / 4, config.parallel.data_parallel_replicate)
        yield f"  in a round of {exchange.every} steps this rank sends {size(sent)} over dp_replicate (by formula)"
    for stage, own in zip(count.stages, count.matrices, strict=False):
        yield (
            f"  Muon, stage {stage.stage}: the busiest owner has {own.busiest / own.mean:.2f} times the mean, in "
            f"{own.rounds} rounds; this rank sends {size(own.to_owners)} to owners and {size(own.back)} back (counted)"
        )
    yield f"  {'memory at its peak':24} {'':>8} {'bytes':>18}"
    for name, nbytes in plan.parts:
        yield f"  {name:24} {'':>8} {nbytes:18,.0f} {size(nbytes):>12}"
    if plan.host:
        yield f"  {'in host memory':24} {'':>8} {plan.host:18,.0f} {size(plan.host):>12}"
    yield from verdict(config, count, plan, device_memory)
    if any(config.model.has_experts(layer) for stage in count.stages for layer in stage.layers):
        yield from expert_lines(config, count.coordinates["pp"], plan, device_memory)


def expert_lines(config: RunConfig, pipeline_rank: int, plan: RankMemory, device_memory: float) -> Iterator[str]:
    """What a rank needs if its experts get more than their share of the tokens: memory follows the worst expert."""
    usual, worst = (predicted_memory(config, pipeline_rank, worst=each).total for each in (False, True))
    rows, most = (f"{expert_rows(config, worst=each):,}" for each in (False, True))
    whole = plan.total + worst - usual
    fits = "fits" if whole <= device_memory else "does not fit"
    yield f"  experts get equal numbers of tokens in these counts: {rows} rows of a microbatch in a layer on each rank"
    ep = exchanging_ranks(config.parallel)
    if ep is not None:
        row = config.model.hidden_size * Precision.of(config).compute.itemsize
        sent, came = (size(row * exchanged_rows(config, worst=each)) for each in (False, True))
        yield f"  an exchange sends {sent} for its own tokens, and as much comes, at worst {came} (formula)"
    yield (
        f"  at worst all tokens of every microbatch{'' if ep is None else f' on {ep} ranks'} choose experts of this "
        f"rank, {most} rows: {size(worst - usual)} more, {size(whole)} in all, which {fits} (formula)"
    )


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
    yield "* a model, not a count: docs/planner.md"
    yield NOT_COUNTED

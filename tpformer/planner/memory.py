"""What a rank should hold besides model states, by formula: buffers, workspaces, and the peak of a schedule.

Belongs here: arithmetic on a configuration, without tensors. Model states: states.py. What the built model really
holds: dry_run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tpformer.config import MLP_ACTIVATIONS, RunConfig
from tpformer.distributed.kernel_workspace import FLAG_BYTES, WRITER_FLAGS_MINIMUM
from tpformer.distributed.sizes import slot_bytes
from tpformer.models import GPTConfig
from tpformer.parallel import Layout

from .bubbles import Step
from .counting import StageCount
from .states import Elements, Precision, in_backward, uses_fsdp

TILE_ROWS, TILE_COLUMNS = 128, 256  # of the largest shipped tile, to whole ones of which a reduction's slot is padded


def microbatch_rows(config: GPTConfig, layout: Layout, microbatch_size: int) -> int:
    """Rows of the residual stream on a rank."""
    shards = layout.tensor_parallel if layout.sequence_parallel else 1
    return microbatch_size * config.seq_length // shards


def boundary_bytes(config: RunConfig) -> int:
    """Of one microbatch's rows between two pipeline stages; train.dtype must be set."""
    rows = microbatch_rows(config.model, config.parallel, config.microbatch_size)
    return rows * config.model.hidden_size * Precision.of(config).compute.itemsize


def pipeline_buffers(config: RunConfig, stages: Sequence[int], outputs: int) -> int:
    """Bytes of what the stages of a rank receive at a time (the rows of one microbatch, the gradient of another one)
    and have sent: `outputs`, those in flight, or all of the step where a rank has several stages, since torch's engine
    for these schedules lets go of what it sent, rows and gradients, at the end of the step."""
    layout, last = config.parallel, config.parallel.n_stages - 1
    received = sum((stage > 0) + (stage < last) for stage in stages) * boundary_bytes(config)
    if layout.stages_per_rank == 1:
        return received + outputs
    neighbours = [other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last]
    sent = sum(other not in stages for other in neighbours)
    return received + config.n_microbatches * sent * boundary_bytes(config)


def fused_workspaces(tokens: int, hidden: int, itemsize: int, tp: int, sequence_parallel: bool = True) -> int:
    """Bytes of the fused transport's workspaces on a rank (KernelWorkspace): flags and two slots each, powers of two.

    A gather's slot holds the gathered rows, a reduction's every rank's part of this rank's rows, in whole tiles; with
    all-reduces, instead of both, also the sums.
    """
    rows = -(-tokens // tp)
    tiles = -(-rows // TILE_ROWS) * TILE_ROWS * (-(-hidden // TILE_COLUMNS) * TILE_COLUMNS)
    slots = [tp * tiles * itemsize, rows * tp * hidden * itemsize] if sequence_parallel else [2 * tp * tiles * itemsize]
    flags = tp * WRITER_FLAGS_MINIMUM * FLAG_BYTES
    return sum(2 * slot_bytes(slot) + flags for slot in slots)


def loss_workspace(config: GPTConfig, tokens: int, width: int, chunk_tokens: int, itemsize: int) -> int:
    """Bytes that linear_cross_entropy needs on its way: a chunk's logits (width vocabulary entries on a rank), the
    float32 gradient of the table, the gathered rows and their gradient."""
    h = config.hidden_size
    logits = min(chunk_tokens, tokens) * width * itemsize
    return logits + max(4, itemsize) * width * h + 2 * tokens * h * itemsize


def layer_workspace(config: GPTConfig, layout: Layout, tokens: int, layer: float, precision: Precision) -> float:
    """Bytes on their way through the backward of one layer, at most: gathered output gradient and input, the partial
    input gradient; the MLP's hidden gradients and activations; the gradients of the layer's parameters.
    With recomputation also what the layers of a region keep without it."""
    h, f, t = config.hidden_size, config.ffn_size, layout.tensor_parallel
    up = 2 if MLP_ACTIVATIONS[config.activation][1] else 1
    kv = h // config.n_heads * config.kv_heads
    item = precision.compute.itemsize
    kept = item * tokens * (4 * h + 2 * kv + up * f) / t
    again = 0.0 if layout.recompute == "none" else min(layout.recompute_interval, config.n_layers) * kept
    return item * (tokens * (3 * h + (up + 1) * f / t) + layer) + again


def reduction_workspace(
    size: Elements, layout: Layout, precision: Precision, *, accumulates: bool, at_end: bool = False
) -> float:
    """Bytes of FSDP2's reductions while a layer's backward runs: what the one before holds, and its result.

    at_end: instead, of the first reduction when no backward runs any more: what goes in, and this rank's share.
    """
    if not uses_fsdp(layout, precision):
        return 0.0
    share = size.layer * precision.reduce.itemsize / layout.data_parallel_shard
    if at_end:
        return size.layer * precision.reduce.itemsize + share
    return in_backward(size, layout, precision, accumulates=accumulates).reduction + share


class Peak(NamedTuple):
    """Bytes at the moment of a schedule at which a rank keeps most: saved for backwards, results sent on, and queued
    for weight gradients. in_flight: most microbatches that wait for a backward at a time, of all its stages."""

    saved: int
    output: int
    queued: int
    in_flight: int


def schedule_peak(steps: Sequence[Sequence[Step]], stages: Sequence[StageCount]) -> Peak:
    """Over the actions of one rank in their order, steps[i] being what is executed together; stages: the rank's."""
    forward, waiting = ({stage.stage: 0 for stage in stages} for _ in range(2))
    best, most = Peak(0, 0, 0, 0), 0
    for step in (step for together in steps for step in together):
        if step.kind == "F":
            forward[step.stage] += 1
        elif step.kind in ("B", "I"):
            forward[step.stage] -= 1
            waiting[step.stage] += step.kind == "I"
        elif step.kind == "W":
            waiting[step.stage] -= 1
        most = max(most, sum(forward.values()))
        now = Peak(
            sum(forward[stage.stage] * (stage.saved - stage.offloaded) for stage in stages),
            sum(forward[stage.stage] * stage.output for stage in stages),
            sum(waiting[stage.stage] * stage.queued for stage in stages),
            0,
        )
        if sum(now[:3]) > sum(best[:3]):
            best = now
    return best._replace(in_flight=most)

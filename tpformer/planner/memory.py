"""Formulas for what a rank holds besides model states: buffers, workspaces, and the peak of a schedule.

Belongs here: arithmetic on a configuration, without tensors. Model states are in states.py. dry_run.py counts what the
built model holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpformer.config import FP8, RunConfig
from tpformer.distributed.kernel_workspace import FLAG_BYTES, WRITER_FLAGS_MINIMUM
from tpformer.distributed.sizes import slot_bytes
from tpformer.kernels.quantize.format import BLOCK, NUMBER_BYTES, shard_bytes
from tpformer.models import GPTConfig
from tpformer.ops.context import parts
from tpformer.ops.row_exchange import share_of_rank
from tpformer.parallel import Layout
from tpformer.parallel.zero import uses_fsdp

from .bubbles import Step
from .counting import StageCount
from .states import Elements, Precision, exchanging_ranks, in_backward

TILE_ROWS, TILE_COLUMNS = 128, 256  # the largest tile of the kernels; a reduction's slot holds whole tiles


def microbatch_tokens(config: RunConfig) -> int:
    """Tokens of a microbatch that this rank's tensor-parallel group has: context-parallel ranks share each sample."""
    return config.microbatch_size * config.model.seq_length // config.parallel.context_parallel


def microbatch_rows(config: GPTConfig, layout: Layout, microbatch_size: int) -> int:
    """Rows of the residual stream on a rank."""
    shards = layout.tensor_parallel if layout.sequence_parallel else 1
    return microbatch_size * config.seq_length // (layout.context_parallel * shards)


def kv_heads(config: GPTConfig, tp: int) -> tuple[int, int]:
    """Key-value heads that the first of tp ranks computes, and those that it attends to: with repeated ones, if its
    query heads cannot share them evenly.
    """
    queries, group = config.n_heads // tp, config.n_heads // config.kv_heads
    heads = -(-queries // group)
    return heads, heads if heads == 1 or heads * group == queries else queries


def context_bytes(config: RunConfig) -> int:
    """Bytes of the keys and values of a microbatch's whole samples, of the heads that a rank attends to: what
    context-parallel ranks gather for a layer. train.dtype must be set."""
    model = config.model
    features = 2 * kv_heads(model, config.parallel.tensor_parallel)[1] * model.head_size
    return config.microbatch_size * model.seq_length * features * Precision.of(config).compute.itemsize


def context_workspace(config: RunConfig) -> float:
    """The most bytes that a backward of ops.context_attention needs while it runs; 0 on one rank.

    Besides the gradients of own queries in float32, and of own keys and values, they are those of the largest part of
    keys and values, with the next part under way if there are several: the gathered ones, and themselves in order; or,
    beside their gradients in float32, the ones in order and what a kernel makes; or these sums on their way to other
    ranks, in the compute dtype, and as they arrive. While a part computes, the sums of the one before are on their way.
    """
    model, layout, precision = config.model, config.parallel, Precision.of(config)
    if (cp := layout.context_parallel) == 1:
        return 0.0
    t, item, gathered = layout.tensor_parallel, precision.compute.itemsize, context_bytes(config)
    wide, shared = max(4, item), kv_heads(model, t)[1]
    cut = parts(model.n_heads // t, shared, config.train.device or "cuda")
    heads, positions = largest = max((each.heads.stop - each.heads.start, len(each.places)) for each in cut)
    part = gathered * heads / shared * positions / 2
    ahead, behind = (part * (1 + 1 / cp), 2 * part) if len(cut) > 1 else (0.0, 0.0)
    sums, kernel = part * wide / item, _attention_workspace(config, part, *largest)
    own = wide * microbatch_tokens(config) * model.query_size / t + gathered / cp
    return own + ahead + max(behind + max(2 * part, sums + part + kernel), sums + 2 * part)


def _attention_workspace(config: RunConfig, part: float, heads: int, halves: int) -> float:
    """The most bytes that a kernel of that backward makes of one sample. part: bytes of the keys and values of all
    samples, `heads` of them and one half of each sample or both.

    They are the gradients of keys and values for each head of queries, and on CUDA in 16 bits also their sums.
    Elsewhere keys and values are repeated for these heads, too. A CPU makes a mask for a window, of the queries of a
    chunk and the keys that they see; CUDA in 32 and 64 bits has the scores of these for each head, thrice.
    """
    model, layout, item = config.model, config.parallel, Precision.of(config).compute.itemsize
    t, one = layout.tensor_parallel, part / config.microbatch_size
    group = model.n_heads // t / kv_heads(model, t)[1]
    repeated = group if group > 1 else 0
    cuda = config.train.device != "cpu"
    if cuda and item == 2:
        return one * (1 + repeated)
    rows, seen = model.seq_length // (2 * layout.context_parallel), model.seq_length * halves // 2
    window = model.sliding_window
    if window is not None:
        seen = min(seen, rows + window - 1)
    scores = 3 * item * heads * group if cuda else 0.0
    masks = 2 + item if window is not None and window < model.seq_length else 0
    return one * (group + repeated) + rows * seen * (scores + masks)


def boundary_bytes(config: RunConfig) -> int:
    """Bytes of the rows that one stage sends to the next for one microbatch. train.dtype must be set."""
    rows = microbatch_rows(config.model, config.parallel, config.microbatch_size)
    return rows * config.model.hidden_size * Precision.of(config).compute.itemsize


def pipeline_buffers(config: RunConfig, stages: Sequence[int], outputs: int, keeps_sent: bool = True) -> int:
    """Bytes that the pipeline holds for what a rank's stages receive and have sent.

    stages: the rank's. Each receives the rows of one microbatch and the gradient of another one at a time.
    outputs: bytes of the results in flight, which is what was sent if the rank has one stage. With several stages it is
    all rows and gradients of the step: for such schedules torch's engine frees what it sent only when the step ends.
    There `outputs` is what has yet to be sent, as a negative number (moments.outputs).
    keeps_sent: whether the engine does so.
    """
    layout, last = config.parallel, config.parallel.n_stages - 1
    received = sum((stage > 0) + (stage < last) for stage in stages) * boundary_bytes(config)
    if layout.stages_per_rank == 1 or not keeps_sent:
        return received + outputs
    neighbours = [other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last]
    sent = sum(other not in stages for other in neighbours)
    return received + config.n_microbatches * sent * boundary_bytes(config) + outputs


def fused_workspaces(
    tokens: int, hidden: int, itemsize: int, tp: int, sequence_parallel: bool = True, blocks: bool = False
) -> int:
    """Bytes of the fused transport's workspaces on a rank (KernelWorkspace). Each has flags and two slots.

    A slot's bytes are a power of two. A gather's slot holds the gathered rows. A reduction's slot holds what every rank
    adds to this rank's rows, in whole tiles. Without sequence_parallel both are replaced by the slot of an all-reduce,
    which holds as much as a reduction's, and the sums. blocks: in FP8 gathers are of blocks.
    """
    rows = -(-tokens // tp)
    tiles = -(-rows // TILE_ROWS) * TILE_ROWS * (-(-hidden // TILE_COLUMNS) * TILE_COLUMNS)
    gathered = shard_bytes(rows, hidden) if blocks else rows * hidden * itemsize
    slots = [tp * tiles * itemsize, tp * gathered] if sequence_parallel else [2 * tp * tiles * itemsize]
    flags = tp * WRITER_FLAGS_MINIMUM * FLAG_BYTES
    return sum(2 * slot_bytes(slot) + flags for slot in slots)


def loss_workspace(
    config: GPTConfig, tokens: int, width: int, chunk_tokens: int, itemsize: int, *, on_cpu: bool = False
) -> int:
    """Bytes that linear_cross_entropy needs while it runs.

    They are a chunk's logits, the table's gradient in float32 (or float64), the gathered rows and their gradient.
    width: vocabulary entries on a rank. on_cpu: there the exponentials of a chunk are kept beside its logits, in
    float32 or float64, and of 16 bits the logits in float32, and products before they are added.
    """
    h, wide = config.hidden_size, max(4, itemsize)
    logits = min(chunk_tokens, tokens) * width * (itemsize + wide * on_cpu * (1 + (itemsize < 4)))
    product = width * h * itemsize if on_cpu and itemsize < 4 else 0
    return logits + product + wide * width * h + 2 * tokens * h * itemsize


def expert_rows(config: RunConfig, *, worst: bool = False) -> int:
    """Rows of one microbatch that a rank's experts take in a layer, if all experts take equally many.

    worst: the most that they can take: each token has as many of its experts here as this rank holds.
    """
    model, layout = config.model, config.parallel
    if (ep := exchanging_ranks(layout)) is not None:
        rows, k = microbatch_rows(model, layout, config.microbatch_size), model.experts_per_token
        return ep * rows * min(k, (model.n_experts or 0) // ep) if worst else rows * k // ep * ep
    tokens, k, n_experts = microbatch_tokens(config), model.experts_per_token, model.n_experts or 0
    own = n_experts // layout.tensor_parallel
    if worst:
        return tokens * min(k, own)
    parts = layout.tensor_parallel if layout.sequence_parallel else 1
    return tokens * k * own // max(1, n_experts) // parts * parts


def exchanged_rows(config: RunConfig, *, worst: bool = False, ep: int | None = None) -> int:
    """Rows that a rank sends in an exchange of a microbatch's tokens: one for each rank that has experts of a token. If
    all experts take equally many tokens, as many come. worst: the most that can come. ep: ranks that share the experts,
    if not as many as in the layout.
    """
    model, layout = config.model, config.parallel
    ep, rows = ep or exchanging_ranks(layout) or 1, microbatch_rows(config.model, layout, config.microbatch_size)
    if worst or ep == 1:
        return ep * rows
    share = share_of_rank(model.experts_per_token, model.n_experts or 0, ep)
    return ep * min(rows * model.experts_per_token // ep, round(rows * share))


def layer_workspace(config: RunConfig, *, experts: bool = False, worst: bool = False, packs: bool = False) -> float:
    """The most bytes that the backward of one layer needs while it runs, beside what it kept or makes again.

    They are the gathered output gradient and input, the partial input gradient, and the MLP's hidden gradients and
    activations, or what context-parallel attention needs if that is more. Experts have the gradients of their
    activations, too, and of each dispatched row before those of a token are added; where ranks exchange tokens, also
    the rows that leave, and those that have come: of the input, and of the output's gradient. packs: with packed
    activations also what a backward of attention unpacks: queries, keys, values and the result. experts: whether the
    layer has experts. worst: as in expert_rows.
    """
    model, layout, h, t = config.model, config.parallel, config.model.hidden_size, config.parallel.tensor_parallel
    item, tokens = Precision.of(config).compute.itemsize, microbatch_tokens(config)
    quantised = quantised_workspace(config, backward=True, experts=experts, worst=worst)
    read, made = tokens * model.hidden_features / t, tokens * model.ffn_size / t
    if experts:
        rows, shared = expert_rows(config, worst=worst), tokens * model.shared_expert_size / t
        read, made = 2 * (rows * model.expert_size + shared), rows * (2 * model.expert_size + h) + 2 * shared
        if exchanging_ranks(layout) is not None:
            came = exchanged_rows(config, worst=worst)
            made += h * (exchanged_rows(config) + 2 * came)
    unpacked = 2 * (model.query_size + model.kv_size) / t if packs else 0
    branch = max(item * (read + made), context_workspace(config))
    need = item * tokens * (3 * h + unpacked) + branch
    if config.train.device == "cpu" and not experts:  # torch makes the gradient of the result, too
        inside = read + 2 * made
        if item < 4:  # and computes it from copies in float32: of what is read, and of the result's gradient
            inside = made + 4 / item * (read + 4 * made)
        need = max(need, item * (tokens * h + inside))
    return need + quantised


def forward_workspace(config: RunConfig, *, experts: bool = False) -> float:
    """The most bytes that the forward of one layer needs while it runs, beside what it keeps: the gathered input and
    the output, and the MLP's activations, which a CPU makes by a product of two. Of experts no more than in their
    backward."""
    if experts:
        return layer_workspace(config, experts=True)
    model, made = config.model, config.model.ffn_size / config.parallel.tensor_parallel
    on_cpu = config.train.device == "cpu"
    features = 2 * model.hidden_size + made * (1 + on_cpu)
    need = Precision.of(config).compute.itemsize * microbatch_tokens(config) * features
    return need + quantised_workspace(config, backward=False)


def quantised_workspace(config: RunConfig, *, backward: bool, experts: bool = False, worst: bool = False) -> float:
    """The most bytes that FP8 needs for one linear of an MLP, or of experts and the rows that are there for them,
    besides, while its forward or its backward runs; else 0.

    They are the blocks of its input and, unless they are kept, of a weight. In a backward also those of the output
    gradients and of the weight's transposed copy, and what is dequantised for a weight gradient: the input and one
    weight's gradients.
    """
    if config.train.precision != FP8:
        return 0.0
    model, t, tokens = config.model, config.parallel.tensor_parallel, microbatch_tokens(config)
    h, f, item = model.hidden_size, model.ffn_size / t, Precision.of(config).compute.itemsize
    inputs, made, weight = tokens * h, tokens * f, h * f  # elements: of the input, of one weight's result, and of it
    results = tokens * model.hidden_features / t
    if experts:
        ep = exchanging_ranks(config.parallel)
        inputs = h * (tokens if ep is None else exchanged_rows(config, worst=worst))
        made = results = 2 * expert_rows(config, worst=worst) * model.expert_size
        weight = 2 * h * model.expert_size * (model.n_experts or 0) / (ep or t)
    weight = 0.0 if config.parallel.keeps_weights else weight
    if not backward:
        return NUMBER_BYTES * max(inputs, made) + weight
    return NUMBER_BYTES * (inputs + results) + 2 * weight + item * (inputs + made)


def kept_blocks(config: RunConfig, of_rank: Elements) -> float:
    """Bytes of the blocks of a rank's weights, with their transposed copies, that a step in FP8 keeps; else 0."""
    model, layout = config.model, config.parallel
    if config.train.precision != FP8 or not layout.keeps_weights:
        return 0.0
    unused = 0.0  # rows of keys' and values' weights that other ranks compute alone
    if model.kv_heads % layout.tensor_parallel:
        unused = model.kv_size - kv_heads(model, layout.tensor_parallel)[0] * model.head_size
    quantised = of_rank.matrices - 2 * of_rank.n_layers * model.hidden_size * unused
    return 2 * (1 + 1 / BLOCK**2) * quantised


def reduction_workspace(
    size: Elements, layout: Layout, precision: Precision, *, accumulates: bool, at_end: bool = False
) -> float:
    """Bytes that FSDP2 needs to reduce the gradients of a layer while the backward of the next one runs.

    at_end: the reductions come after all backwards. Then the bytes are a layer's gradients and this rank's share of
    their sum.
    """
    if not uses_fsdp(layout, precision.compute):
        return 0.0
    share = size.layer_shard(layout) * precision.reduce.itemsize
    if at_end:
        return size.layer * precision.reduce.itemsize + share
    return in_backward(size, layout, precision, accumulates=accumulates).reduction + share


class Peak(NamedTuple):
    """Bytes that a rank keeps at the moment of its schedule when their sum is largest.

    saved: for backwards, without what is offloaded. output: results that were sent on. queued: for weight gradients.
    in_flight: the most microbatches that wait for a backward at one time, added up over the rank's stages.
    """

    saved: int
    output: int
    queued: int
    in_flight: int


class Occupancies(NamedTuple):
    """The different moments of a rank's schedule: how many microbatches of each of its stages wait, (moments, stages).

    forward: for a backward. queued: for weight gradients. stages, kinds: which stage computes then, as a column, and
    what: it is at the end of a forward (F), or at the start of a backward (B; I: of input gradients alone; W: of weight
    gradients).
    """

    forward: np.ndarray
    queued: np.ndarray
    stages: np.ndarray
    kinds: np.ndarray


def occupancies(steps: Sequence[Sequence[Step]], stages: Sequence[int]) -> Occupancies:
    """Those of a rank, in order. steps: its schedule, in groups that are executed together."""
    forward, waiting = (dict.fromkeys(stages, 0) for _ in range(2))
    found: dict[tuple[tuple[int, ...], tuple[int, ...], int, str], None] = {}
    for step in (step for together in steps for step in together if step.kind in "FBIW"):
        forward[step.stage] += step.kind == "F"
        found[tuple(forward.values()), tuple(waiting.values()), list(stages).index(step.stage), step.kind] = None
        forward[step.stage] -= step.kind in "BI"
        waiting[step.stage] += (step.kind == "I") - (step.kind == "W")
    return Occupancies(*(np.array(each) for each in zip(*found, strict=True)))


def schedule_peak(moments: Occupancies, stages: Sequence[StageCount]) -> Peak:
    """The Peak of one rank. moments: its schedule's. stages: the rank's, in the same order."""
    saved, output, queued = (
        np.array([weight(stage) for stage in stages])
        for weight in (lambda stage: stage.saved - stage.offloaded, lambda s: s.output, lambda s: s.queued)
    )
    parts = moments.forward @ saved, moments.forward @ output, moments.queued @ queued
    worst = int(sum(parts).argmax())
    kept, sent, waiting = (int(part[worst]) for part in parts)
    return Peak(kept, sent, waiting, int(moments.forward.sum(1).max()))

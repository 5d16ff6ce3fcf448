"""Formulas for what one layer keeps of a microbatch for its backward, storage by storage; the dry run counts the same.

Belongs here: arithmetic on a configuration, for a layer with an MLP and for one with experts. How layers add up to a
stage is in rank_memory.py.
"""

from __future__ import annotations

from typing import NamedTuple

from tpformer.config import FP8, MLP_ACTIVATIONS, RunConfig
from tpformer.kernels.pack.format import packed_bytes, pays
from tpformer.kernels.quantize.format import NUMBER_BYTES

from .memory import exchanged_rows, expert_rows, kv_heads, microbatch_rows, microbatch_tokens
from .states import Precision, exchanging_ranks


class Kept(NamedTuple):
    """Bytes that a layer keeps of one microbatch, by storage."""

    stream: float
    """Each of two inputs of its branches, which are rows of the residual stream."""
    heads: tuple[float, ...]
    """Queries, keys, values, attention's result; with qk_norm queries and keys before their norms, too."""
    hidden: tuple[float, ...]
    """What activations read: the MLP's, or those of experts and of the shared expert."""
    of_attention: float
    """Statistics of the attention branch: its norm's, those of qk_norm, attention's log-sum-exp; a window's mask."""
    of_mlp: float
    """Statistics of the MLP branch's norm."""
    routing: tuple[float, ...]
    """What a router decided, and which rows follow from it."""
    decided: float
    """The routing that a region with this layer keeps beside its input, so that nothing is decided twice."""
    waiting: float
    """What a split backward holds of the MLP branch for the weight gradients, without rows of the residual stream."""

    def storages(self, recompute: str, packs: bool = False) -> list[float]:
        """Those that autograd keeps, the layer's input first. recompute: none, mlp or full. packs: in packed form."""
        size = packed_size if packs else _as_is
        kept = list(map(size, self.activations(recompute)))
        if recompute == "full":
            return kept
        return [*kept, self.of_attention] + ([self.of_mlp, *self.routing] if recompute == "none" else [])

    def activations(self, recompute: str) -> list[float]:
        """Those of `storages` that can be packed."""
        if recompute == "full":
            return [self.stream]
        return [self.stream, self.stream, *self.heads, *(self.hidden if recompute == "none" else ())]

    def packing(self, recompute: str) -> tuple[float, float]:
        """Bytes that packing adds to what a layer's kernels read and write: to the forward, and to the backward.

        What is packed is read and its packed form written. In the backward norms and the activation read the packed
        form in place of the values: the residual stream twice, the MLP's hidden once. All others are unpacked by a
        pass of their own, which reads it and writes the values: queries, keys, values, twice attention's result, a
        region's input.
        """
        forward = sum(each + packed_size(each) for each in self.activations(recompute))
        passes = [self.stream] * (recompute == "mlp")
        passes += [*self.heads, self.heads[3]] if recompute != "full" else [self.stream]
        inside = [self.stream] * {"none": 4, "mlp": 2, "full": 0}[recompute]
        inside += self.hidden if recompute == "none" else ()
        backward = sum(each + packed_size(each) for each in passes) - sum(each - packed_size(each) for each in inside)
        return forward, backward


def _as_is(nbytes: float) -> float:
    return nbytes


def packed_size(nbytes: float) -> float:
    """Bytes of a storage's packed form; small ones are not packed."""
    values = round(nbytes) // 2
    return packed_bytes(values) if pays(values) else nbytes


def kept_by_kind(config: RunConfig, *, worst: bool = False) -> dict[bool, Kept]:
    """The Kept of a layer without experts, and of one with experts if there are some. docs/memory.md has the table.

    worst: all tokens go to this rank's experts; otherwise experts get equal numbers of tokens.
    """
    dense = _dense(config)
    if config.model.n_experts is None:
        return {False: dense}
    return {False: dense, True: _experts(config, dense, worst)}


def factor_bytes(config: RunConfig) -> float:
    """Bytes of a number of what GEMMs of weight gradients read."""
    return NUMBER_BYTES if config.train.precision == FP8 else Precision.of(config).compute.itemsize


def _dense(config: RunConfig) -> Kept:
    model, layout = config.model, config.parallel
    t, item = layout.tensor_parallel, Precision.of(config).compute.itemsize
    statistic = max(4, item)
    tokens = microbatch_tokens(config)
    rows = microbatch_rows(model, layout, config.microbatch_size)
    norm = rows * statistic * (2 if model.norm == "layernorm" else 1)
    q, (own, attended) = model.n_heads // t, kv_heads(model, t)
    heads = [q, attended, attended, q] + ([q, own] if model.qk_norm else [])
    per_head = q + (q + own if model.qk_norm else 0)
    windowed = (model.sliding_window or model.seq_length) < model.seq_length
    # the kernels of a GPU make no mask, and ops.context_attention keeps none
    flash = (config.train.device != "cpu" and item == 2) or layout.context_parallel > 1
    mask = item * model.seq_length**2 if windowed and not flash else 0
    width = -(-model.ffn_size // t)  # the first rank's
    hidden = (tokens * width * item,) * (2 if MLP_ACTIVATIONS[model.activation][1] else 1)
    return Kept(
        rows * model.hidden_size * item,
        tuple(tokens * each * model.head_size * item for each in heads),
        hidden,
        norm + tokens * per_head * statistic + mask,
        norm,
        (),
        0.0,
        (len(hidden) + 1) * tokens * width * factor_bytes(config),
    )


def _experts(config: RunConfig, dense: Kept, worst: bool) -> Kept:
    if (ep := exchanging_ranks(config.parallel)) is not None:
        return _exchanged_experts(config, dense, ep, worst)
    model, layout = config.model, config.parallel
    t, item = layout.tensor_parallel, Precision.of(config).compute.itemsize
    wide, k, n_experts = max(4, item), model.experts_per_token, model.n_experts or 0
    tokens, own = microbatch_tokens(config), n_experts // t
    rows, dispatched = microbatch_rows(model, layout, config.microbatch_size), expert_rows(config, worst=worst)
    width, shared = model.expert_size, -(-model.shared_expert_size // t)
    hidden = (dispatched * 2 * width * item, *(tokens * shared * item,) * 2 * (shared > 0))
    slots, weights = 4 * dispatched, wide * dispatched
    counts = 4 * own * (t if layout.sequence_parallel else 1)
    routing = [slots, weights, counts, 4 * rows * k, wide * rows * n_experts]
    loss = 0
    if config.train.balance_loss:  # slopes by sample, and the sample of each token; the loss itself
        routing += [wide * (config.microbatch_size + 1) * n_experts, 8 * tokens]
        loss = wide
    # beside gate and up, the activation's results; slots, weights and counts, and what was made of them: each row's
    # token, each expert's first row, each token's rows
    waiting = factor_bytes(config) * 3 * (dispatched * width + tokens * shared) + slots + weights + counts
    waiting += 4 * (dispatched + own + 1 + tokens * k)
    return dense._replace(hidden=hidden, routing=tuple(routing), decided=sum(routing) + loss, waiting=waiting)


def _exchanged_experts(config: RunConfig, dense: Kept, ep: int, worst: bool) -> Kept:
    """The same where ep ranks exchange tokens: each keeps what it decided about its own and computed for all."""
    model, item = config.model, Precision.of(config).compute.itemsize
    wide, k, n_experts = max(4, item), model.experts_per_token, model.n_experts or 0
    rows, came = microbatch_rows(model, config.parallel, config.microbatch_size), expert_rows(config, worst=worst)
    tokens, shared = microbatch_tokens(config), -(-model.shared_expert_size // config.parallel.tensor_parallel)
    hidden = (came * 2 * model.expert_size * item, *(tokens * shared * item,) * 2 * (shared > 0))
    own, arrived = n_experts // ep, exchanged_rows(config, worst=worst)
    # the order of own rows, which of them leave, where each computed row has come, its weight, rows of each expert
    routing = [4 * rows * k, 4 * exchanged_rows(config), 4 * came, wide * came, 4 * own]
    plan = sum(routing)
    routing += [4 * rows * k, wide * rows * n_experts]  # own experts and scores
    loss = 0
    if config.train.balance_loss:
        routing += [wide * (config.microbatch_size + 1) * n_experts, 8 * tokens]
        loss = wide
    # dy of rows that came; of computed ones the activation's results, and gradients of gate and up; the plan, and what
    # was made of it as above, for own rows and for those that came. A shared expert has the layer's output gradient of
    # all tokens, and its own copy of the rows
    factor = factor_bytes(config)
    waiting = factor * (arrived * model.hidden_size + came * 3 * model.expert_size) + plan
    width = min(k, own) if ep > 1 else k
    waiting += 4 * (came + own + 1 + arrived * width) + 4 * (exchanged_rows(config) + rows * k)
    waiting += factor * (3 * tokens * shared + dense.stream / item if shared else -tokens * model.hidden_size)
    return dense._replace(hidden=hidden, routing=tuple(routing), decided=sum(routing) + loss, waiting=waiting)

"""Formulas for a rank's bytes of parameters, gradients and optimizer state in each ZeRO stage, through a step.

Belongs here: arithmetic on a configuration, without tensors. `python -m bench zero` counts the same bytes on real ranks
and requires them to be within 3 %. Activations and workspaces are in memory.py.

M: elements of this rank's stages after tensor and expert parallelism, before ZeRO; N: Layout.shards, which is
data_parallel_shard times context_parallel. X: those of M that are of experts which exchange tokens. ZeRO divides them
among other ranks than the rest, Layout.expert_shards. H: those of M that are layers' matrices, for which Muon keeps
less.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from tpformer.config import RunConfig
from tpformer.layers.embedding import padded_vocab
from tpformer.models import GPTConfig
from tpformer.parallel import Layout, split_stages
from tpformer.parallel.zero import uses_fsdp

from .bubbles import Step, schedule_order

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
COPIES, ACCUMULATED = "unsharded copies", "accumulated gradients"


class Elements(NamedTuple):
    """How many parameter elements one tensor-parallel rank has in some stages, before ZeRO.

    Where the ranks cannot share a size evenly, it is their mean.
    """

    sizes: tuple[float, ...]
    """Elements of each layer."""
    matrices: float
    """Elements of all layers' matrices, but for routers', whose gradients come last in a schedule that splits the
    backward."""
    rest: float
    """Elements outside of layers: embeddings, last norm and head. FSDP2 gathers them as one unit, the root."""
    head: float
    """Elements of the last stage's norm and head, or 0 if that stage is also the first or not among these stages.
    Their gradient waits for the end of the backward."""
    tied: float = 0.0
    """Elements of a table that the first and the last of these stages, then one, use both: it has two gradients."""
    experts: tuple[float, ...] = ()
    """Of each layer's elements those of experts that exchange tokens. Empty: none do."""

    @property
    def n_layers(self) -> int:
        """Layers of all stages."""
        return len(self.sizes)

    @property
    def layer(self) -> float:
        """Elements of the largest layer."""
        return max(self.sizes)

    @property
    def two_layers(self) -> float:
        """Elements of the two largest layers, or of the only one."""
        return sum(sorted(self.sizes)[-2:])

    @property
    def layers(self) -> float:
        """Elements of all layers."""
        return sum(self.sizes)

    @property
    def total(self) -> float:
        """M: elements of everything."""
        return self.layers + self.rest

    @property
    def exchanged(self) -> float:
        """X: elements of all experts that exchange tokens."""
        return sum(self.experts)

    def shard(self, layout: Layout) -> float:
        """How many of all elements ZeRO leaves a rank."""
        return _shared(self.total, self.exchanged, layout)

    def matrix_shard(self, layout: Layout) -> float:
        """How many of the layers' matrices' elements ZeRO leaves a rank."""
        return _shared(self.matrices, self.exchanged, layout)

    def layer_shard(self, layout: Layout) -> float:
        """How many of the largest layer's elements ZeRO leaves a rank."""
        return _shared(*max(zip(self.sizes, self.experts or (0.0,) * self.n_layers, strict=True)), layout)


def _shared(elements: float, exchanged: float, layout: Layout) -> float:
    rest = (elements - exchanged) / layout.shards
    return rest + exchanged / layout.expert_shards if exchanged else rest


def exchanging_ranks(layout: Layout) -> int | None:
    """How many ranks share the experts of a layer and exchange tokens. None: tensor-parallel ranks, which gather them,
    or one rank alone."""
    ep = layout.expert_parallel
    return ep if ep is not None and ep * layout.tensor_parallel > 1 else None


def elements(config: GPTConfig, stages: Iterable[range], tp: int, ep: int | None = None) -> Elements:
    """The Elements of stages on one of tp ranks. stages: the layers of each. docs/layouts.md says what is sharded.

    ep: ranks that share the experts and exchange tokens. None: the tp ranks.
    """
    return _elements(config, tuple(stages), tp, ep)


@functools.lru_cache(maxsize=65536)
def _elements(config: GPTConfig, stages: tuple[range, ...], tp: int, ep: int | None) -> Elements:
    h, q, t = config.hidden_size, config.query_size, tp
    kv = config.kv_size / (t if config.kv_heads % t == 0 else 1)
    norm, head_norms = h * (2 if config.norm == "layernorm" else 1), 2 * config.head_size if config.qk_norm else 0
    attention = 2 * h * (q / t + kv)
    experts = 3 * h * (config.n_experts or 0) * config.expert_size / (ep or t)
    shared = 3 * h * config.shared_expert_size / t
    mlp = {False: h * (config.hidden_features + config.ffn_size) / t, True: experts + shared}
    biases = (q / t + 2 * kv if config.has_qkv_bias else 0) + (config.hidden_features / t + 2 * h if config.bias else 0)
    router = h * (config.n_experts or 0)
    table = padded_vocab(config.vocab_size or 0, config.vocab_multiple) * h / t
    sizes: list[float] = []
    exchanged: list[float] = []
    matrices = rest = head = tied = 0.0
    for stage in stages:
        for has_experts in map(config.has_experts, stage):
            matrices += attention + mlp[has_experts]
            vectors = biases + 2 * norm + head_norms + router * has_experts
            sizes.append(attention + mlp[has_experts] + vectors)
            exchanged.append(experts * has_experts)
        first, last = stage.start == 0, stage.stop == config.n_layers
        if first:
            rest += table + (config.seq_length * h if config.position == "learned" else 0)
        if last:
            rest += norm + (0 if first and config.tie_embeddings else table)
            head += 0 if first else norm + table
            tied += table if first and config.tie_embeddings else 0
    return Elements(tuple(sizes), matrices, rest, head, tied, () if ep is None else tuple(exchanged))


class Precision(NamedTuple):
    """master: the dtype of parameters and optimizer. compute: of the computation. reduce: in which gradients add up.
    moments: tensors as large as a parameter that the optimizer keeps for it; matrix_moments: for a layer's matrix."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    moments: int = 2
    matrix_moments: int = 2

    @classmethod
    def of(cls, config: RunConfig) -> Precision:
        """The dtypes that a configuration gives FSDP2. train.dtype must be set."""
        compute = getattr(torch, str(config.train.dtype))
        low = compute.itemsize < 4
        master = torch.float32 if low else compute
        reduce = getattr(torch, config.parallel.reduce_dtype) if low else master
        return cls(master, compute, reduce, config.optimizer.moments, config.optimizer.matrix_moments)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of an element: (master, compute, reduce)."""
        return self.master.itemsize, self.compute.itemsize, self.reduce.itemsize


def accumulates(config: RunConfig) -> bool:
    """Whether gradients add up before they are reduced: over microbatches, or until a pipeline's schedule ends."""
    return config.n_microbatches > 1 or config.parallel.pipeline_parallel > 1


def narrow_gradients(layout: Layout, precision: Precision, *, accumulates: bool) -> bool:
    """Whether gradients stay in the compute dtype up to the update, as MasterWeights keeps them on one rank."""
    one_rank = layout.tensor_parallel == 1 and not uses_fsdp(layout, precision.compute)
    return one_rank and not accumulates and precision.compute.itemsize < precision.master.itemsize


class State(NamedTuple):
    """One kind of model state, its bytes and their formula."""

    name: str
    formula: str
    nbytes: float


def model_states(size: Elements, layout: Layout, precision: Precision, *, accumulates: bool) -> list[State]:
    """The model states of a rank: parameters, gradients and the optimizer's as shards, and what FSDP2 holds unsharded.

    accumulates: whether the step has backwards before the one that reduces.
    Without FSDP2, MasterWeights keeps copies to compute with, of all parameters, and gradients of one backward as made.
    FSDP2 holds copies to compute with: below stage 3 of all parameters, in stage 3 of the tables and of two layers, the
    current and the next one (the two largest, which may not be neighbours). Below stage 2 it also adds up gradients in
    the reduce dtype, unsharded, until the step ends and shards take their place.
    """
    m, shard = size.total, size.shard(layout)
    w, c, r = precision.sizes
    sizes = {PARAMETERS: w, GRADIENTS: w, OPTIMIZER: precision.moments * w}
    states = [State(name, _formula(nbytes, size, layout), nbytes * shard) for name, nbytes in sizes.items()]
    if (less := (precision.moments - precision.matrix_moments) * w) > 0:
        words = f"{states[2].formula} - {_formula(less, size, layout, 'H')}"
        states[2] = State(OPTIMIZER, words, states[2].nbytes - less * size.matrix_shard(layout))
    if narrow_gradients(layout, precision, accumulates=accumulates):
        wide = f" + {w - c} (tied table)" if size.tied else ""
        states[1] = State(GRADIENTS, f"{c} M{wide}", c * m + (w - c) * size.tied)
    if not uses_fsdp(layout, precision.compute):
        return states + ([State(COPIES, f"{c} M", c * m)] if c < w else [])
    if layout.zero < 3:
        states.append(State(COPIES, f"{c} M", c * m))
    else:
        gathered = size.rest + size.two_layers
        states.append(State(COPIES, f"{c} (tables + 2 layers)", c * gathered))
    if layout.zero < 2 and accumulates:
        states.append(State(ACCUMULATED, f"{r} M", r * m))
    return states


def _formula(nbytes: int, size: Elements, layout: Layout, of: str = "M") -> str:
    n, of_experts = layout.shards, layout.expert_shards if size.exchanged else layout.shards
    if n == of_experts:
        return f"{nbytes} {of} / {n}"
    found = f"{nbytes} ({of} - X) / {n} + {nbytes} X{f' / {of_experts}' if of_experts > 1 else ''}"
    return found if of == "M" else f"({found})"


def most_at_once(states: Iterable[State]) -> float:
    """The most bytes of a rank's model states in a step: accumulated gradients turn into shards unit by unit."""
    sizes = {state.name: state.nbytes for state in states}
    gradients = max(sizes.pop(GRADIENTS), sizes.pop(ACCUMULATED, 0.0))
    return sum(sizes.values()) + gradients


class InBackward(NamedTuple):
    """Bytes that a rank holds only while the backward of a layer runs."""

    gathered: float
    """Parameters of this layer and the next one, which ZeRO stage 3 gathers."""
    gradients: float
    """The layer's gradients in the compute dtype, until they are added up or reduced."""
    head: float
    """The head's gradient, which the last pipeline stage holds until its backward ends."""
    reduction: float
    """What the reduction of the layer before still holds, less what it has freed."""


def in_backward(
    size: Elements, layout: Layout, precision: Precision, *, accumulates: bool, kind: str = "B"
) -> InBackward:
    """The most bytes that a layer's backward holds besides model_states.

    kind: B, or in schedules that split the backward I (input gradients) or W (weight gradients, of all layers at once).
    accumulates: as in model_states. If the compute dtype is also the reduce dtype, autograd adds up gradients in place.
    """
    w, c, r = precision.sizes
    layer, n = size.layer, size.n_layers
    if not uses_fsdp(layout, precision.compute):
        narrow = narrow_gradients(layout, precision, accumulates=accumulates)
        return InBackward(0.0, 0.0 if narrow else c * layer, 0.0, 0.0)
    if layout.zero < 2 and accumulates:
        cast = c if c != r else 0
        made = {"B": layer, "I": 0.0, "W": size.matrices}[kind]
        # without a pipeline the last backward reduces layer by layer, makes a shard and frees the compute copy
        made_less = w * size.layer_shard(layout) - c * layer
        reduction = 0.0 if layout.pipeline_parallel > 1 else max(0.0, made_less)
        return InBackward(0.0, cast * made, 0.0 if kind == "W" else cast * size.head, reduction)
    gathered = c * size.two_layers if layout.zero == 3 else 0.0
    reduction = r * layer if n > 1 else 0.0
    if layout.zero == 3 and n == 2:  # the second of two layers has no next one to gather
        reduction = max(0.0, reduction - c * layer)
    return InBackward(gathered, c * layer, c * size.head, reduction)


class Moments(NamedTuple):
    """Bytes by kind of state at three moments of a step.

    idle: before the step. forward: after the forward that leaves most. backward: from the reduction to zero_grad.
    peak: the largest sum at any moment of the step.
    """

    idle: dict[str, float]
    forward: dict[str, float]
    backward: dict[str, float]
    peak: float


class _Stage:
    """The bytes that a stage holds while its rank goes through the steps of a schedule."""

    def __init__(self, size: Elements, layout: Layout, precision: Precision, accumulates: bool, backwards: int) -> None:
        self.zero, self.left = layout.zero, backwards
        copies_last = not uses_fsdp(layout, precision.compute)  # MasterWeights keeps them from step to step
        self.lasting = (PARAMETERS, OPTIMIZER, COPIES) if copies_last else (PARAMETERS, OPTIMIZER)
        self.of_backward = {
            kind: in_backward(size, layout, precision, accumulates=accumulates, kind=kind) for kind in "BIW"
        }
        self.sizes = {
            state.name: state.nbytes for state in model_states(size, layout, precision, accumulates=accumulates)
        }
        if COPIES in self.sizes:
            self.sizes[COPIES] -= self.of_backward["B"].gathered
        self.held = {name: self.sizes.get(name, 0.0) for name in self.lasting}

    def begin(self, kind: str) -> float:
        """Begin a step of this kind. Returns the bytes that are held only while it runs."""
        if kind == "F" or self.zero == 3:
            self.held[COPIES] = self.sizes.get(COPIES, 0.0)
        return 0.0 if kind == "F" else sum(self.of_backward[kind])

    def end(self, kind: str) -> None:
        """End the step. A backward leaves gradients, and may free the parameters that it gathered."""
        if kind in "BW":
            self.left -= 1
            name = ACCUMULATED if ACCUMULATED in self.sizes else GRADIENTS
            self.held[name] = self.sizes[name]
            if self.zero == 3 or (self.zero == 2 and self.left == 0):
                self.held[COPIES] = 0.0

    def reduced(self) -> None:
        """All gradients are shards, and nothing is gathered."""
        self.held = {name: self.sizes.get(name, 0.0) for name in (*self.lasting, GRADIENTS)}


def step_moments(parts: Mapping[int, Elements], steps: Sequence[Step], layout: Layout, precision: Precision) -> Moments:
    """The Moments of a rank in a training step that is not its first.

    parts: its stages' Elements by index. steps: what its schedule computes, in order.
    """
    backwards = Counter(step.stage for step in steps if step.kind in "BW")
    adds = layout.pipeline_parallel > 1 or max(backwards.values()) > 1
    stages = {index: _Stage(size, layout, precision, adds, backwards[index]) for index, size in parts.items()}

    def together() -> dict[str, float]:
        names = dict.fromkeys(name for stage in stages.values() for name in stage.held)
        return {name: sum(stage.held.get(name, 0.0) for stage in stages.values()) for name in names}

    idle = forward = together()
    peak = 0.0
    for step in steps:
        passing = stages[step.stage].begin(step.kind)
        peak = max(peak, sum(together().values()) + passing)
        stages[step.stage].end(step.kind)
        now = together()
        peak = max(peak, sum(now.values()))
        if step.kind == "F" and sum(now.values()) > sum(forward.values()):
            forward = now
    for stage in stages.values():
        stage.reduced()
    return Moments(idle, forward, together(), peak)


def stage_elements(config: RunConfig, pipeline_rank: int) -> dict[int, Elements]:
    """The Elements of each stage of a pipeline rank, by the stage's index."""
    model, layout = config.model.architecture, config.parallel
    ranges = split_stages(model.layer_costs(layout.pipeline_split), layout.n_stages)
    sizes = layout.tensor_parallel, exchanging_ranks(layout)
    return {stage: elements(model, [ranges[stage]], *sizes) for stage in layout.stages_of(pipeline_rank)}


def rank_moments(config: RunConfig, pipeline_rank: int) -> Moments:
    """The Moments of a pipeline rank, in the order of its schedule. train.dtype must be set."""
    layout, m = config.parallel, config.n_microbatches
    steps = [Step(0, kind, index) for index in range(m) for kind in "FB"]
    if layout.pipeline_parallel > 1:
        order = schedule_order(layout.pipeline_schedule, layout.pipeline_parallel, m, layout.stages_per_rank)
        steps = [step for together in order[pipeline_rank] for step in together]
    return step_moments(stage_elements(config, pipeline_rank), steps, layout, Precision.of(config))

"""The search for the fastest layout that fits: in which order candidates are looked at, and their ranking.

Belongs here: bounds, the order, and what is dropped. Candidates are candidates.py's, times step_time.py's, bytes
rank_memory.py's; text is in plan_report.py. All figures are predictions.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tpformer.config import RunConfig

from .candidates import CONTEXT, MARGIN, Question, check, crosses_nodes, shapes, variants
from .layer_time import LayerModel
from .layouts import DEFAULTS, layout_text, with_layout
from .rank_memory import RankMemory, different_ranks, least_memory, predicted_memory
from .stage_time import StepTime
from .step_time import StepModel, mfu

# what offloads less. Offloading takes time, so more of it is tried only if none of these fits
LESS = {"none": (), "activations": ("none",), "states": ("none",), "both": ("none", "activations", "states")}


class Choice(NamedTuple):
    """One layout with its predicted step and the memory of the pipeline rank that needs most."""

    config: RunConfig
    step: StepTime
    memory: RankMemory
    tokens: float
    """Tokens/s of all GPUs."""
    mfu: float

    @property
    def key(self) -> tuple[float, str]:
        """What layouts are ranked by."""
        return self.step.seconds, layout_text(self.config)


class Found(NamedTuple):
    """The best layouts, fastest first, and how many others were dropped or not looked at, by reason."""

    choices: list[Choice]
    dropped: Counter[str]


def evaluate(question: Question, config: RunConfig) -> Choice:
    """A layout's Choice, whether it fits or not. ValueError for one that cannot work."""
    check(config)
    return _choice(question, model_of(question, config), most_memory(question, config))


def model_of(question: Question, config: RunConfig) -> StepModel:
    """The model of a layout's time."""
    return StepModel(config, question.device, question.software, exchange=question.exchange)


def range_of(question: Question, config: RunConfig) -> tuple[float, float]:
    """Tokens/s of a layout with the most and the least that published runs reached of the device's FLOP/s."""
    found = []
    for rate in sorted(question.device.fitted):
        changed = question._replace(device=question.device.scaled(rate / question.device.factor))
        found.append(
            config.train.global_batch_size * config.model.seq_length / model_of(changed, config).step().seconds
        )
    return found[0], found[1]


def _choice(question: Question, model: StepModel, memory: RankMemory) -> Choice:
    config, step = model.config, model.step()
    tokens = config.train.global_batch_size * config.model.seq_length / step.seconds
    return Choice(config, step, memory, tokens, mfu(config, step.seconds, question.device))


def most_memory(question: Question, config: RunConfig) -> RankMemory:
    """The memory of the pipeline rank that needs most."""
    ranks = different_ranks(config.model, config.parallel)
    return max((predicted_memory(config, rank, question.software) for rank in ranks), key=lambda plan: plan.total)


def refusal_of(question: Question, config: RunConfig) -> str | None:
    """Why a layout cannot work: a ValueError's sentence, or how much does not fit. None if it can."""
    if config.parallel.world_size != question.gpus:
        return f"the layout has {config.parallel.world_size} ranks for {question.gpus} GPUs"
    if crosses_nodes(question, config.parallel.tensor_parallel):
        node = question.device.gpus_per_node
        return f"some of the tp={config.parallel.tensor_parallel} ranks would not be in the same node of {node} GPUs"
    try:
        check(config)
    except ValueError as error:
        return str(error)
    need = most_memory(question, config).total
    if need > question.room:
        return (
            f"it is predicted to need {need / 1e9:.1f} GB of a device, and {question.room / 1e9:.1f} are free beside "
            f"{CONTEXT / 1e9:.0f} GB of the context and a margin of {MARGIN:.0%}"
        )
    return None


def least_seconds(question: Question, shape: Mapping[str, Any], layers: dict) -> float:
    """A lower bound of a step in any schedule: the mean rank's share of all layers and of the head."""
    key = tuple(shape[name] for name in ("tp", "cp", "ep", "microbatch", "recompute", "pack"))
    if key not in layers:
        model = LayerModel(with_layout(question.config, shape), question.device, question.software)
        again, n_experts = shape["recompute"], question.config.model.n_expert_layers
        packs = shape["pack"] == "all"
        dense = model.work(again, packs=packs).times(question.config.model.n_layers - n_experts) + model.head()
        whole = dense
        if n_experts:
            whole = dense + model.work(again, experts=True, packs=packs).times(n_experts)
        layers[key] = sum(terms.seconds for terms in whole)
    n_microbatches = question.config.train.global_batch_size // (shape["dp"] * shape["microbatch"])
    computing = n_microbatches * layers[key] / shape["pp"]
    if shape["dp"] * shape["cp"] == 1:
        return computing
    # whatever the ZeRO stage, gradients are reduced once, at best beside all computing
    sharded = model_of(question, with_layout(question.config, {**shape, "zero": 1}))
    size, nbytes = sharded.elements([range(sharded.model.n_layers)]), question.software.gradient_bytes / shape["pp"]
    reduced = sharded.collective(nbytes * (size.layers - size.exchanged))
    if size.exchanged:
        reduced += sharded.collective(nbytes * size.exchanged, experts=True)
    return max(computing, reduced / 2)


class _Entry(NamedTuple):
    """A shape or, if configs are given, one of its layouts by kind of offloading, by a lower bound of its seconds.

    number: the order of entries made. model: of a layout of the shape.
    """

    bound: float
    number: int
    shape: dict[str, Any]
    configs: dict[str, RunConfig]
    model: StepModel | None


def search(question: Question, top: int = 10) -> Found:
    """The `top` fastest layouts that fit, as if all were evaluated.

    Best first: a shape is opened, and a layout is simulated, only while its bound is below the slowest of the best.
    """
    dropped: Counter[str] = Counter()
    best: list[tuple[tuple[float, str], Choice]] = []
    layers: dict = {}
    entries = [
        _Entry(least_seconds(question, shape, layers), number, shape, {}, None)
        for number, shape in enumerate(shapes(question, dropped))
    ]
    heapq.heapify(entries)
    number = len(entries)
    while entries and not (len(best) == top and entries[0].bound > best[-1][0][0]):
        entry = heapq.heappop(entries)
        if entry.model is None:
            model = model_of(question, with_layout(question.config, entry.shape))
            for configs in _layouts(question, entry.shape, dropped):
                number += 1
                bound = least_offloaded(configs.values(), model)
                heapq.heappush(entries, _Entry(bound, number, entry.shape, configs, model))
            continue
        fits = list(fitting(question, entry.configs))
        if not fits:
            dropped["does not fit"] += 1
        for config, memory in fits:
            model = entry.model.variant(config)
            if len(best) < top or model.least() <= best[-1][0][0]:
                choice = _choice(question, model, memory)
                best.append((choice.key, choice))
                best.sort(key=lambda pair: pair[0])
                del best[top:]
    if entries:
        dropped["slower by a lower bound of their time"] += len(entries)
    return Found([choice for _, choice in best], dropped)


def least_offloaded(configs: Iterable[RunConfig], model: StepModel) -> float:
    """A lower bound of a layout's seconds with any of these kinds of offloading, least first.

    While activations move to the host, gradients can be reduced, so a rank that waits for neither may get faster.
    """
    first: dict[bool, RunConfig] = {}  # what else they offload only takes longer
    for config in configs:
        first.setdefault(config.parallel.offloads, config)
    return min(model.variant(config).least() for config in first.values())


def _layouts(question: Question, shape: Mapping[str, Any], dropped: Counter[str]) -> Iterator[dict[str, RunConfig]]:
    """All layouts of a shape that may fit: with each kind of offloading with which they may, least first."""
    found = list(variants(question, shape))
    if not found:
        dropped["too few microbatches or layers for any schedule, or another setting of the run forbids it"] += 1
    for values in found:
        every = {
            offload: with_layout(question.config, {**values, "offload": offload}) for offload in question.space.offload
        }
        configs = {offload: config for offload, config in every.items() if least_memory(config) <= question.room}
        if configs:
            yield configs
        else:
            dropped["does not fit"] += 1


def fitting(question: Question, configs: Mapping[str, RunConfig]) -> Iterator[tuple[RunConfig, RankMemory]]:
    """A layout with as little offloading as it needs to fit, and its memory. Two kinds may be as little."""
    found: set[str] = set()
    for offload, config in configs.items():
        if found.isdisjoint(LESS[offload]):
            memory = most_memory(question, config)
            if memory.total <= question.room:
                found.add(offload)
                yield config, memory


def every_layout(question: Question) -> Iterator[dict[str, Any]]:
    """The settings of every layout that divides, one after the other."""
    for shape in shapes(question, Counter()):
        for values in variants(question, shape):
            for offload in question.space.offload:
                yield {**values, "offload": offload}


def brute_force(question: Question, top: int = 10) -> list[Choice]:
    """The same as search, by evaluating everything: what tests compare it with."""
    fits: dict[str, dict[str, Choice]] = {}
    for values in every_layout(question):
        choice = evaluate(question, with_layout(question.config, values))
        if choice.memory.total <= question.room:
            fits.setdefault(str({**values, "offload": ""}), {})[values["offload"]] = choice
    needed = (
        choice
        for found in fits.values()
        for offload, choice in found.items()
        if not any(less in found for less in LESS[offload])
    )
    return sorted(needed, key=lambda choice: choice.key)[:top]


def nearest(question: Question, values: Mapping[str, Any]) -> Choice | None:
    """The fastest working layout that differs from the given one in fewest settings; None if there is none."""
    given = {**DEFAULTS, **values}
    groups: dict[int, list[RunConfig]] = {}
    for candidate in every_layout(question):
        config = with_layout(question.config, candidate)
        if least_memory(config) <= question.room:
            groups.setdefault(sum(given.get(key) != value for key, value in candidate.items()), []).append(config)
    for _, configs in sorted(groups.items(), key=lambda item: item[0]):
        fitting = (config for config in configs if most_memory(question, config).total <= question.room)
        if (found := min((evaluate(question, c) for c in fitting), key=lambda c: c.key, default=None)) is not None:
            return found
    return None

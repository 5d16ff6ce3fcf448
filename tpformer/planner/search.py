"""The search for the fastest layout that fits: candidates, why some are dropped, and the ranking.

Belongs here: what is searched and in which order. Times are step_time.py's, bytes rank_memory.py's; text is in
plan_report.py. All figures are predictions.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tpformer.config import SCHEDULES, RunConfig, check_config
from tpformer.parallel import Exchange, exchange_of

from .devices import Device
from .layer_time import LayerModel
from .layouts import DEFAULTS, OFFLOADS, layout_text, pack_of, with_layout
from .rank_memory import RankMemory, different_ranks, least_memory, predicted_memory
from .software import OURS, Software
from .step_time import StepModel, StepTime, mfu

CONTEXT = 1e9  # bytes of the CUDA context and libraries, as docs/planner.md says
MARGIN = 0.05  # the share of a device's memory that fragments and NCCL's buffers may take, apart from what is predicted
# what offloads less. Offloading takes time, so more of it is tried only if none of these fits
LESS = {"none": (), "activations": ("none",), "states": ("none",), "both": ("none", "activations", "states")}
# naive, GPipe and LoopedBFS idle as long as 1F1B and Interleaved1F1B, and keep more
SEARCHED_SCHEDULES = tuple(name for name in SCHEDULES if name not in ("naive", "GPipe", "LoopedBFS"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: the values that each of a layout's settings may have. None: any that divides."""

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    schedule: tuple[str, ...] = SEARCHED_SCHEDULES
    stages: tuple[int, ...] | None = None
    most_stages: int = 16
    """The most stages on a rank."""
    zero: tuple[int, ...] = (0, 1, 2, 3)
    microbatch: tuple[int, ...] = (1, 2, 4, 8, 16)
    recompute: tuple[str, ...] = ("none", "mlp", "full")
    offload: tuple[str, ...] = OFFLOADS
    pack: tuple[str, ...] | None = None
    """Members of PACKS. None: what the configuration says."""

    def has(self, **values: int) -> bool:
        """Whether these settings may have these values."""
        return all((allowed := getattr(self, key)) is None or value in allowed for key, value in values.items())


class Question(NamedTuple):
    """A model and batch (config), and what it is to run on."""

    config: RunConfig
    gpus: int
    device: Device
    software: Software = OURS
    space: Space = Space()
    exchange: Exchange = Exchange()

    @property
    def room(self) -> float:
        """Bytes of a device that a layout may be predicted to need."""
        return self.device.memory * (1 - MARGIN) - CONTEXT


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


def divisors(n: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [each for each in range(1, math.isqrt(n) + 1) if n % each == 0]
    return sorted({*small, *(n // each for each in small)})


def shapes(question: Question, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """tp, cp, pp, dp, microbatch, recompute and pack of all layouts that divide. Counts what does not."""
    model, space, batch = question.config.model, question.space, question.config.train.global_batch_size
    for t in divisors(question.gpus):
        if not space.has(tp=t):
            continue
        if crosses_nodes(question, t):
            dropped["tp does not divide a node"] += 1
            continue
        if model.n_heads % t:
            dropped["tp does not divide the heads"] += 1
            continue
        if (model.n_experts or 0) % t:
            dropped["tp does not divide the experts"] += 1
            continue
        for cp, p in itertools.product(divisors(question.gpus // t), divisors(question.gpus // t)):
            dp, rest = divmod(question.gpus, t * cp * p)
            if rest or not space.has(cp=cp, pp=p, dp=dp):
                continue
            if cp > 1 and model.seq_length % (2 * cp):
                dropped["2 cp does not divide a sample's tokens"] += 1
                continue
            if p > model.n_layers:
                dropped["fewer layers than pipeline ranks"] += 1
                continue
            for b in space.microbatch:
                if batch % (dp * b):
                    dropped["dp x microbatch does not divide the batch"] += 1
                    continue
                for recompute, pack in itertools.product(space.recompute, space.pack or (pack_of(question.config),)):
                    sizes = {"tp": t, "cp": cp, "pp": p, "dp": dp}
                    yield {**sizes, "microbatch": b, "recompute": recompute, "pack": pack}


def crosses_nodes(question: Question, tp: int) -> bool:
    """Whether some of the `tp` ranks that share a layer would be in different nodes."""
    node = question.device.gpus_per_node
    return tp > node or (question.gpus > node and node % tp > 0)


def schedules(question: Question, shape: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The schedules with which the run's settings allow a shape. Without a pipeline it is {}."""
    n_layers, pipeline = question.config.model.n_layers, shape["pp"]
    candidates: list[dict[str, Any]] = [{}] if pipeline == 1 else []
    for name in question.space.schedule if pipeline > 1 else ():
        kind = SCHEDULES[name]
        sizes = [kind.stages_per_rank]
        if kind.looped:
            most = min(question.space.most_stages, n_layers // pipeline)
            sizes = [v for v in range(2, most + 1) if n_layers % (pipeline * v) == 0 or v == 2]
        sizes = [v for v in sizes if question.space.has(stages=v)]
        candidates += [{"schedule": name, "stages": stages} for stages in sizes]
    for schedule in candidates:
        try:
            _check(with_layout(question.config, {**shape, **schedule}))
        except ValueError:
            continue
        yield schedule


def variants(question: Question, shape: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A shape in its schedules and ZeRO stages, in values that Layout allows, without offloading."""
    for schedule in schedules(question, shape):
        splits = bool(schedule) and SCHEDULES[schedule["schedule"]].splits_backward
        for zero in question.space.zero if shape["dp"] * shape["cp"] > 1 else (0,):
            if question.space.has(zero=zero) and (zero <= 1 or not splits):
                yield {**shape, **schedule, "zero": zero}


def _check(config: RunConfig) -> None:
    check_config(config, trains=False)
    exchange_of(config)


def evaluate(question: Question, config: RunConfig) -> Choice:
    """A layout's Choice, whether it fits or not. ValueError for one that cannot work."""
    _check(config)
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
        _check(config)
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
    key = shape["tp"], shape["cp"], shape["microbatch"], shape["recompute"], shape["pack"]
    if key not in layers:
        model = LayerModel(with_layout(question.config, shape), question.device, question.software)
        again, n_experts = shape["recompute"] != "none", question.config.model.n_expert_layers
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
    share = sharded.layer_elements / shape["pp"]
    return max(computing, sharded.collective(question.software.gradient_bytes * share) / 2)


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
        first.setdefault(config.parallel.offload_activations, config)
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

"""Seconds of an optimizer step, itemised: stages, the schedule's simulation, data parallelism, optimizer, host.

Belongs here: how the work of layers (layer_time.py) becomes a step. All is a prediction. Seconds throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from tpformer.config import RunConfig, recomputed_layers
from tpformer.distributed.algorithms import Link, all_reduce_seconds
from tpformer.kernels.cost import MOVED, RELEASE_SECONDS
from tpformer.models import GPTConfig
from tpformer.parallel import Action, split_stages

from .bubbles import Order, schedule_order, simulate
from .devices import Device
from .layer_time import LayerModel, Terms, Work
from .memory import microbatch_rows
from .roofline import stream_seconds
from .software import OURS, Software
from .states import elements

NOTHING: frozenset[str] = frozenset()
COMMUNICATION = ("tp",)
ROUNDS = 3  # of as many microbatches as ranks: then a schedule repeats itself, and more take proportionally longer


class StepTime(NamedTuple):
    """Seconds of a step by what the rank with the most to do spends them on."""

    compute: float
    tp: float
    """Tensor-parallel communication that no GEMM hides."""
    pp: float
    """Sending to the next stage, where ranks wait for it."""
    dp: float
    """Gathers and reductions over data-parallel ranks that no computation hides."""
    bubble: float
    optimizer: float
    host: float
    """What the host needs longer than the device to launch kernels."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self)


class StageTime(NamedTuple):
    """One microbatch in one stage."""

    work: Work
    host: dict[str, float]
    """Seconds of launching F, I and W."""
    sends: dict[str, float]
    """Seconds that F and I wait for their result to be sent."""

    def device(self, kind: str) -> float:
        """Seconds of computing and of exposed communication in the stage, of kind F, B, I or W."""
        terms = {"F": self.work[:1], "B": self.work[1:], "I": self.work[1:2], "W": self.work[2:]}[kind]
        return sum(sum(each.values()) for each in terms)

    def launching(self, kind: str) -> float:
        """Seconds that the host takes longer."""
        host = self.host["I"] + self.host["W"] if kind == "B" else self.host[kind]
        return max(0.0, host - self.device(kind))

    def sending(self, kind: str) -> float:
        """Seconds of a step's send."""
        return self.sends.get({"B": "I"}.get(kind, kind), 0.0)

    def seconds(self, kind: str) -> float:
        """All of it."""
        return self.device(kind) + self.launching(kind) + self.sending(kind)


@functools.lru_cache(maxsize=4096)
def stage_ranges(model: GPTConfig, by: str, n_stages: int) -> tuple[range, ...]:
    """The layers of each stage."""
    return tuple(split_stages(model.layer_costs(by), n_stages))


@functools.lru_cache(maxsize=256)
def cached_order(schedule: str, ranks: int, n_microbatches: int, stages_per_rank: int) -> Order:
    """schedule_order, remembered."""
    return schedule_order(schedule, ranks, n_microbatches, stages_per_rank)


class StepModel:
    """The times of a configuration on a device. train.dtype and vocab_size must be set.

    without: terms that are left out, which shows what they are worth; "bubble" leaves out the schedule.
    """

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        software: Software = OURS,
        without: frozenset[str] = NOTHING,
        all_reduce: str = "ring",
    ) -> None:
        self.config, self.model, self.layout = config, config.model.architecture, config.parallel
        self.device, self.software, self.without, self.all_reduce = device, software, without, all_reduce
        self.layer = LayerModel(config, device, software)
        self.m = config.n_microbatches
        self.ranges = stage_ranges(self.model, self.layout.pipeline_split, self.layout.n_stages)
        self.fast = Link(RELEASE_SECONDS, MOVED[1][1] * device.machine.link)
        self.slow = Link(device.network_latency, device.network)

    @functools.cached_property
    def stages(self) -> list[StageTime]:
        """The StageTime of every stage."""
        layout, model, software = self.layout, self.model, self.software
        chosen = recomputed_layers("full", layout.recompute_layers, 1, model.n_layers)
        plain, again = self.layer.work(False), self.layer.work(True)
        head = self.layer.head()
        found = []
        forward, backward = software.kernels
        for index, layers in enumerate(self.ranges):
            repeated = len(chosen.intersection(layers))
            work = again.times(repeated) + plain.times(len(layers) - repeated)
            if layers.start == 0:
                work = work + self._embedding()
            if layers.stop == model.n_layers:
                work = work + head
            times = software.host_kernel * len(layers)
            host = {"F": times * forward, "I": times * backward * 2 / 3, "W": times * backward / 3}
            found.append(StageTime(work.without(self.without), host, self._sends(index)))
        return found

    def _embedding(self) -> Work:
        """Rows of the table, read and written; their gradients are added in float32."""
        read = stream_seconds(self.layer.rows * self.model.hidden_size * 4, self.device)
        return Work(Terms(elementwise=read), Terms(), Terms(elementwise=3 * read))

    def _far(self, distance: int) -> bool:
        """Whether ranks that are so many apart are in different nodes."""
        return distance >= self.device.gpus_per_node

    def message(self) -> float:
        """Seconds of one microbatch's rows from a stage to the next."""
        layout = self.layout
        rows = microbatch_rows(self.model, layout, self.config.microbatch_size)
        scattered = self.software.scattered_pipeline and not layout.sequence_parallel
        nbytes = 2 * rows * self.model.hidden_size / (layout.tensor_parallel if scattered else 1)
        link = self.slow if self._far(layout.data_parallel * layout.tensor_parallel) else self.fast
        seconds = link.seconds(1, nbytes)
        if scattered and layout.tensor_parallel > 1:
            seconds += self.fast.seconds(1, nbytes * (layout.tensor_parallel - 1))
        return seconds

    def _sends(self, stage: int) -> dict[str, float]:
        if not self.software.blocking_pipeline or self.layout.pipeline_parallel == 1:
            return {}
        return {"F": self.message() * (stage < self.layout.n_stages - 1), "I": self.message() * (stage > 0)}

    def _timeline(self, n_microbatches: int) -> list[Action]:
        layout, stages = self.layout, self.stages
        order = cached_order(layout.pipeline_schedule, layout.pipeline_parallel, n_microbatches, layout.stages_per_rank)
        kinds = "FBIW" if layout.schedule.splits_backward else "FB"
        table = [{kind: stage.seconds(kind) for kind in kinds} for stage in stages]
        message = 0.0 if self.software.blocking_pipeline else self.message()
        return simulate(order, lambda step: table[step.stage][step.kind], message)

    def timeline(self, n_microbatches: int | None = None) -> list[Action]:
        """The predicted actions of one pipeline. n_microbatches: unset, the step's."""
        if self.layout.pipeline_parallel > 1:
            return self._timeline(n_microbatches or self.m)
        clock, actions = 0.0, []
        for index in range(n_microbatches or self.m):
            for kind in "FB":
                end = clock + self.stages[0].seconds(kind)
                actions.append(Action(0, 0, index, kind, clock, end))
                clock = end
        return actions

    def span(self) -> float:
        """Seconds from the first start to the last end on any rank.

        With many microbatches, from two smaller numbers of them: once the schedule repeats itself, each round of as
        many microbatches as ranks takes as long as the one before.
        """
        p, m = self.layout.pipeline_parallel, self.m
        if p == 1:
            return m * self.busy(0)
        if m <= (ROUNDS + 1) * p or "bubble" in self.without:
            return max(action.end for action in self._timeline(m)) if "bubble" not in self.without else self._most()
        few = ROUNDS * p + m % p
        ends = [max(action.end for action in self._timeline(n)) for n in (few - p, few)]
        return ends[1] + (m - few) / p * (ends[1] - ends[0])

    def _most(self) -> float:
        return self.m * max(self.busy(rank) for rank in range(self.layout.pipeline_parallel))

    def busy(self, rank: int) -> float:
        """Seconds of one microbatch in all stages of a pipeline rank."""
        return sum(self.stages[s].seconds("F") + self.stages[s].seconds("B") for s in self.layout.stages_of(rank))

    def step(self) -> StepTime:
        """The itemised step."""
        rank = max(range(self.layout.pipeline_parallel), key=self.busy)
        stages = [self.stages[index] for index in self.layout.stages_of(rank)]
        terms = sum((sum(stage.work, Terms()) for stage in stages), Terms())
        tp = self.m * sum(terms[name] for name in COMMUNICATION)
        compute = self.m * sum(terms.values()) - tp
        pp = self.m * sum(stage.sending("F") + stage.sending("B") for stage in stages)
        host = self.m * sum(stage.launching("F") + stage.launching("B") for stage in stages)
        bubble = self.span() - compute - tp - pp - host
        ends = [self.data_parallel(index) for index in self._ends()]
        return StepTime(compute, tp, pp, max(ends), bubble, max(map(self.optimizer, self._ends())), host)

    def _ends(self) -> Sequence[int]:
        """Pipeline ranks with most parameters: the first, the last, and one between them."""
        p = self.layout.pipeline_parallel
        return sorted({0, p // 2, p - 1})

    def elements(self, rank: int) -> float:
        """Parameters of a pipeline rank's stages on one tensor-parallel rank."""
        stages = [self.ranges[index] for index in self.layout.stages_of(rank)]
        return elements(self.model, stages, self.layout.tensor_parallel).total

    def optimizer(self, rank: int) -> float:
        """Seconds of the update of a rank's shard."""
        if "optimizer" in self.without:
            return 0.0
        shards = self.layout.data_parallel_shard if self.layout.zero else 1
        return stream_seconds(self.software.optimizer * self.elements(rank) / shards, self.device)

    def _collective(self, nbytes: float, replicas: bool = False) -> float:
        """Seconds of an all-reduce over dp_shard's ranks, or over its replicas; a gather or scatter takes half."""
        layout = self.layout
        ranks = layout.data_parallel_replicate if replicas else layout.data_parallel_shard
        distance = layout.tensor_parallel * (layout.data_parallel_shard if replicas else 1)
        inside = max(1, min(ranks, self.device.gpus_per_node // distance))
        while ranks % inside:
            inside -= 1
        return all_reduce_seconds(self.all_reduce, nbytes, inside, ranks // inside, self.fast, self.slow)

    def data_parallel(self, rank: int) -> float:
        """Seconds of gathers and reductions of a rank that no computation hides."""
        layout, software, elements_ = self.layout, self.software, self.elements(rank)
        if "dp" in self.without:
            return 0.0
        seconds = self._tied(rank)
        if layout.data_parallel == 1:
            return seconds
        stages = [self.stages[index] for index in layout.stages_of(rank)]
        units = sum(len(self.ranges[index]) for index in layout.stages_of(rank)) + 1
        forward = sum(stage.seconds("F") for stage in stages)
        backward = sum(stage.seconds("B") for stage in stages)
        gradients = self._collective(software.gradient_bytes * elements_) / 2
        gathers = self._collective(2.0 * elements_) / 2 if layout.zero else 0.0
        replicas = self._collective(software.gradient_bytes * elements_ / layout.data_parallel_shard, True)
        if not layout.zero:
            gradients *= 2
        window = self._window(len(stages))
        of_forward = self.m if layout.zero == 3 else 1
        of_backward = self.m if layout.zero > 1 else 1
        if layout.zero == 3:  # gathered in the forward and again in the backward
            seconds += of_forward * _exposed(gathers, forward, units)
            return seconds + of_backward * _exposed(gathers + gradients, backward, units) + replicas
        seconds += _exposed(gathers, window * forward, units)
        if of_backward > 1:
            return seconds + of_backward * _exposed(gradients, backward, units) + replicas
        return seconds + _exposed(gradients + replicas, window * backward, units)

    def _window(self, stages: int) -> float:
        """Microbatches beside whose computing a step's only reduction runs."""
        p = self.layout.pipeline_parallel
        if self.software.data_overlap == "none" or (self.software.data_overlap == "backward" and p > 1):
            return 0.0
        return 1.0 if p == 1 else min(self.m, p) * (1 - 1 / stages)

    def _tied(self, rank: int) -> float:
        """Seconds in which the first and the last stage add up the gradients of a tied table."""
        layout, p = self.layout, self.layout.pipeline_parallel
        if p == 1 or not self.model.tie_embeddings or rank not in (0, p - 1):
            return 0.0
        table = (self.model.vocab_size or 0) * self.model.hidden_size / layout.tensor_parallel
        link = self.slow if self._far((p - 1) * layout.data_parallel * layout.tensor_parallel) else self.fast
        return link.seconds(2, self.software.gradient_bytes * table / (layout.data_parallel_shard or 1))


def _exposed(communication: float, window: float, units: int) -> float:
    """Seconds of communication, in `units` parts, beside a window of computing; the last part has nothing beside it."""
    return max(communication / units, communication - window)


def mfu(config: RunConfig, seconds: float, device: Device) -> float:
    """Model FLOPs of a step over what the ranks could do by the data sheet."""
    tokens = config.train.global_batch_size * config.model.seq_length
    return config.model.flops_per_token * tokens / (seconds * config.parallel.world_size * device.machine.peak_flops)

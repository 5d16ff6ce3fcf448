"""Seconds of an optimizer step, itemised: stages, the schedule's simulation, data parallelism, optimizer, host.

Belongs here: how the work of layers (layer_time.py) becomes a step. All is a prediction. Seconds throughout.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any, TypeVar

from tpformer.config import LayerKeep, RunConfig
from tpformer.distributed.links import Link
from tpformer.parallel import Action, Exchange, exchange_named

from .bubbles import simulate
from .costs import model_flops_utilization
from .devices import Device
from .gathers import InBlocks, gather_bytes, in_blocks, pass_seconds
from .layer_time import LayerModel
from .memory import microbatch_rows
from .muon import STEP_BYTES, muon_seconds
from .rank_memory import cached_order, different_ranks, few_microbatches, predicted_stage
from .roofline import activation_seconds, stream_seconds
from .software import OURS, Software
from .stage_time import StageTime, StepTime
from .states import Elements, elements, exchanging_ranks
from .terms import PassSeconds, Terms
from .units import stage_ranges

NOTHING: frozenset[str] = frozenset()
T = TypeVar("T")


class StepModel:
    """The times of a configuration on a device. train.dtype and vocab_size must be set.

    without: terms that are left out, which shows what they are worth; "bubble" leaves out the schedule.
    exchange: whose all-reduce data parallelism takes, where the configuration names none for its replicas.
    """

    def __init__(
        self,
        config: RunConfig,
        device: Device,
        software: Software = OURS,
        without: frozenset[str] = NOTHING,
        exchange: Exchange | None = None,
    ) -> None:
        self.config, self.model, self.layout = config, config.model, config.parallel
        self.exchange, own = exchange or Exchange(), exchange_named(self.layout.exchange)
        if own.changes_losses or own.takes_steps:
            raise ValueError(f"parallel.exchange={self.layout.exchange!r} has no model of its time: plan without it")
        self.own = self.exchange if self.layout.exchange == type(self.layout).exchange else own
        self.device, self.software, self.without = device, software, without
        self.layer = LayerModel(config, device, software)
        self.m = config.n_microbatches
        self.ranges = stage_ranges(config.model, self.layout.pipeline_split, self.layout.n_stages)
        self.fast = Link(*device.inside)
        self.slow = Link(device.network_latency, device.network)
        self._shared: dict[tuple, Any] = {}

    def variant(self, config: RunConfig) -> StepModel:
        """The model of another schedule, ZeRO stage or offloading of the same shape, which shares what is equal."""
        other = StepModel(config, self.device, self.software, self.without, self.exchange)
        other._shared = self._shared
        return other

    def _once(self, name: str, compute: Callable[[], T]) -> T:
        """compute(), once for all variants with this schedule, and with the same ways of keeping layers."""
        layout = self.layout
        key = name, layout.pipeline_schedule, layout.stages_per_rank, layout.kept(self.model.n_layers)
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def least(self) -> float:
        """A lower bound of the step's seconds, without a simulation."""
        parts = self.data_parallel, self.optimizer, self.moving
        seconds = self.least_span + sum(max(map(part, self._ranks())) for part in parts)
        return seconds * (1 - 1e-12)  # step() adds up in another order

    @property
    def least_span(self) -> float:
        """A lower bound of span: no rank begins before its first input is there,
        and below it the gradients of its last microbatch have a way to go, unless weight gradients come last."""
        return self._once("least span", self._least_span)

    def _least_span(self) -> float:
        layout, before = self.layout, [0.0]
        for stage in self.stages:
            drain = 0.0 if layout.schedule.splits_backward else stage.seconds("B")
            before.append(before[-1] + stage.seconds("F") + drain)
        ranks = range(layout.pipeline_parallel)
        return max(before[min(layout.stages_of(rank))] + self.m * self.busy(rank) for rank in ranks)

    @property
    def stages(self) -> list[StageTime]:
        """The StageTime of every stage. Stages that are alike share one."""
        return self._once("stages", self._stages)

    def _stages(self) -> list[StageTime]:
        ways, last = self.layout.kept(self.model.n_layers), len(self.ranges) - 1
        different: dict[tuple, StageTime] = {}
        found = []
        for index, layers in enumerate(self.ranges):
            kinds = Counter((ways[layer], self.model.has_experts(layer)) for layer in layers)
            key = frozenset(kinds.items()), ways[layers[-1]].offload, index == 0, index == last
            if key not in different:
                different[key] = self._stage(index, kinds)
            found.append(different[key])
        return found

    def _stage(self, index: int, kinds: Mapping[tuple[LayerKeep, bool], int]) -> StageTime:
        """kinds: how many layers there are by what they keep, and whether they have experts."""
        software, layout = self.software, self.layout
        work = functools.reduce(add, (self._layer(*kind).times(number) for kind, number in kinds.items()))
        if index == 0:
            work = work + self._embedding()
        if index == layout.n_stages - 1:
            work = work + self.layer.head()
        n_layers, moved = sum(kinds.values()), 0.0
        routed = sum(number for (_, experts), number in kinds.items() if experts)
        if any(way.offload for way, _ in kinds):
            moved = predicted_stage(self.config, index).offloaded / self.device.host
        forward, backward = (
            software.host_kernel * (n_layers * each + routed * more + (n_layers - routed) * dense + routed * blocks)
            for each, more, dense, blocks in zip(
                software.kernels, software.expert_kernels, *map(self.layer.launches, (False, True)), strict=True
            )
        )
        host = {"F": max(forward, moved), "I": max(backward * 2 / 3, moved), "W": backward / 3}
        return StageTime(work.without(self.without), host, self._sends(index))

    def _layer(self, way: LayerKeep, experts: bool) -> PassSeconds:
        """A layer's work. Moving to the host and back is a stage's."""
        key = "layer", way.recompute, way.pack, experts
        if key not in self._shared:
            self._shared[key] = self.layer.work(way.recompute, experts=experts, packs=way.pack)
        return self._shared[key]

    def _embedding(self) -> PassSeconds:
        """Rows of the table, read and written; their gradients are added in float32."""
        read = activation_seconds(self.layer.rows * self.model.hidden_size * 4, self.device)
        return PassSeconds(Terms(elementwise=read), Terms(), Terms(elementwise=3 * read))

    @property
    def _between(self) -> Link:
        """The slowest link between stages: pipelines reach from the first rank to the last, over all nodes."""
        return self.slow if self.layout.world_size > self.device.gpus_per_node else self.fast

    def message(self) -> float:
        """Seconds of one microbatch's rows from a stage to the next."""
        layout = self.layout
        rows = microbatch_rows(self.model, layout, self.config.microbatch_size)
        scattered = self.software.scattered_pipeline and not layout.sequence_parallel
        nbytes = self.device.itemsize * rows * self.model.hidden_size / (layout.tensor_parallel if scattered else 1)
        seconds = self._between.seconds(1, nbytes)
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

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end on any rank.

        With many microbatches, from two smaller numbers of them: once the schedule repeats itself, each round of as
        many microbatches as ranks takes as long as the one before. Where messages are slow, that takes many rounds.
        """
        return self._once("span", self._span)

    def _span(self) -> float:
        p, m = self.layout.pipeline_parallel, self.m
        if p == 1 or "bubble" in self.without:
            return self._most()
        slow = 2 * self.message() > min(stage.seconds("F") for stage in self.stages)
        few = m if slow else few_microbatches(self.layout.pipeline_schedule, p, m)
        end = max(action.end for action in self._timeline(few))
        if few == m:
            return end
        more = (m - few) / p * (end - max(action.end for action in self._timeline(few - p)))
        return max(self.least_span, end + more)  # in uneven stages the first rounds may be faster than later ones

    def _most(self) -> float:
        return self.m * max(self.busy(rank) for rank in range(self.layout.pipeline_parallel))

    def busy(self, rank: int) -> float:
        """Seconds of one microbatch in all stages of a pipeline rank."""
        stages = self.stages
        return sum(stages[s].seconds("F") + stages[s].seconds("B") for s in self.layout.stages_of(rank))

    def step(self) -> StepTime:
        """The itemised step."""
        rank = max(range(self.layout.pipeline_parallel), key=self.busy)
        stages = [self.stages[index] for index in self.layout.stages_of(rank)]
        terms = sum((sum(stage.work, Terms()) for stage in stages), Terms())
        tp, cp, ep = (self.m * terms[name] for name in ("tp", "cp", "ep"))
        compute = self.m * terms.seconds - tp - cp - ep
        pp = self.m * sum(stage.sending("F") + stage.sending("B") for stage in stages)
        host = self.m * sum(stage.launching("F") + stage.launching("B") for stage in stages)
        bubble = max(0.0, self.span - compute - tp - cp - ep - pp - host)  # below 0 only by rounding
        dp, optimizer, moving = (
            max(map(part, self._ranks())) for part in (self.data_parallel, self.optimizer, self.moving)
        )
        return StepTime(compute, tp, cp, ep, pp, dp, bubble, optimizer, host + moving)

    def _ranks(self) -> Sequence[int]:
        """Pipeline ranks among which is the one with most parameters."""
        return self._once("ranks", lambda: different_ranks(self.model, self.layout))

    def elements(self, stages: Sequence[range]) -> Elements:
        """Parameters of some stages, given by their layers, on one tensor-parallel rank."""
        return elements(self.model, stages, self.layout.tensor_parallel, exchanging_ranks(self.layout))

    def of_rank(self, rank: int) -> Elements:
        """Parameters of a pipeline rank's stages on one tensor-parallel rank."""
        return self.elements([self.ranges[index] for index in self.layout.stages_of(rank)])

    def optimizer(self, rank: int) -> float:
        """Seconds of the update of a rank's shard."""
        if "optimizer" in self.without:
            return 0.0
        size, muon = self.of_rank(rank), 0.0
        nbytes = self.software.optimizer * size.shard(self.layout)
        if self.config.optimizer.name == "muon":
            nbytes += (STEP_BYTES - self.software.optimizer) * size.matrix_shard(self.layout)
            stages = [self.ranges[index] for index in self.layout.stages_of(rank)]
            muon = muon_seconds(self.config, stages, self.device)
        if self.layout.cpu_offload:  # a guess: a GPU's share of its host's memory is as fast as the way to it
            return nbytes / self.device.host + muon
        return stream_seconds(nbytes, self.device) + muon

    def moving(self, rank: int) -> float:
        """Seconds in which cpu_offload moves float32 parameters to the device and gradients back, all exposed."""
        layout = self.layout
        if not layout.cpu_offload:
            return 0.0
        gathers = 2 * self.m if layout.zero == 3 else 1
        return 4 * (gathers + 1) * self.of_rank(rank).shard(layout) / self.device.host

    def collective(self, nbytes: float, replicas: bool = False, experts: bool = False) -> float:
        """Seconds of an all-reduce over the ranks that share, or over replicas; a gather or scatter takes half.

        experts: of the parameters of experts that exchange tokens, which other ranks share.
        """
        layout = self.layout
        together, shards, ranks = layout.tensor_parallel, layout.shards, layout.replicas
        if experts:
            together, shards, ranks = layout.expert_parallel or 1, layout.expert_shards, layout.expert_replicas
        place = self.device.spread(*((ranks, together * shards) if replicas else (shards, together)))
        exchange = self.own if replicas else self.exchange
        return exchange.seconds(nbytes, *place, self.fast, self.slow)

    def data_parallel(self, rank: int) -> float:
        """Seconds of gathers and reductions of a rank that no computation hides."""
        layout, software = self.layout, self.software
        if "dp" in self.without:
            return 0.0
        seconds = self._tied(rank)
        if layout.copies == 1 and not layout.copies_experts:
            return seconds
        every = self.stages
        stages = [every[index] for index in layout.stages_of(rank)]
        units = sum(len(self.ranges[index]) for index in layout.stages_of(rank)) + 1
        forward = sum(stage.seconds("F") for stage in stages)
        backward = sum(stage.seconds("B") for stage in stages)
        layers = [layer for index in layout.stages_of(rank) for layer in self.ranges[index]]
        gathers, gradients, replicas = self._reductions(self.of_rank(rank), units, in_blocks(self.config, layers))
        window = self._window(len(stages))
        of_forward = self.m if layout.zero == 3 else 1
        of_backward = self.m if layout.zero > 1 else 1
        if software.data_overlap == "none":
            forward = backward = 0.0
        if layout.zero == 3:  # gathered in the forward and again in the backward
            seconds += of_forward * _exposed(gathers, forward, units)
            return seconds + of_backward * _exposed(gathers + gradients, backward, units) + replicas
        seconds += _exposed(gathers, window * forward, units)
        if of_backward > 1:
            return seconds + of_backward * _exposed(gradients, backward, units) + replicas
        return seconds + _exposed(gradients + replicas, window * backward, units)

    def _reductions(self, size: Elements, units: int, blocks: InBlocks) -> tuple[float, float, float]:
        """Seconds of a gather of all parameters, of the gradients' reduction, and of their sum over replicas.

        blocks: what is gathered in blocks, behind which passes are a part of the gather.
        Each layer is gathered and reduced on its own, its experts apart from the rest where they exchange tokens.
        """
        layout, found = self.layout, [0.0, 0.0, 0.0]
        families = [(size.total - size.exchanged, units, layout.shards, False, blocks.others)]
        if size.exchanged:
            routed = sum(each > 0 for each in size.experts)
            families.append((size.exchanged, routed, layout.expert_shards, True, blocks.exchanged))
        for whole, number, shards, experts, of_blocks in families:
            gradient = self.software.gradient_bytes * whole / number
            copy = gather_bytes(whole, of_blocks, self.device.itemsize) / number
            if layout.zero:
                found[0] += number * self.collective(copy, experts=experts) / 2 + pass_seconds(of_blocks, self.device)
                found[1] += number * self.collective(gradient, experts=experts) / 2
            found[2] += number * self.collective(gradient / shards, True, experts)
        return found[0], found[1], found[2]

    def _window(self, stages: int) -> float:
        """Microbatches beside whose computing a step's only reduction runs."""
        p = self.layout.pipeline_parallel
        if self.software.data_overlap == "backward" and p > 1:
            return 0.0
        return 1.0 if p == 1 else min(self.m, p) * (1 - 1 / stages)

    def _tied(self, rank: int) -> float:
        """Seconds in which the first and the last stage add up the gradients of a tied table."""
        layout, p = self.layout, self.layout.pipeline_parallel
        if p == 1 or not self.model.tie_embeddings or rank not in (0, p - 1):
            return 0.0
        table = (self.model.vocab_size or 0) * self.model.hidden_size / layout.tensor_parallel
        return self._between.seconds(2, self.software.gradient_bytes * table / layout.shards)


def _exposed(communication: float, window: float, units: int) -> float:
    """Seconds of communication, in `units` parts, beside a window of computing; the last part has nothing beside it."""
    return max(communication / units, communication - window)


def mfu(config: RunConfig, seconds: float, device: Device) -> float:
    """model_flops_utilization of a step of so many seconds, by the data sheet's peak."""
    tokens, peak = config.train.global_batch_size * config.model.seq_length, device.machine.peak_flops
    return model_flops_utilization(config.model.architecture, tokens, seconds, config.parallel.world_size, peak)

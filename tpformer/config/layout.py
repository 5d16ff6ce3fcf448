"""Layout: how a run's ranks share its model and its batch, and the pairs of settings that are refused.

Belongs here: the [parallel] settings, what follows from them alone, and their checks. No tensors, no process groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tpformer.words import shown

from .checks import check_choice
from .keep import RECOMPUTE, LayerKeep, budget_bytes, kept_layers
from .ranges import check_ranges

TRANSPORTS = ("auto", "sequential", "pipelined", "fused")


class ScheduleKind(NamedTuple):
    """What a pipeline schedule asks of the layout."""

    torch_name: str
    """Its name in torch.distributed.pipelining."""
    stages_per_rank: int
    """Default number of stages on a rank. Other numbers are possible only if `looped`."""
    looped: bool = False
    """A rank may have any number of stages: stage s is on rank s % p."""
    v_shaped: bool = False
    """Rank s has the stages s and 2p - 1 - s: the first and the last stage share a rank."""
    splits_backward: bool = False
    """Weight gradients are computed later than input gradients."""


SCHEDULES = {
    "naive": ScheduleKind("GPipe", 1),  # one microbatch: the stages work one after the other
    "GPipe": ScheduleKind("GPipe", 1),
    "1F1B": ScheduleKind("1F1B", 1),
    "LoopedBFS": ScheduleKind("LoopedBFS", 2, looped=True),
    "Interleaved1F1B": ScheduleKind("Interleaved1F1B", 2, looped=True),
    "InterleavedZeroBubble": ScheduleKind("InterleavedZeroBubble", 2, looped=True, splits_backward=True),
    "ZBVZeroBubble": ScheduleKind("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleKind("DualPipeV", 2, v_shaped=True, splits_backward=True),
}
CHOICES: dict[str, Iterable[str]] = {
    "transport": TRANSPORTS,
    "pipeline_schedule": SCHEDULES,
    "pipeline_split": ("parameters", "time"),
    "reduce_dtype": ("float32", "bfloat16"),
    "zero_gather": ("16", "fp8"),
    "recompute": RECOMPUTE,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """[parallel]: how the model is laid out over ranks."""

    tensor_parallel: int = 1
    """Ranks that share each layer."""
    sequence_parallel: bool = True
    """Keep norms, residuals and dropout on sequence shards (with tensor_parallel > 1)."""
    transport: str = "auto"
    """How the linears communicate between tensor-parallel ranks: auto, sequential, pipelined or fused."""
    transport_table: str = ""
    """A JSON file of times that the bench measured, by which auto chooses. Empty: auto uses its performance model."""
    pipeline_parallel: int = 1
    """Ranks among which the layers are divided."""
    pipeline_schedule: str = "1F1B"
    """naive, GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV."""
    pipeline_stages_per_rank: int | None = None
    """Stages on a rank. Unset: 2 for looped and V-shaped schedules, else 1."""
    pipeline_split: str = "parameters"
    """What the stages are balanced by, embedding and head included: parameters, or time (modelled FLOPs)."""
    data_parallel_replicate: int = 1
    """Groups of ranks that hold the same shards and train on different samples."""
    data_parallel_shard: int = 1
    """Ranks that train on different samples and share, with context-parallel ones, the states of zero_stage."""
    context_parallel: int = 1
    """Ranks that share the tokens of each sample, for samples that are too long for one."""
    expert_parallel: int | None = None
    """Ranks that share the experts and exchange tokens, whatever else they share. Unset: the tensor-parallel ones."""
    zero_stage: int | None = None
    """0 shares nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Unset: 1 if several ranks share."""
    reduce_dtype: str = "float32"
    """float32 or bfloat16: how 16-bit runs add up gradients over data-parallel ranks (ZeRO 0, 1: and microbatches)."""
    zero_gather: str = "16"
    """fp8: with train.precision = "fp8" ZeRO gathers the linears' weights in blocks of e4m3: half of the bytes, and the
    same numbers, which were to be quantised anyway. 16: in train.dtype."""
    exchange: str = "library"
    """How gradients of replicas become one: library, or a lesson by its name and options (docs/data_parallel.md)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update there (FSDP2's CPU offload)."""
    recompute: str = "none"
    """What the backward of a layer computes again instead of keeping: none, mlp or full."""
    recompute_layers: str = ""
    """The layers to recompute: indexes or slices as in Python, such as "0:8", "::2" or "0,5,-1". Empty: all."""
    recompute_interval: int = 1
    """With recompute = "full": consecutive layers of a region. Only a region's input is kept."""
    pack_activations: bool = False
    """Keep bfloat16 activations in 12.1 bits a value until the backward, which gets the same bits."""
    pack_layers: str = ""
    """With pack_activations: the layers that pack, in the notation of recompute_layers. Empty: all."""
    offload_activations: bool = False
    """Keep what the backward of the layers needs in pinned host memory, and fetch it before it is used."""
    keep: str = ""
    """In place of the six keys above: what each layer keeps, such as "15*offload,9*mlp+pack,8*pack" (memory.md)."""
    memory_budget: str = ""
    """Memory that a rank may take, such as 40GiB or 80% of its GPU. The fastest `keep` that fits is chosen if unset."""

    def kept(self, n_layers: int) -> tuple[LayerKeep, ...]:
        """What each layer of a model keeps. ValueError for keys that contradict each other, and unknown layers."""
        return _kept(self, n_layers)

    @property
    def data_parallel(self) -> int:
        """Ranks that train on different samples."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def copies(self) -> int:
        """Ranks that compute with the same parameters on other tokens."""
        return self.data_parallel * self.context_parallel

    @property
    def replicas(self) -> int:
        """Groups of these ranks with equal shards: all of them are, if nothing is shared."""
        return self.copies if self.zero == 0 else self.data_parallel_replicate

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO divides states."""
        return self.copies // self.replicas

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold the same layers, whole or in parts."""
        return self.copies * self.tensor_parallel

    @property
    def expert_replicas(self) -> int:
        """With expert_parallel: groups of ranks with equal shards of all experts."""
        assert self.expert_parallel is not None
        groups = self.stage_ranks // self.expert_parallel
        return groups if self.zero == 0 else min(groups, self.data_parallel_replicate)

    @property
    def expert_shards(self) -> int:
        """With expert_parallel: ranks among which ZeRO divides the states of the same experts."""
        assert self.expert_parallel is not None
        return self.stage_ranks // self.expert_parallel // self.expert_replicas

    @property
    def shares_layers(self) -> bool:
        """Whether ranks send one another rows, or keys and values, within a layer."""
        return max(self.tensor_parallel, self.context_parallel, self.expert_parallel or 1) > 1

    @property
    def copies_experts(self) -> bool:
        """Whether several ranks exchange tokens for the same experts, so that gradients of these add up."""
        return self.expert_parallel is not None and self.expert_parallel < self.stage_ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline_parallel * self.copies * self.tensor_parallel

    @property
    def zero(self) -> int:
        """The ZeRO stage in effect."""
        sharing = self.data_parallel_shard * self.context_parallel
        return int(sharing > 1) if self.zero_stage is None else self.zero_stage

    @property
    def keeps_weights(self) -> bool:
        """Whether a rank has all of its weights from their first use in a step to their last. ZeRO stage 3 frees and
        gathers them in between."""
        return self.zero < 3

    @property
    def schedule(self) -> ScheduleKind:
        """The entry of pipeline_schedule in SCHEDULES."""
        return SCHEDULES[self.pipeline_schedule]

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on a rank; 1 without a pipeline."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_stages_per_rank or self.schedule.stages_per_rank

    @property
    def n_stages(self) -> int:
        """Pipeline stages on all ranks."""
        return self.pipeline_parallel * self.stages_per_rank

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        if self.schedule.v_shaped and self.pipeline_parallel > 1:
            return [pipeline_rank, self.n_stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.n_stages, self.pipeline_parallel))

    @property
    def packs(self) -> bool:
        """Whether some layer packs what it keeps."""
        return self.pack_activations or "pack" in self.keep

    @property
    def offloads(self) -> bool:
        """Whether some layer's activations wait in host memory."""
        return self.offload_activations or "offload" in self.keep

    def check(self) -> None:
        """ValueError, with the numbers and the remedy, for settings that contradict each other."""
        check_ranges("parallel", self)
        self._check_budget()
        for name, choices in CHOICES.items():
            check_choice(f"parallel.{name}", getattr(self, name), choices)
        self._check_zero()
        self._check_experts()
        if self.pipeline_parallel > 1:
            self._check_stages_per_rank()

    def _check_budget(self) -> None:
        if not self.memory_budget:
            return
        budget_bytes(self.memory_budget, 1.0)
        for name in KEEP_KEYS[1:]:  # beside keep nothing is chosen
            if (value := getattr(self, name)) != getattr(Layout, name):
                raise ValueError(
                    f"parallel.memory_budget={shown(self.memory_budget)} chooses what layers keep, and "
                    f"parallel.{name}={shown(value)} says it: leave one of the two out"
                )

    def _check_zero(self) -> None:
        shard, replicate = self.data_parallel_shard, self.data_parallel_replicate
        if self.zero == 0 and shard > 1:
            raise ValueError(
                f"parallel.zero_stage=0 shares nothing, but parallel.data_parallel_shard={shard}: set "
                f"data_parallel_replicate={replicate * shard} and data_parallel_shard=1, or zero_stage to 1, 2 or 3"
            )
        if self.zero > 0 and self.shards == 1 and replicate > 1:
            raise ValueError(
                f"parallel.zero_stage={self.zero} shares over data_parallel_shard, which is 1: set "
                f"data_parallel_shard={replicate} and data_parallel_replicate=1 (or a hybrid whose product is "
                f"{replicate})"
            )
        if self.zero > 1 and self.pipeline_parallel > 1 and self.schedule.splits_backward:
            # torch's own split of the backward gives wrong gradients, without an error, once parameters are resharded
            raise ValueError(
                f"parallel.zero_stage={self.zero} cannot be combined with pipeline_schedule={self.pipeline_schedule}: "
                f"the schedule computes the weight gradients of a microbatch after other microbatches, so gradients "
                f"and parameters cannot be sharded again in between; set zero_stage=1, or a schedule with whole "
                f"backwards such as 1F1B or Interleaved1F1B"
            )

    def _check_experts(self) -> None:
        ep, tp = self.expert_parallel, self.tensor_parallel
        if ep is None:
            return
        if tp > 1 and not self.sequence_parallel:
            raise ValueError(
                f"parallel.expert_parallel={ep} exchanges tokens of which each rank has its own, and "
                f"tensor_parallel={tp} ranks without sequence_parallel have the same: set sequence_parallel = true, or "
                f"leave expert_parallel out"
            )
        if self.exchange != Layout.exchange:
            raise ValueError(
                f"parallel.exchange={shown(self.exchange)} adds up gradients over one kind of replicas, but "
                f"with parallel.expert_parallel={ep} experts have other replicas than the rest of the model: leave one "
                f"of the two keys out"
            )
        inner, outer = self.stage_ranks // self.data_parallel_replicate, self.data_parallel_replicate
        fitting = [n for n in range(1, inner + 1) if inner % n == 0]
        fitting += [inner * n for n in range(2, outer + 1) if outer % n == 0]
        if ep not in fitting:
            raise ValueError(
                f"parallel.expert_parallel={ep} ranks cannot be made of data_parallel_replicate={outer} groups of "
                f"data_parallel_shard * context_parallel * tensor_parallel = {self.data_parallel_shard} * "
                f"{self.context_parallel} * {tp} = {inner} ranks: it has to divide {inner}, or to be {inner} times "
                f"a divisor of {outer}; choose it from {fitting}"
            )

    def _check_stages_per_rank(self) -> None:
        name, given, kind = self.pipeline_schedule, self.pipeline_stages_per_rank, self.schedule
        if given is not None and not kind.looped and given != kind.stages_per_rank:
            raise ValueError(
                f"parallel.pipeline_stages_per_rank={given}, but {name} has {kind.stages_per_rank} on each rank: leave "
                f"it unset, or choose LoopedBFS, Interleaved1F1B or InterleavedZeroBubble"
            )

    def check_pipeline(self, n_layers: int, n_microbatches: int, batch: str = "train.global_batch_size") -> None:
        """ValueError for a number of layers or microbatches that the schedule cannot run; never without a pipeline.

        batch: the key that is to be raised where there are too few microbatches.
        """
        p, stages, name = self.pipeline_parallel, self.n_stages, self.pipeline_schedule
        if p == 1:
            return
        if n_layers < stages:
            raise ValueError(
                f"model.n_layers={n_layers} cannot be divided among {stages} stages (pipeline_parallel={p} x "
                f"{self.stages_per_rank} per rank): every stage needs a layer; lower pipeline_parallel or "
                f"pipeline_stages_per_rank"
            )
        if name == "naive":
            if n_microbatches != 1:
                raise ValueError(
                    f"parallel.pipeline_schedule=naive runs one microbatch, not {n_microbatches}: choose GPipe or "
                    f"1F1B, which run several"
                )
            return
        least = stages if name == "DualPipeV" else p
        if n_microbatches < least:
            raise ValueError(
                f"parallel.pipeline_schedule={name} needs at least {least} microbatches for {stages} stages on {p} "
                f"ranks, and there are {n_microbatches}: lower train.microbatch_size or raise {batch}"
            )
        rounds = n_microbatches // p
        if name in ("Interleaved1F1B", "InterleavedZeroBubble") and n_microbatches % rounds:
            raise ValueError(
                f"parallel.pipeline_schedule={name} runs its microbatches in {rounds} equal rounds (microbatches // "
                f"pipeline_parallel = {n_microbatches} // {p}): make their number a multiple of {p}"
            )


KEEP_KEYS = (
    "keep",
    *("recompute", "recompute_layers", "recompute_interval", "pack_activations", "pack_layers", "offload_activations"),
)  # which say what layers keep; layers.keep takes them, too


@lru_cache(maxsize=4096)
def _kept(layout: Layout, n_layers: int) -> tuple[LayerKeep, ...]:
    return kept_layers(n_layers, **{name: getattr(layout, name) for name in KEEP_KEYS})

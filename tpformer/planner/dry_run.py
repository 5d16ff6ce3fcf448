"""Count what ranks of a run hold and send, without its machines: the real model runs on fake tensors in one process.

Belongs here: a process group without other processes, the model of one rank, and the microbatches and optimizer step
that are counted. Counters are in counting.py, formulas in memory.py and states.py, text in report.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tpformer.config import RunConfig
from tpformer.distributed.mesh import AXES
from tpformer.layers import SelfAttention
from tpformer.layers.router import routers
from tpformer.models import GPT
from tpformer.ops import WeightGradientQueue, default_chunk_tokens
from tpformer.parallel import exchange_named, prepare_backward, reduce_partial_gradients
from tpformer.parallel.zero import reduce_accumulated, take_weight_gradients
from tpformer.torch_private import forget_meshes
from tpformer.training.data import read_sidecar
from tpformer.training.model import ModelParts
from tpformer.training.muon import Muon
from tpformer.training.optimizer import build_optimizer
from tpformer.training.resolve import resolve, with_vocab_size
from tpformer.training.setup import build_parts, check_run, default_dtype, run_mesh
from tpformer.words import dtype_name

from .counting import OF_OWNERS, Collective, CollectiveCounter, SavedBytes, StageCount, live_bytes
from .memory import boundary_bytes, microbatch_rows
from .muon import Counted, counted, itemsize
from .placement import owners_axes
from .storages import nbytes, new_objects, storages


class RankCount(NamedTuple):
    """What was counted on a rank, in bytes.

    coordinates: the rank's index on each mesh axis. gradients: those that are reduced. copies: the parameters that
    FSDP2 gathers to compute with. accumulated: gradients that wait for their reduction. collectives: how often each is
    called in an optimizer step. matrices: of each stage, who owns them and what they send, if Muon trains them.
    """

    rank: int
    coordinates: dict[str, int]
    stages: list[StageCount]
    parameters: int
    gradients: int
    optimizer: int
    copies: int
    accumulated: int
    collectives: dict[Collective, int]
    matrices: Sequence[Counted] = ()


def plan_config(config: RunConfig) -> RunConfig:
    """The configuration to count, checked, with vocabulary, device and dtype filled in. An unset device becomes cuda.

    No dataset is opened: an unset vocabulary comes from data.tokenizer, from the sidecar of the first dataset, or from
    the preset.
    Errors: check_run's, and ValueError if the vocabulary is unset and neither of these is there.
    """
    data = config.data
    if exchange_named(config.parallel.exchange).takes_steps:
        raise ValueError(f"parallel.exchange={config.parallel.exchange!r} is not counted by a dry run: leave it out")
    if config.model.vocab_size is None:
        known = data.train and (data.tokenizer is not None or read_sidecar(data.train[0]) is not None)
        if not known and config.model.known_vocab_size is None:
            raise ValueError(
                "model.vocab_size is unset, and data.train names no dataset of `tpformer data build` to take it from: "
                "set model.vocab_size"
            )
        config = resolve(config) if known else with_vocab_size(config, config.model.known_vocab_size)
    device = config.train.device or "cuda"
    dtype = dtype_name(default_dtype(config, device))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device=device, dtype=dtype))
    check_run(config, trains=bool(data.train))
    return config


def default_ranks(config: RunConfig) -> list[int]:
    """One rank each from the first, a middle and the last place in the pipeline, because these differ most."""
    pipeline = config.parallel.pipeline_parallel
    return [config.parallel.world_size // pipeline * index for index in sorted({0, pipeline // 2, pipeline - 1})]


def check_ranks(config: RunConfig, ranks: Sequence[int]) -> None:
    """ValueError for ranks that the layout does not have."""
    size = config.parallel.world_size
    for rank in ranks:
        if not 0 <= rank < size:
            raise ValueError(f"--ranks: {rank} is none of the layout's {size} ranks, 0 to {size - 1}")


def device_memory() -> float:
    """Bytes of this machine's GPU. Without one 80e9, as of an A100 or H100."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80e9


def count_parameters(config: RunConfig) -> int:
    """Elements of the whole model's parameters, built on meta tensors, without the vocabulary's padding."""
    model = GPT(config.model.architecture, device="meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    for table in (model.embed_tokens, model.lm_head):
        if table.weight is not None:
            total -= (table.rows - table.vocab_size) * table.hidden_size
    return total


def count_rank(config: RunConfig, rank: int) -> RankCount:
    """Build one rank of a configuration that plan_config gave, run it on fake tensors, and count.

    RuntimeError in a process that has a process group; none is left behind.
    """
    with fake_world(rank, config.parallel.world_size), new_objects(), warnings.catch_warnings():
        # FSDP2 warns that its outputs are views; nothing here changes them in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return _Rank(config).count(rank)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process a rank of a world without other processes, in which collectives return at once."""
    if dist.is_initialized():
        raise RuntimeError("a dry run makes a process group of its own: run it in a process that has none")
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()  # otherwise the next rank would use this one's groups


class _Rank:
    """One rank on fake CPU tensors. It runs the code of a CPU run, which keeps and sends what a GPU run does."""

    def __init__(self, config: RunConfig) -> None:
        # every transport moves as many bytes as the collectives of "sequential", which can be counted
        layout = dataclasses.replace(config.parallel, transport="sequential", transport_table="")
        self.config, self.layout, self.dtype = config, layout, default_dtype(config)
        self.mesh = run_mesh(config, "cpu")
        # dropout would need the values of sample indices, which fake tensors lack; it keeps and sends no bytes
        model = dataclasses.replace(config.model, dropout=0.0)
        exchange = exchange_named(layout.exchange)
        parts = build_parts(dataclasses.replace(config, parallel=layout, model=model), self.mesh, exchange)
        if config.train.device == "cuda" and self.dtype.itemsize == 2:
            for module in (module for part in parts for module in part.modules()):
                if isinstance(module, SelfAttention):
                    module.sliding_window = None  # a CPU keeps a mask of it, and this GPU kernel none
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)  # the model is built of meta tensors
        with self.mode:
            for part in parts:
                part.to_empty(device="cpu")
        for part in parts:
            if part.lm_head is not None:
                part.lm_head.chunk_tokens = default_chunk_tokens(part.lm_head.vocab_slice(), str(config.train.device))
        self.model = ModelParts(
            parts,
            layout,
            self.mesh,
            microbatch_size=config.microbatch_size,
            n_microbatches=config.n_microbatches,
            dtype=self.dtype,
            exchange=exchange,
        )
        self.pipelined = layout.pipeline_parallel > 1
        splits = self.pipelined and layout.schedule.splits_backward
        self.queues = [WeightGradientQueue() if splits else None for _ in parts]
        self.shards = storages(self.model.parameters())
        self.parameters = nbytes(self.model.parameters())
        self.indices = layout.stages_of(self.mesh["pp"].get_local_rank())
        self.copies = [0] * len(parts)
        self.passing = 0  # of the copies, those of layers that are gathered only while they compute

    def _input(self, part: GPT) -> Tensor:
        if part.is_first:
            return torch.zeros(self.config.microbatch_size, self.config.model.seq_length, dtype=torch.int64)
        rows = microbatch_rows(self.config.model, self.layout, self.config.microbatch_size)
        return torch.empty(rows, self.config.model.hidden_size, dtype=self.dtype, requires_grad=True)

    def _microbatch(self, index: int, *, last: bool) -> StageCount:
        """Forward and backward of one microbatch of a part, as the trainer runs them, or in a pipeline its stage."""
        part, queue, zero = self.model.parts[index], self.queues[index], self.layout.zero
        before = 0 if queue is None else live_bytes(self.mode)
        x, saved = self._input(part), SavedBytes()
        sample_index = torch.zeros(self.config.microbatch_size, dtype=torch.int64)
        targets = torch.zeros(self.config.microbatch_size, self.config.model.seq_length, dtype=torch.int64)
        part.balance.scale = torch.ones(())
        with saved.of_part(part), nullcontext() if queue is None else queue.collect():
            y = part(x, targets=targets, sample_index=sample_index, step=1)
        self.copies[index] = sum(storage.nbytes() for storage in storages(part.parameters()) - self.shards)
        if zero == 3:
            self.passing = max(self.passing, sum(sorted(saved.gathered[1:])[-2:]))  # those of a layer and the next one
        if part.is_first:
            saved.leave_out([x])  # token ids are part of the batch, which is there anyway
        kept, offloaded = saved.totals()
        output = 0 if part.is_last else nbytes([y])
        prepare_backward(part, zero, last=last and (zero >= 2 or not self.pipelined))
        y.backward(torch.empty_like(y))
        del x, y, saved, targets, sample_index
        part.balance.scale = part.balance.total = None
        queued = 0
        if queue is not None:
            queued = live_bytes(self.mode) - before
            queue.run()
            take_weight_gradients(part)
        layers = [int(name) for name in part.layers]
        moved = offloaded if self.layout.offloads else 0
        return StageCount(self.indices[index], range(layers[0], layers[-1] + 1), kept, moved, output, queued)

    def _accumulated(self) -> int:
        """Bytes of the whole gradients that FSDP2 holds between microbatches, in ZeRO stages 0 and 1."""
        if self.layout.zero > 1 or not isinstance(self.model.parts[0], FSDPModule):
            return 0
        others = [buffer for part in self.model.parts for buffer in part.buffers()]
        others += [router.load for part in self.model.parts for router in routers(part).values()]
        return live_bytes(self.mode) - self.parameters - sum(self.copies) - nbytes(others)

    def _step(self, recorder: CollectiveCounter) -> tuple[list[StageCount], int, Counter[Collective]]:
        """Run a step up to the gradient norm. Returns its stages, bytes of accumulated gradients, and collectives.

        At most three microbatches are run, because all between the first and the last are alike.
        """
        m, zero, accumulated = self.config.n_microbatches, self.layout.zero, 0
        calls: Counter[Collective] = Counter()
        for number in sorted({1, min(2, m), m}):
            with self.model.computing():
                stages = [self._microbatch(index, last=number == m) for index in range(len(self.model.parts))]
            if number < m or (self.pipelined and zero < 2):
                accumulated = self._accumulated()
            for call, times in recorder.take().items():
                calls[call] += times * (m - 2 if 1 < number < m else 1)
        for part in self.model.parts:
            if self.pipelined and zero < 2:
                reduce_accumulated(part)
            reduce_partial_gradients(part)
        if self.model.tied is not None:
            self.model.tied.reduce()
        self.model.gradient_norm()
        return stages, accumulated, calls + recorder.take()

    def _messages(self) -> Counter[Collective]:
        """Point-to-point messages of all microbatches: rows and gradients that go from one rank to another."""
        calls: Counter[Collective] = Counter()
        size = boundary_bytes(self.config)
        for stage in self.indices:
            for other in (stage - 1, stage + 1):
                if 0 <= other < self.layout.n_stages and other not in self.indices:
                    for operation in ("receive", "send"):
                        calls[Collective("pp", operation, size)] += self.config.n_microbatches
        return calls

    def _of_owners(self, found: Counted) -> Counter[Collective]:
        """Muon's all-to-alls of a stage, over all ranks that may own its matrices."""
        axes, sent = owners_axes(self.layout), (found.to_owners, found.back)
        each = zip(OF_OWNERS, sent, strict=True)
        return Counter({Collective(axes, name, of // found.rounds): found.rounds for name, of in each if of})

    def count(self, rank: int) -> RankCount:
        """Run one optimizer step and count it."""
        # before the mode, in which nobody could read the ranks of a mesh
        optimizers = [build_optimizer(part, self.config.optimizer) for part in self.model.parts]
        with self.mode, CollectiveCounter(self.mesh, self.layout) as recorder:
            stages, accumulated, calls = self._step(recorder)
            gradients = nbytes(parameter.grad for parameter in self.model.parameters())
            moments, matrices = 0, list[Counted]()
            for optimizer in optimizers:
                optimizer.step()
                for state in optimizer.state.values():
                    moments += nbytes(value for value in state.values() if value.ndim)
                if isinstance(optimizer, Muon):
                    matrices.append(counted(optimizer, rank, itemsize(self.config)))
                    calls += self._of_owners(matrices[-1])
            if self.pipelined:
                calls += self._messages()
        apart = exchange_named(self.layout.exchange).keeps_apart
        for axis, numbers in (("dp_replicate", 0 if apart else 2), ("dp_shard", 2), ("pp", 1)):
            if self.mesh[axis].size() > 1 and numbers:
                calls[Collective(axis, "all_reduce", 8)] += numbers  # the loss, and the number of targets
        coordinates = {axis: self.mesh[axis].get_local_rank() for axis in AXES}
        held = self.parameters, gradients, moments, sum(self.copies) + self.passing, accumulated
        return RankCount(rank, coordinates, stages, *held, dict(calls), matrices)

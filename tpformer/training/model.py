"""ModelParts: a rank's parts of a GPT, and how a batch runs through them in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer.distributed import indexed
from tpformer.distributed.collectives import all_reduce
from tpformer.distributed.mesh import AXES, DEFAULT_TIMEOUT
from tpformer.layers.router import routers
from tpformer.models import GPT
from tpformer.ops import packing_report, unpacked_activations
from tpformer.ops.cross_entropy import IGNORE_INDEX
from tpformer.ops.transports.quantized import keep_blocks
from tpformer.parallel import (
    Exchange,
    Layout,
    MasterWeights,
    Pipeline,
    TiedParameter,
    gathers_of,
    gradient_norms,
    needs_masters,
    prepare_backward,
    reduce_partial_gradients,
    reshard,
)

from .separation import busiest_pairs, document_positions

STEP = 0  # of every DropoutKey: a run has no sample index twice, so the samples alone decide what is dropped


def inputs_of(batch: Tensor, first_sample: int | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, targets, index of each sample) of a batch (samples, seq_length + 1), of which first_sample is the first."""
    ids, targets = token_ids(batch[:, :-1]), batch.masked_fill(batch < 0, IGNORE_INDEX)[:, 1:]
    return ids, targets, torch.arange(len(ids), device=ids.device) + first_sample


def summed_loss(part: GPT, batch: Tensor, first_sample: int | Tensor, end_of_document: int | None = None) -> Tensor:
    """The loss of a whole model in training, summed over the targets of a batch (samples, seq_length + 1) int64: 0-dim,
    float32 or wider. end_of_document: as of ModelParts. No communication."""
    ids, targets, index = inputs_of(batch, first_sample)
    return part(ids, targets=targets, sample_index=index, step=STEP, **_separated(ids, end_of_document))


def _separated(ids: Tensor, end_of_document: int | None) -> dict[str, Tensor]:
    """The argument by which GPT.forward separates documents; {} where a sample is one."""
    return {} if end_of_document is None else {"position_ids": document_positions(ids, end_of_document)}


def token_ids(batch: Tensor) -> Tensor:
    """The ids of a batch in which a token that is no target is stored as -1 - id. int64, of the batch's shape."""
    return torch.where(batch < 0, ~batch, batch)


def _masters(parts: Sequence[GPT], dtype: torch.dtype) -> MasterWeights | None:
    if not needs_masters(parts[0], dtype):
        return None
    tied = [part.embed_tokens.weight for part in parts if part.config.tie_embeddings and part.embed_tokens is not None]
    return MasterWeights(parts, dtype, tied)


class ModelParts:
    """What a rank holds of a model: one GPT, or the parts that are its pipeline stages.

    parts: in the order of layout.stages_of(pipeline rank). Apply FSDP2 to them before. mesh: the run's; None for a
    single process without process groups. microbatch_size: samples in a forward of one data-parallel rank.
    n_microbatches: forwards in a step, until set_samples changes it. dtype: that of the activations. router_bias_rate:
    how far a step moves a router's bias. timeout: that of the process groups made here. exchange: that of the parts.
    end_of_document: the id that ends a document, if attention stays within one; None: a sample is one document.
    With a pipeline, constructing it is collective over the world.
    """

    def __init__(
        self,
        parts: Sequence[GPT],
        layout: Layout = Layout(),  # noqa: B008  (frozen)
        mesh: DeviceMesh | None = None,
        *,
        microbatch_size: int,
        n_microbatches: int = 1,
        dtype: torch.dtype = torch.float32,
        router_bias_rate: float = 0.0,
        timeout: timedelta = DEFAULT_TIMEOUT,
        exchange: Exchange | None = None,
        end_of_document: int | None = None,
    ) -> None:
        if exchange is None and layout.exchange != Layout.exchange:
            raise ValueError(f"parallel.exchange={layout.exchange!r}: give the Exchange that the parts were built with")
        self.exchange = exchange or Exchange()
        self.parts, self.layout, self.mesh = list(parts), layout, mesh
        self.config, self.microbatch_size, self.n_microbatches = parts[0].config, microbatch_size, n_microbatches
        self.groups = {axis: mesh.get_group(axis) for axis in AXES if mesh is not None and mesh[axis].size() > 1}
        """The group of each mesh axis whose ranks take a step together."""
        self.replicas = self.groups.pop("dp_replicate", None) if self.exchange.keeps_apart else None
        """The group over which replicas take steps by themselves, if they do."""
        self.tied: TiedParameter | None = None
        self.pipeline: Pipeline | None = None
        self.router_bias_rate, self.end_of_document = router_bias_rate, end_of_document
        self.packing: Tensor | None = None
        """Counts of the last gradients: values packed, escapes, tensors left as they are, and whether all was computed
        twice; int64 (4,), sums over all ranks. None without packed activations."""
        self._scale = torch.ones(())
        self._dtype = dtype
        self.masters = _masters(self.parts, dtype)
        """None where parts compute with their own parameters, or with FSDP2's."""
        if mesh is not None and layout.pipeline_parallel > 1:
            self.pipeline = self._pipeline(mesh)
            if self.config.tie_embeddings:
                owners = [part.embed_tokens for part in self.parts if part.embed_tokens is not None]
                last_rank = 0 if layout.schedule.v_shaped else layout.pipeline_parallel - 1
                self.tied = TiedParameter(owners, mesh, first_rank=0, last_rank=last_rank, timeout=timeout)
        self.targets = torch.zeros((), dtype=torch.float64)
        """Of the last step's batch."""
        device = indexed(torch.device("cpu" if mesh is None else mesh.device_type))
        self.exchange.join(self.parts, self.replicas, [] if self.tied is None else self.tied.local, device)

    def set_samples(self, global_batch_size: int) -> None:
        """Prepare for steps of other global batches; a pipeline's schedule is for one number of microbatches."""
        n_microbatches = global_batch_size // (self.layout.data_parallel * self.microbatch_size)
        if n_microbatches != self.n_microbatches:
            self.n_microbatches = n_microbatches
            if self.pipeline is not None and self.mesh is not None:
                self.pipeline = self._pipeline(self.mesh)

    def _pipeline(self, mesh: DeviceMesh) -> Pipeline:
        size, length, part = self.microbatch_size, self.config.seq_length, self.parts[0]
        shards = self.layout.context_parallel * (part.tp.size if part.tp.sharded else 1)
        rows = torch.empty(size * length // shards, self.config.hidden_size, dtype=self._dtype, device="meta")
        ids = torch.empty(size, length, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.promote_types(self._dtype, torch.float32), device="meta")
        between = [torch.empty_like(rows) for _ in range(self.layout.n_stages - 1)]
        return Pipeline(
            self.parts,
            self.layout,
            mesh,
            n_microbatches=self.n_microbatches,
            boundaries=[ids, *between, loss],
            loss_fn=lambda summed, _: self._scaled(summed),
            device=indexed(torch.device(mesh.device_type)),
        )

    @property
    def data_rank(self) -> int:
        """Which of the layout.data_parallel slices of the global batch is this rank's."""
        if self.mesh is None:
            return 0
        replica, shard = (self.mesh.get_local_rank(axis) for axis in ("dp_replicate", "dp_shard"))
        return replica * self.layout.data_parallel_shard + shard

    def own_samples(self, first: int, global_batch_size: int) -> tuple[int, int]:
        """(first, number) of this data-parallel rank's samples of a global batch that begins with sample `first`."""
        return self.exchange.samples(first, global_batch_size, self.data_rank, self.layout.data_parallel)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all parts, in their order."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def _total(self, number: Tensor, *axes: str) -> Tensor:
        """The sum of a scalar over the data-parallel ranks that take a step together, and over those of further axes;
        float64."""
        total = number.double().reshape(1)
        for axis in ("dp_replicate", "dp_shard", *axes):
            total = all_reduce(total, self.groups.get(axis))
        return total[0]

    def gradients(self, batch: Tensor, *, first_sample: int | Tensor, loss_scale: float | Tensor = 1.0) -> Tensor:
        """Fill .grad, None before, with the gradients of the mean loss over the global batch, times loss_scale.

        Returns that loss (without loss_scale), a float64 scalar equal on all ranks.
        batch: (samples, seq_length + 1) int64, this data-parallel rank's slice, equal on its cp, tp and pp ranks:
        global samples first_sample, first_sample + 1, ... A run has no number twice, and the numbers decide what is
        dropped. A token that is no target is stored as -1 - id. Every microbatch's summed loss is divided by the
        targets of the whole global batch, so the result depends neither on microbatch_size nor on the layout. Without
        any target, loss and gradients are 0.
        Communication: the model's, FSDP2's, an all-reduce of the number of targets per data-parallel axis, and one of
        the loss per data-parallel and pipeline axis. The number stays on the device, so the host does not wait for it.
        With packed activations one of 4 numbers per mesh axis: if a tensor overflowed on any rank's GPU, all ranks
        compute once more, with activations as they are. There the host waits for the step.
        """
        self.exchange.begin()
        loss = self._gradients(batch, first_sample, loss_scale)
        if not self.layout.packs:
            return loss
        numbers = self._packing_numbers(loss.device)
        if repeated := bool(numbers[3]):
            self.drop_gradients()
            self.exchange.settle(torch.ones(()))  # what it keeps of such gradients is not used
            with unpacked_activations():
                loss = self._gradients(batch, first_sample, loss_scale)
        self.packing = torch.cat([numbers[:3], torch.tensor([int(repeated)], device=numbers.device)])
        return loss

    def over_replicas(self, x: Tensor, op: str = "sum") -> Tensor:
        """all_reduce over the replicas that take steps by themselves; x where they take them together."""
        return all_reduce(x, self.replicas, op)

    def drop_gradients(self) -> None:
        """Set .grad of all parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def _packing_numbers(self, device: torch.device) -> Tensor:
        """(values that were packed, escapes, tensors left as they are, groups that overflowed) of all ranks, int64."""
        found = packing_report(device)
        counts = torch.tensor([found.values, found.kept], device=device)
        numbers = torch.stack([counts[0], found.escapes, counts[1], found.overflows])
        for group in self.groups.values():
            numbers = all_reduce(numbers, group)
        return numbers

    def _gradients(self, batch: Tensor, first_sample: int | Tensor, loss_scale: float | Tensor) -> Tensor:
        targets = self.targets = self._total((batch[:, 1:] >= 0).sum())
        self._scale = loss_scale / targets.clamp(min=1)
        ranks = self.layout.data_parallel // (1 if self.replicas is None else self.replicas.size())
        self._prepare_experts(targets / (batch[:, 1:].numel() * ranks))
        with keep_blocks() if self.layout.keeps_weights else nullcontext():
            total = self._run(batch, first_sample, train=True)
        for part in self.parts if "tp" in self.groups else ():
            reduce_partial_gradients(part)
        if self.tied is not None:
            self.tied.reduce()
        for part in self.parts:
            if part.balance.total is not None:
                total = total + part.balance.total
        return self._total(total, "pp") / loss_scale

    def _prepare_experts(self, share: Tensor) -> None:
        """Set what the experts of a step need and count: scale and share of balance losses, and no tokens yet."""
        for part in self.parts:
            part.balance.scale, part.balance.total = torch.as_tensor(self._scale), None
            part.balance.share = share
            for router in routers(part).values() if self.config.n_experts is not None else ():
                router.load = None

    @torch.no_grad()
    def summed_loss(self, batch: Tensor) -> Tensor:
        """(The loss summed over the targets of all data-parallel ranks' batches, their number): float64 (2,), equal on
        all ranks that take a step together.

        batch: as for `gradients`, but a pipeline needs n_microbatches microbatches. Samples without targets give no
        loss.
        """
        self._scale = torch.ones(())
        loss = self._run(batch, 0, train=False)
        return torch.stack([self._total(loss, "pp"), self._total((batch[:, 1:] >= 0).sum())])

    def context_pairs(self, batch: Tensor) -> Tensor | None:
        """busiest_pairs of a step's microbatches, over all data-parallel ranks: int64 (2,), equal on all ranks.

        None without context-parallel ranks, and where a sample is one document, whose pairs they share evenly. batch:
        as for `gradients`. Communication: an all-reduce of 16 bytes per data-parallel axis. The host waits for nothing.
        """
        ranks = self.layout.context_parallel
        if self.end_of_document is None or ranks == 1:
            return None
        ids = token_ids(batch[:, :-1])
        positions = document_positions(ids, self.end_of_document)
        pairs = busiest_pairs(positions, ranks, self.microbatch_size, self.config.sliding_window)
        for axis in ("dp_replicate", "dp_shard"):
            pairs = all_reduce(pairs, self.groups.get(axis))
        return pairs

    def _scaled(self, summed: Tensor) -> Tensor:
        """A microbatch's share of the loss, from the sum over its targets; 0-dim, in the sum's dtype."""
        return summed * self._scale.to(summed.dtype)

    def _run(self, batch: Tensor, first_sample: int | Tensor, *, train: bool) -> Tensor:
        """Forward, and in training backward, of all microbatches. Returns this rank's sum of their scaled losses.

        In a pipeline only the rank of the last stage has losses; others return 0.
        """
        ids, targets, index = inputs_of(batch, first_sample)
        given = {"targets": targets, "sample_index": index, **_separated(ids, self.end_of_document)}
        if self.pipeline is not None:
            run = self.pipeline.step if train else self.pipeline.evaluate
            return run(ids, targets, step=STEP, **given)
        (model,), size = self.parts, self.microbatch_size
        total = torch.zeros((), device=ids.device)
        with self.computing(adds_up=len(ids) > size):
            for first in range(0, len(ids), size):
                rows = slice(first, first + size)
                own = {name: each[rows] for name, each in given.items()}
                loss = self._scaled(model(ids[rows], step=STEP, **own))
                if train:
                    prepare_backward(model, self.layout.zero, last=first + size >= len(ids))
                    loss.backward()
                total = total + loss.detach()
        if not train:
            reshard(model)
        return total

    def computing(self, *, adds_up: bool = True) -> AbstractContextManager[None]:
        """Within, parts with MasterWeights hold the copies that they compute with. adds_up: over several backwards."""
        return nullcontext() if self.masters is None else self.masters.computing(adds_up=adds_up)

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients as one process would hold them; a float64 scalar, equal on all ranks."""
        return self.gradient_norms([self.parameters()])[0]

    def gradient_norms(self, sets: Sequence[Sequence[nn.Parameter]], local: Sequence[Tensor] | None = None) -> Tensor:
        """gradient_norm of each of several sets of parameters, empty where other ranks hold all of them; float64.

        local: local_norms of each set, if they are known already.
        """
        tied = [] if self.tied is None else self.tied.local
        groups = [group for axis, group in self.groups.items() if axis != "pp"]
        return gradient_norms(sets, groups, pipeline=self.groups.get("pp"), held_twice=tied, local=local)

    def first_not_finite(self, local: Tensor) -> str | None:
        """The first parameter, in the model's order, whose gradient has no finite norm on some rank, or None.

        local: local_norms(self.parameters()) of those gradients. Collective over `groups`; waits for the device.
        """
        found: list[tuple[int, int, str]] = []
        finite = iter(local.isfinite().tolist())
        rank = 0 if self.mesh is None else self.mesh["pp"].get_local_rank()
        for stage, part in zip(self.layout.stages_of(rank), self.parts, strict=True):
            names = [name for name, _ in part.named_parameters()]
            found += [(stage, position, name) for position, name in enumerate(names) if not next(finite)]
        found = found[:1]
        for group in self.groups.values():
            everywhere: list[list] = [[] for _ in range(group.size())]
            dist.all_gather_object(everywhere, found, group=group)
            found = sorted(one for each in everywhere for one in each)[:1]
        return min(found, default=(0, 0, None))[2]

    def train(self, mode: bool = True) -> None:
        """Put all parts into training mode, or with False into evaluation mode."""
        for part in self.parts:
            part.train(mode)

    def explain(self, dtype: torch.dtype) -> str:
        """A table of the linears of this rank's parts, for one microbatch: transport and reason. Behind it, how ZeRO
        gathers their weights, if it gathers blocks. All ranks call it."""
        tokens = self.microbatch_size * self.config.seq_length
        gathers = dict.fromkeys(line for part in self.parts for line in gathers_of(part))
        return "\n".join([*(part.explain(tokens, dtype) for part in self.parts), *gathers])

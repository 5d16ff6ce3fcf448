"""What Muon adds to a step: the busiest owner's seconds, what its matrices send, and the memory of a round.

Belongs here: arithmetic on a configuration, without tensors. All seconds are predictions. Who really owns what is in
tpformer/parallel/owners.py; here every matrix of one shape costs as much, and those that a rank holds whole go to
anybody.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch

from tpformer.config import RunConfig
from tpformer.distributed.links import Link, all_to_all_seconds
from tpformer.models import GPTConfig
from tpformer.parallel import Layout
from tpformer.parallel.owners import busiest
from tpformer.training.muon import Muon
from tpformer.training.muon import cost as flops

from .devices import Device
from .roofline import gemm_seconds
from .states import exchanging_ranks

# Bytes of an element that a step of a float32 shard moves beside the iterations, counted in training/muon.py: 34 for
# the momentum and what leaves, 26 for the update, and as for AdamW 4 for the norm and 6 for the cast.
STEP_BYTES = 70.0
ITERATIONS = 5
MANY = 10_000  # matrices of a stage, from which on owners are taken to share them evenly

Shapes = tuple[tuple[tuple[int, int], int], ...]
"""((rows, columns), how many) of the matrices of a stage."""


@functools.lru_cache(maxsize=4096)
def stage_matrices(model: GPTConfig, layers: range) -> tuple[Shapes, Shapes]:
    """(the matrices of these layers that Muon takes, but for experts'; those of experts), whole ones."""
    h, dense, experts = model.hidden_size, Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for layer in layers:
        dense.update([(model.query_size, h), (h, model.query_size), *[(model.kv_size, h)] * 2])
        width, inputs = model.ffn_size, model.hidden_features // model.ffn_size
        if model.has_experts(layer):
            f, number = model.expert_size, model.n_experts or 0
            experts.update([*[(f, h)] * 2 * number, *[(h, f)] * number])
            width, inputs = model.shared_expert_size, 2
        dense.update([*[(width, h)] * inputs, (h, width)] if width else [])
    return tuple(sorted(dense.items())), tuple(sorted(experts.items()))


class Owners(NamedTuple):
    """How the owners of a stage's matrices share the work."""

    busiest: float
    """Seconds of the one that has most to do."""
    mean: float
    rounds: int
    """Matrices of the owner that has most of them."""


def iteration_seconds(rows: int, columns: int, device: Device) -> float:
    """Seconds in which one device orthogonalises one matrix."""
    m, n = sorted((rows, columns))
    return ITERATIONS * sum(gemm_seconds(*sizes, device) for sizes in ((m, m, n), (m, m, m), (m, n, m)))


@functools.lru_cache(maxsize=4096)
def owners(shapes: Shapes, ranks: int, device: Device) -> Owners:
    """The costliest matrix first, each to the rank that has least to do."""
    costs = sorted(((iteration_seconds(*shape, device), number) for shape, number in shapes), reverse=True)
    total, matrices = sum(cost * number for cost, number in costs), sum(number for _, number in costs)
    if matrices > MANY:
        return Owners(max(costs[0][0], total / ranks), total / ranks, -(-matrices // ranks))
    load = [(0.0, rank, 0) for rank in range(ranks)]
    for cost, number in costs:
        for _ in range(number):
            seconds, rank, owned = load[0]
            heapq.heapreplace(load, (seconds + cost, rank, owned + 1))
    return Owners(max(each[0] for each in load), total / ranks, max(each[2] for each in load))


def itemsize(config: RunConfig) -> int:
    """Bytes of what travels and is multiplied."""
    if config.optimizer.muon_dtype is not None:
        return getattr(torch, config.optimizer.muon_dtype).itemsize
    return 2 if config.train.device != "cpu" else max(4, getattr(torch, str(config.train.dtype)).itemsize)


def meeting_ranks(config: RunConfig) -> int:
    """The ranks among which a stage's matrices have owners: all of it, but for replicas whose sum is not FSDP2's."""
    layout = config.parallel
    own_sum = layout.exchange == type(layout).exchange
    return layout.stage_ranks if own_sum else layout.stage_ranks // layout.data_parallel_replicate


def matrix_holders(layout: Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of the matrices of stage_matrices, those of experts last: (the ranks that hold one matrix, each a part of it; the
    ranks that hold all matrices, each element once)."""
    dense, ep = layout.shards * layout.tensor_parallel, exchanging_ranks(layout)
    shards = layout.shards if ep is None else layout.expert_shards
    return (dense, dense), (shards, shards * (ep or layout.tensor_parallel))


def sent_elements(config: RunConfig, layers: range) -> tuple[float, float]:
    """Elements that a rank sends in a step, on average: (to owners, back). docs/optimizers.md has the formula."""
    ranks, found = meeting_ranks(config), [0.0, 0.0]
    matrices = stage_matrices(config.model.architecture, layers)
    for shapes, (shards, together) in zip(matrices, matrix_holders(config.parallel), strict=True):
        elements = sum(rows * columns * number for (rows, columns), number in shapes)
        found[0] += elements / ranks * (1 - 1 / shards)
        found[1] += elements / ranks * (max(1.0, ranks / together) - 1 / shards)
    return found[0], found[1]


def muon_seconds(config: RunConfig, stages: Iterable[range], device: Device) -> float:
    """Seconds of the iterations and the exchanges of a pipeline rank's stages, one after the other.

    Those of one round run beside those of the next. With cpu_offload parts also go to the device and back.
    """
    layout, ranks, size, seconds = config.parallel, meeting_ranks(config), itemsize(config), 0.0
    links = Link(*device.inside), Link(device.network_latency, device.network)
    for layers in stages:
        dense, experts = stage_matrices(config.model.architecture, layers)
        work = owners(dense + experts, ranks, device)
        sent, travel = sent_elements(config, layers), 0.0
        for elements, among in zip(sent, (ranks // max(1, layout.replicas), ranks), strict=True):
            if among > 1 and elements:
                place = device.spread(among, 1)
                each = elements * size * among / (among - 1) / work.rounds
                travel += work.rounds * all_to_all_seconds(each, *place, *links)
        shorter, longer = sorted((work.busiest, travel))
        seconds += longer + shorter / max(1, work.rounds)
        if layout.cpu_offload:
            elements = sum(rows * columns * number for (rows, columns), number in dense + experts)
            seconds += 2 * size * elements / ranks * max(1, layout.replicas) / device.host
    return seconds


class Counted(NamedTuple):
    """What was counted of a stage's matrices, by who really owns them."""

    busiest: float
    """FLOPs of the owner that has most to do."""
    mean: float
    rounds: int
    to_owners: int
    """Bytes that this rank sends in a step."""
    back: int


def counted(optimizer: Muon, rank: int, nbytes: int) -> Counted:
    """Of a built optimizer. nbytes: of an element that travels."""
    most = mean = 0.0
    turns = sent = back = 0
    for _, whole in optimizer.sets:
        owned = busiest(whole.jobs, len(whole.ranks), flops)
        most, mean, turns = most + owned[0], mean + owned[1], turns + len(whole.rounds)
        for job in whole.jobs:
            if rank == job.owner:
                back += sum(part.size for other, part in job.holders.items() if other != rank)
            elif rank in job.senders:
                sent += job.senders[rank].size
    return Counted(most, mean, turns, sent * nbytes, back * nbytes)


def muon_workspace(config: RunConfig, stages: Iterable[range]) -> float:
    """The most bytes that a step of Muon needs at once beside shards and states: those of an owner's round.

    While it orthogonalises a matrix of m x n = N elements, m the smaller: the matrix as it came, two iterates and two
    squares, 3 N + 2 m m. Of the next round as much as this rank sends, and what comes, 2 N; N where owners hold whole
    matrices. Of the last round what its owner sends to R replicas and what comes of all owners, 2 R N; nothing where
    nothing goes back. A test counts these bytes.
    """
    ranks, holders = meeting_ranks(config), matrix_holders(config.parallel)
    most = 0.0
    for layers in stages:
        kinds = []
        for shapes, (shards, together) in zip(stage_matrices(config.model.architecture, layers), holders, strict=True):
            replicas = max(1.0, ranks / together)
            comes, goes = 1.0 + (shards > 1), 2 * replicas if shards * replicas > 1 else 0.0
            kinds += [(-flops(*shape), shape, number, comes, goes) for shape, number in shapes]
        order = itertools.chain(*(itertools.repeat(kind, kind[2]) for kind in sorted(kinds)))
        rounds = list(itertools.islice(order, 0, None, ranks))  # the costliest matrix of each
        for index, (_, (rows, columns), *_) in enumerate(rounds):
            after, before = rounds[index + 1 : index + 2], rounds[max(0, index - 1) : index]
            near = [math.prod(shape) * comes for _, shape, _, comes, _ in after]
            near += [math.prod(shape) * goes for _, shape, _, _, goes in before]
            most = max(most, 3.0 * rows * columns + 2 * min(rows, columns) ** 2 + sum(near))
    return most * itemsize(config)

"""Who computes with which whole matrix, where ranks hold blocks of many: owners, and who sends them what.

Belongs here: a pure function of shapes, placements and ranks, equal on all of them. Communication is in
whole_matrices.py, and what is computed in whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from tpformer.distributed.blocks import Block, held_block


class Laid(NamedTuple):
    """How a parameter lies on ranks. A plain tensor lies on one."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """The global ranks of its mesh, in order."""
    sizes: tuple[int, ...] = ()
    """Of the mesh's axes."""
    placements: tuple[Any, ...] = ()

    @classmethod
    def of(cls, parameter: Tensor, rank: int = 0) -> Laid:
        """rank: the own one, which alone holds a plain tensor."""
        if not isinstance(parameter, DTensor):
            return cls(tuple(parameter.shape), (rank,))
        mesh = parameter.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist())
        return cls(tuple(parameter.shape), ranks, tuple(mesh.mesh.shape), tuple(parameter.placements))

    def coordinate(self, index: int) -> tuple[int, ...]:
        """The mesh coordinate of the index-th of `ranks`."""
        found = []
        for size in reversed(self.sizes):
            found.append(index % size)
            index //= size
        return tuple(reversed(found))

    def blocks(self) -> dict[int, Block]:
        """What each rank holds."""
        places = ((rank, self.coordinate(index)) for index, rank in enumerate(self.ranks))
        return {rank: held_block(self.shape, self.sizes, self.placements, at) for rank, at in places}

    def copies(self) -> dict[int, tuple[int, ...]]:
        """Of each rank, where it is along the axes whose ranks hold copies, the outer one first."""
        axes = [axis for axis, place in enumerate(self.placements) if place.is_replicate()]
        places = ((rank, self.coordinate(index)) for index, rank in enumerate(self.ranks))
        return {rank: tuple(at[axis] for axis in axes) for rank, at in places}


class Matrix(NamedTuple):
    """A matrix that is computed with as a whole: a parameter of two dims, or a part of one that is several linears."""

    parameter: int
    """Which of the parameters."""
    lead: int | None
    """Of a parameter of three dims: which along the first."""
    first: int
    """Its first row in the parameter."""
    rows: int
    columns: int

    def local(self, tensor: Tensor, block: Block) -> Tensor:
        """A view of the part of the matrix in a rank's block of a tensor that is laid out as the parameter."""
        if self.lead is not None:
            tensor = tensor[self.lead - block[0].start]
        rows = _within(block[-2], self.first, self.rows)
        start = self.first + rows.start - block[-2].start
        return tensor[start : start + len(rows)] if len(rows) < tensor.shape[0] else tensor


class Part(NamedTuple):
    """What a rank holds of a matrix."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        """Elements."""
        return len(self.rows) * len(self.columns)

    def of(self, whole: Tensor) -> Tensor:
        """A view of it in the whole matrix."""
        return whole[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


class Job(NamedTuple):
    """A matrix and the ranks that have to do with it, which are global ones."""

    matrix: Matrix
    owner: int
    """Who computes with the whole matrix."""
    holders: Mapping[int, Part]
    """All ranks that hold some of it, in order."""
    senders: Mapping[int, Part]
    """Those that send the owner what they hold, each element once; of equal holders the owner, or the nearest one."""

    def sends(self) -> Iterator[tuple[int, int, int]]:
        """(from rank, to rank, elements) of all that travels to the owner and back."""
        yield from ((rank, self.owner, part.size) for rank, part in self.senders.items() if rank != self.owner)
        yield from ((self.owner, rank, part.size) for rank, part in self.holders.items() if rank != self.owner)


Cost = Callable[[int, int], float]
"""What a matrix of (rows, columns) costs its owner."""


def _within(indices: range, first: int, size: int) -> range:
    """Which of `size` indices from `first` on are among these, counted from `first`."""
    low, high = max(indices.start, first), min(indices.stop, first + size)
    return range(low - first, max(low, high) - first)


def _matrices(number: int, laid: Laid, stacked: int) -> list[Matrix]:
    """The matrices of a parameter. stacked: how many stand one below the other in its rows."""
    rows = laid.shape[-2] // stacked
    leads: Sequence[int | None] = [None] if len(laid.shape) == 2 else range(laid.shape[0])
    return [
        Matrix(number, lead, first, rows, laid.shape[-1]) for lead in leads for first in range(0, rows * stacked, rows)
    ]


class _Holders:
    """Finds out who holds what of a matrix. Parameters that are laid out alike share what was found."""

    def __init__(self) -> None:
        self._blocks: dict[Laid, dict[int, Block]] = {}
        self._found: dict[tuple, dict[int, Part]] = {}
        self._copies: dict[Laid, dict[int, tuple[int, ...]]] = {}

    def holders(self, laid: Laid, matrix: Matrix) -> dict[int, Part]:
        key = laid, matrix[1:]
        if key not in self._found:
            if laid not in self._blocks:
                self._blocks[laid] = dict(sorted(laid.blocks().items()))
            found = {
                rank: Part(_within(block[-2], matrix.first, matrix.rows), block[-1])
                for rank, block in self._blocks[laid].items()
                if matrix.lead is None or matrix.lead in block[0]
            }
            self._found[key] = {rank: part for rank, part in found.items() if part.size}
        return self._found[key]

    def senders(self, laid: Laid, holders: Mapping[int, Part], owner: int) -> dict[int, Part]:
        if laid not in self._copies:
            self._copies[laid] = laid.copies()
        copies = self._copies[laid]

        def distance(rank: int) -> tuple:
            return rank != owner, tuple(a != b for a, b in zip(copies[rank], copies[owner], strict=True)), rank

        nearest: dict[Part, int] = {}
        for rank, part in holders.items():
            if part not in nearest or distance(rank) < distance(nearest[part]):
                nearest[part] = rank
        return {rank: part for rank, part in holders.items() if nearest[part] == rank}


def assign(parameters: Sequence[Laid], stacked: Sequence[int], cost: Cost) -> list[Job]:
    """An owner for each matrix of parameters that lie on the same ranks.

    The costliest matrix first, each to the rank that has least to do (Graham's LPT rule): of equals to the one that
    holds most of it. A rank that holds all of it takes it before, if that makes it no busier than the mean: then nobody
    sends anything to it. stacked: how many matrices stand one below the other in the rows of
    each parameter, as experts' gate and up do. ValueError if they do not divide them.
    """
    for laid, number in zip(parameters, stacked, strict=True):
        if len(laid.shape) not in (2, 3) or laid.shape[-2] % number:
            raise ValueError(
                f"a parameter of {laid.shape} is no {number} matrices of equal rows: give one of 2 or 3 dims, and how "
                f"many linears stand in its rows"
            )
    ranks = sorted(parameters[0].ranks) if parameters else []
    load, known, jobs = dict.fromkeys(ranks, 0.0), _Holders(), []
    every = [each for i, laid in enumerate(parameters) for each in _matrices(i, laid, stacked[i])]
    mean = math.fsum(cost(each.rows, each.columns) for each in every) / max(1, len(ranks))
    for matrix in sorted(every, key=lambda each: -cost(each.rows, each.columns)):
        laid, own = parameters[matrix.parameter], cost(matrix.rows, matrix.columns)
        holders = known.holders(laid, matrix)
        least = min(load.values())
        idle = [rank for rank in ranks if load[rank] == least]
        owner = max(idle, key=lambda rank: holders[rank].size if rank in holders else 0)
        whole = [rank for rank, part in holders.items() if part.size == matrix.rows * matrix.columns]
        if whole and load[best := min(whole, key=load.__getitem__)] + own <= mean * (1 + 1e-9):
            owner = best
        load[owner] += own
        jobs.append(Job(matrix, owner, holders, known.senders(laid, holders, owner)))
    return jobs


def rounds(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that run at the same time: the k-th of each owner, in the order of the owners."""
    queues: dict[int, list[Job]] = {}
    for job in jobs:
        queues.setdefault(job.owner, []).append(job)
    length = max(map(len, queues.values()), default=0)
    return [[queues[owner][k] for owner in sorted(queues) if k < len(queues[owner])] for k in range(length)]


def busiest(jobs: Sequence[Job], ranks: int, cost: Cost) -> tuple[float, float]:
    """(cost of the owner that has most to do, mean over the ranks)."""
    load: dict[int, float] = {}
    for job in jobs:
        load[job.owner] = load.get(job.owner, 0.0) + cost(job.matrix.rows, job.matrix.columns)
    return max(load.values(), default=0.0), math.fsum(load.values()) / ranks

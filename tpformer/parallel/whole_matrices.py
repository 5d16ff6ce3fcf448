"""Whole matrices of parameters that ranks hold blocks of: they meet at their owners, and go back.

Belongs here: the communication of one pass over all matrices. Who owns what is in owners.py; what is done with a whole
matrix, and with what comes back, whoever calls gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpformer.distributed.collectives import start_all_to_all
from tpformer.distributed.dtensor import local_part
from tpformer.distributed.mesh import DEFAULT_TIMEOUT, joining
from tpformer.torch_private import foreach_copy_

from .owners import Cost, Job, Laid, Matrix, Part, assign, rounds

Groups = dict[tuple[int, ...], dist.ProcessGroup]
Prepare = Callable[[Sequence[Matrix]], Sequence[Tensor]]


class WholeMatrices:
    """The matrices of parameters that all lie on the same ranks.

    run() has an owner compute with each as a whole. Its matrices come in rounds, the k-th of each owner in one. The
    next round's parts come while this one is computed with, and the last one's results go back.
    Memory, beside what `compute` takes: an owner's matrix, what of the next round is sent and comes, and what of the
    last one goes back. planner/muon.py has the bytes.
    Communicates, in a run: two all-to-alls a round, of parts. With ZeRO and tensor parallelism on P ranks each sends
    2 (E / P) (P - 1) / P elements of E in all, if the matrices can be shared evenly. Replicas do not send to an owner
    in another one; its results go to all of them. Nothing travels for a matrix that its owner alone holds.

    stacked: as of assign. cost: of a matrix of (rows, columns). groups: process groups by their ranks, to which those
    that are made are added: making one is collective over its ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        stacked: Sequence[int],
        cost: Cost,
        groups: Groups,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.laid = [Laid.of(each, self.rank) for each in parameters]
        self.jobs = assign(self.laid, stacked, cost)
        self.rounds = rounds(self.jobs)
        self.group = _group_of(parameters[0], groups, timeout)
        self.ranks = [self.rank] if self.group is None else dist.get_process_group_ranks(self.group)
        self._blocks = [laid.blocks()[self.rank] for laid in self.laid]
        for parameter, block in zip(parameters, self._blocks, strict=True):
            if (held := tuple(local_part(parameter).shape)) != tuple(map(len, block)):
                raise ValueError(
                    f"a rank holds {held} of a parameter of {tuple(parameter.shape)}, where its placements give it "
                    f"{tuple(map(len, block))}: give one that tensor parallelism and FSDP2 have cut"
                )

    def local(self, matrix: Matrix, tensor: Tensor) -> Tensor:
        """A view of this rank's part of a matrix, in this rank's part of a tensor laid out as the parameter."""
        return matrix.local(tensor, self._blocks[matrix.parameter])

    def run(
        self,
        prepare: Prepare,
        compute: Callable[[Matrix, Tensor], Tensor],
        finish: Callable[[Matrix, Tensor], None],
        like: Tensor,
    ) -> None:
        """Compute with every matrix. All ranks call it.

        prepare(matrices): this rank's part of each, of what is to be computed with. It is asked once for every matrix
        of which this rank holds some, for those of a round that it sends together. compute(matrix, whole): the result,
        of the same shape and dtype, on its owner. finish(matrix, part): takes this rank's part of the result. like: of
        the dtype and on the device of what prepare gives.
        """
        under_way: Callable[[], None] | None = None
        arriving = self._gather(self.rounds[0], prepare, like) if self.rounds else None
        for index, jobs in enumerate(self.rounds):
            own = next((job for job in jobs if job.owner == self.rank), None)
            assert arriving is not None
            whole, arriving = arriving(), None
            if index + 1 < len(self.rounds):
                arriving = self._gather(self.rounds[index + 1], prepare, like)
            result = None if own is None or whole is None else compute(own.matrix, whole)
            del whole
            if under_way is not None:
                under_way()
            under_way = None  # before this round's results take as much
            under_way = self._scatter(jobs, own, result, finish, like)
            del result
        if under_way is not None:
            under_way()

    def _gather(self, jobs: Sequence[Job], prepare: Prepare, like: Tensor) -> Callable[[], Tensor | None]:
        """Send this rank's parts of a round's matrices to their owners. What it returns waits for the own matrix."""
        sends = [job for job in jobs if self.rank in job.senders]
        copies = [job for job in jobs if self.rank in job.holders and self.rank not in job.senders]
        each = max(1, len(sends))
        for first in range(0, len(copies), each):  # what another replica sends is dropped, some at a time
            prepare([job.matrix for job in copies[first : first + each]])
        found = prepare([job.matrix for job in sends]) if sends else []
        sent = {job.owner: part for job, part in zip(sends, found, strict=True)}
        own = next((job for job in jobs if job.owner == self.rank), None)
        if all(job.senders.keys() == {job.owner} for job in jobs):
            return lambda: sent.get(self.rank)
        wait = self._exchange(sent, {} if own is None else own.senders, like)

        def arrive() -> Tensor | None:
            received = wait()
            if own is None:
                return None
            whole = like.new_empty(own.matrix.rows, own.matrix.columns)
            for rank, part in own.senders.items():
                part.of(whole).copy_(received[rank])
            return whole

        return arrive

    def _scatter(
        self,
        jobs: Sequence[Job],
        own: Job | None,
        result: Tensor | None,
        finish: Callable[[Matrix, Tensor], None],
        like: Tensor,
    ) -> Callable[[], None]:
        """Send a round's results to all that hold some of them. What it returns waits for the own parts, and ends."""
        if all(job.holders.keys() == {job.owner} for job in jobs):
            if own is not None and result is not None:
                finish(own.matrix, result)
            return lambda: None
        sent = {}
        if own is not None and result is not None:
            sent = {rank: part.of(result) for rank, part in own.holders.items()}
        wanted = {job.owner: job.holders[self.rank] for job in jobs if self.rank in job.holders}
        wait = self._exchange(sent, wanted, like)

        def arrive() -> None:
            received = wait()
            for job in jobs:
                if job.owner in received:
                    finish(job.matrix, received[job.owner])

        return arrive

    def _exchange(
        self, sent: Mapping[int, Tensor], wanted: Mapping[int, Part], like: Tensor
    ) -> Callable[[], dict[int, Tensor]]:
        """An all-to-all of one part for each rank. What it returns waits, and gives what ranks have sent, by rank."""
        sizes = [[sent[rank].numel() if rank in sent else 0 for rank in self.ranks]]
        sizes.append([wanted[rank].size if rank in wanted else 0 for rank in self.ranks])
        assert self.group is not None
        wait = start_all_to_all(self._flat(sent, sizes[0], like), self.group, *sizes)

        def arrive() -> dict[int, Tensor]:
            return {
                rank: piece.view(len(wanted[rank].rows), len(wanted[rank].columns))
                for rank, piece in zip(self.ranks, wait().split(sizes[1]), strict=True)
                if rank in wanted
            }

        return arrive

    def _flat(self, parts: Mapping[int, Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
        """The parts one after the other, by rank. Those that are no block of memory are copied once."""
        found = like.new_empty(sum(sizes))
        pieces = dict(zip(self.ranks, found.split(list(sizes)), strict=True))
        if parts:
            foreach_copy_([pieces[rank].view_as(part) for rank, part in parts.items()], list(parts.values()))
        return found


def _group_of(parameter: Tensor, groups: Groups, timeout: timedelta) -> dist.ProcessGroup | None:
    """The process group of all ranks of a parameter's mesh: an axis's own, or a new one; None for one rank."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return None
    mesh = parameter.device_mesh
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if ranks not in groups:
        axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) == len(ranks)]
        if axes:
            groups[ranks] = mesh.get_group(axes[0])
        else:
            with joining():
                groups[ranks] = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
    return groups[ranks]

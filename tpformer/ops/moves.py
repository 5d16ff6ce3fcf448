"""Rows of a sharded matrix that a rank computes with, where these are not the rows that it holds.

Belongs here: which rows go from where to where, found once, and their differentiable way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpformer.distributed.collectives import all_to_all
from tpformer.torch_private import Function

from .calls import called
from .first_derivative import first_derivative
from .uncompiled import uncompiled


@dataclass(frozen=True)
class Moves:
    """What one rank sends and receives. Rows are counted in its own part (sends) and in what arrives (places).

    sends:    rows of its own part, those for rank 0 first. sent: how many for each rank.
    received: how many from each rank. places: where what arrives stands, in the order of the wanted rows.
    """

    sends: tuple[slice, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    places: tuple[slice, ...]

    @classmethod
    def of(cls, wanted: Sequence[Sequence[slice]], rank: int, chunk: int) -> Moves:
        """wanted: each rank's rows of the matrix, in the order in which it computes with them. Ranks may want the same.
        chunk: the rows that each rank holds, the last one maybe fewer."""
        pieces = [  # (the rank that holds them, the rank that wants them, rows of the matrix), in the order of wanting
            (holder, to, slice(max(part.start, holder * chunk), min(part.stop, (holder + 1) * chunk)))
            for to, parts in enumerate(wanted)
            for part in parts
            for holder in range(part.start // chunk, (part.stop - 1) // chunk + 1)
        ]
        sends = [(to, slice(x.start - rank * chunk, x.stop - rank * chunk)) for by, to, x in pieces if by == rank]
        arriving = [(by, x.stop - x.start) for by, to, x in pieces if to == rank]
        ranks = range(len(wanted))
        received = tuple(sum(size for by, size in arriving if by == each) for each in ranks)
        ends, places = [sum(received[:each]) for each in ranks], []
        for by, size in arriving:
            places.append(slice(ends[by], ends[by] + size))
            ends[by] += size
        sent = tuple(sum(x.stop - x.start for to, x in sends if to == each) for each in ranks)
        return cls(tuple(x for _, x in sends), sent, received, tuple(places))


class _MoveRows(Function):
    """y = the rows that this rank wants of the matrix whose parts x (n / t, K) lie on the ranks.

    forward   all-to-all
    backward  dx = dy of these rows from all ranks that wanted them, summed: all-to-all
    """

    @staticmethod
    def forward(ctx, x, moves, group):
        ctx.moves, ctx.group, ctx.rows = moves, group, len(x)
        leaving = torch.cat([x[:0], *(x[part] for part in moves.sends)])  # a rank may hold what no rank wants
        arrived = all_to_all(leaving, group, moves.sent, moves.received)
        return torch.cat([arrived[:0], *(arrived[part] for part in moves.places)])

    @staticmethod
    @first_derivative
    def backward(ctx, dy):
        moves = ctx.moves
        leaving = dy.new_empty(dy.shape)
        parts = dy.split([part.stop - part.start for part in moves.places])
        for place, part in zip(moves.places, parts, strict=True):
            leaving[place] = part
        arrived = all_to_all(leaving, ctx.group, moves.received, moves.sent)
        dx = dy.new_zeros(ctx.rows, *dy.shape[1:])
        for rows, part in zip(moves.sends, arrived.split([x.stop - x.start for x in moves.sends]), strict=True):
            dx[rows] += part
        return dx, None, None


@uncompiled
def move_rows(x: Tensor, moves: Moves, group: ProcessGroup) -> Tensor:
    """The rows that this rank wants, (n, K), of a matrix whose rows lie on the ranks, x (rows / t, K) on this one.

    The gradient of x is the sum over the ranks that wanted its rows.
    Communication, per rank: an all-to-all of the bytes of the rows that it sends, forward, and of those that it wants,
    backward.
    """
    called(group, "move_rows", x.shape[1:], x.dtype, True, (x,))
    return _MoveRows.apply(x, moves, group)

"""Collectives in pieces, so that a caller can compute on one piece while the others travel.

Belongs here: the order of sends and receives, their matching, and the record of one collective per call. The callers
bring the arithmetic. It works with any torch.distributed backend that can send tensors of the device.

A call that raises leaves nothing behind: only the call holds the operations that are under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .collectives import all_gather_single, check_divisible, combine, record, wait_for
from .groups import REGISTRY, calls_of

ALL_REDUCE_CHUNKS = 4
# messages match by sender and tag, in order; with tags of its own a gather's message is never taken for a reduction's
GATHER_TAG, REDUCE_TAG = 1 << 10, 1 << 11


def _meet(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """On a CPU wait until all ranks have come to the call: who waits in gloo does not hear that a peer refused it."""
    calls = calls_of(group) if x.is_cpu else None
    if calls is not None:
        calls.meet_in_last(REGISTRY.timeout)


def _exchange(
    sent: torch.Tensor, destination: int, received: torch.Tensor, source: int, group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Send to one rank of the group and receive from another. The first of the works ends when the tensor has come.

    NCCL makes one work of both and runs batches in order; gloo makes two and matches them by tag.
    """
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, group=group, group_peer=source, tag=tag),
            dist.P2POp(dist.isend, sent, group=group, group_peer=destination, tag=tag),
        ]
    )


def gather_chunks(x: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup) -> Iterator[slice]:
    """Gather every rank's x (n, ...) into output (ranks * n, ...); yields the slice of rows that has just come.

    This rank's rows come first, then those of rank + 1, rank + 2, ... x may be overwritten after the last slice.
    Communicates: one all-gather's bytes, by direct sends; each rank receives (ranks - 1) * x.nbytes.
    """
    rank, size, n = group.rank(), group.size(), len(x)
    x = x.detach().contiguous()
    record("all_gather", output.numel() * output.dtype.itemsize)
    parts = output.view(size, *x.shape)
    _meet(x, group)
    steps = []
    for step in range(1, size):
        source, destination = (rank + step) % size, (rank - step) % size
        steps.append((source, _exchange(x, destination, parts[source], source, group, GATHER_TAG + step)))
    parts[rank].copy_(x)
    yield slice(rank * n, rank * n + n)
    for source, works in steps:
        works[0].wait()
        yield slice(source * n, source * n + n)
    for _, works in steps:
        for work in works[1:]:
            work.wait()


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin to concatenate every rank's x (n, ...) along dim 0; the function returned waits for (ranks * n, ...).

    x must not be overwritten until then. Communicates: one all-gather; each rank receives (ranks - 1) * x.nbytes.
    """
    x = x.detach().contiguous()
    output = x.new_empty((group.size() * len(x), *x.shape[1:]))
    record("all_gather", output.numel() * output.dtype.itemsize)
    under_way = all_gather_single(output, x, group=group, async_op=True), x  # x is read until the work ends

    def wait() -> torch.Tensor:
        wait_for(under_way[0], group, output)
        return output

    return wait


Fill = Callable[[slice, torch.Tensor], object]


def reduce_scatter_chunks(
    fill: Fill, shape: tuple[int, ...], like: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of a tensor of this shape (rows, ...); dtype and device as `like`.

    fill(rows, out) writes this rank's summand of those rows. It is called for the rows of rank + 1, rank + 2, ..., and
    for its own last. Each part travels to its owner while the next one is made. The owner adds in rank order, floating
    point in at least float32, and rounds once, so the result is deterministic.
    Communicates: one reduce-scatter's bytes, by direct sends; each rank receives (ranks - 1) / ranks of them.
    Raises ValueError if the ranks do not divide the rows.
    """
    rank, size = group.rank(), group.size()
    check_divisible(shape[0], size)
    n = shape[0] // size
    record("reduce_scatter", math.prod(shape) * like.dtype.itemsize)
    parts = [like.new_empty(n, *shape[1:]) for _ in range(size)]
    sent, works = [], []
    for step in range(1, size):
        owner, source = (rank + step) % size, (rank - step) % size
        sent.append(like.new_empty(n, *shape[1:]))
        fill(slice(owner * n, owner * n + n), sent[-1])
        if step == 1:  # the first part is made while others come
            _meet(like, group)
        works += _exchange(sent[-1], owner, parts[source], source, group, REDUCE_TAG + step)
    fill(slice(rank * n, rank * n + n), parts[rank])
    for work in works:
        work.wait()
    return combine(parts, torch.add)


def all_reduce_chunks(fill: Fill, shape: tuple[int, ...], like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks of a tensor of this shape (rows, ...), any number of rows; dtype and device as `like`.

    fill(rows, out) writes this rank's summand of those rows. While it writes a chunk, the chunk before is reduced.
    Communicates: one all-reduce's bytes, in at most ALL_REDUCE_CHUNKS all-reduces.
    """
    _meet(like, group)
    y = like.new_empty(shape)
    record("all_reduce", y.numel() * y.dtype.itemsize)
    works, first = [], 0
    for chunk in y.tensor_split(max(1, min(ALL_REDUCE_CHUNKS, shape[0]))):
        fill(slice(first, first + len(chunk)), chunk)
        first += len(chunk)
        works.append(dist.all_reduce(chunk, group=group, async_op=True))
    for work in works:
        work.wait()
    return y

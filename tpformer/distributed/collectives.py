"""Collectives on plain tensors, through shared memory if all ranks are CPU processes of one machine.

Belongs here: all-gather, reduce-scatter, all-reduce and all-to-all, the record of their calls, and torch.distributed's
renamed functions. Differentiable ones are in tpformer.ops, slots in workspace.py.

Results take their shape by resize_, not as views: autograd forbids writing into a view that a Function returned, as
nn.ReLU(inplace=True) does behind a row-parallel linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from .groups import REGISTRY, CollectiveState, collective_state

# torch 2.13 renamed these two; both take (output, input, group=None, async_op=False).
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PATIENCE = timedelta(seconds=1)  # after which a rank that waits on a CPU looks whether it waits in vain
TWO_SHOT_BYTES = 1 << 19  # measured on 4 CPU ranks: float32 breaks even at 0.5 to 1 MiB, bfloat16 at 0.25 MiB


class Reduction(NamedTuple):
    """One `op` of all_reduce: the function of two tensors, torch.distributed's name for it, and ours in messages."""

    function: Callable[..., torch.Tensor]
    torch_op: dist.ReduceOp.RedOpType
    name: str


REDUCTIONS = {
    "sum": Reduction(torch.add, dist.ReduceOp.SUM, "all_reduce_sum"),
    "max": Reduction(torch.maximum, dist.ReduceOp.MAX, "all_reduce_max"),
}


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Concatenate every rank's `x` along dim 0, in rank order: (n, ...) -> (ranks * n, ...), any dtype.

    All ranks pass equal shapes. Without a group, or with one of one rank, x itself is returned. Not differentiable.
    Communicates: one all-gather; each rank receives (ranks - 1) * x.nbytes.
    Raises ValueError for a 0-dimensional x; RuntimeError (shared memory) if ranks differ in operation, shape or dtype.
    """
    if group is None or (state := collective_state(group)).size == 1:
        return x
    if x.dim() == 0:
        raise ValueError("all_gather concatenates along dim 0, which a 0-dimensional tensor lacks: use x.reshape(1)")
    x = x.detach()
    record("all_gather", x.nbytes * state.size)
    shape = (x.shape[0] * state.size, *x.shape[1:])
    if not (state.shared and x.is_cpu):
        output = x.new_empty(shape)
        all_gather_single(output, x.contiguous(), group=group)
        return output
    return gather_shared(x, group, state).resize_(shape)


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], torch.Tensor]:
    """Begin an all_gather. What it returns waits and gives the result; until then x stays unwritten.

    On a GPU what is queued in between runs beside it. Through shared memory it is done at once.
    """
    if group is None or (state := collective_state(group)).size == 1:
        return lambda: x
    if state.shared and x.is_cpu:
        result = all_gather(x, group)
        return lambda: result
    record("all_gather", x.nbytes * state.size)
    output = x.new_empty((x.shape[0] * state.size, *x.shape[1:]))
    work = all_gather_single(output, x.detach().contiguous(), group=group, async_op=True)

    def wait() -> torch.Tensor:
        wait_for(work, group, output)
        return output

    return wait


def gather_shared(x: torch.Tensor, group: dist.ProcessGroup, state: CollectiveState) -> torch.Tensor:
    """all_gather of a CPU tensor through shared memory; the result is flat. It is in no record of collectives."""
    flat = x.reshape(-1)
    slots = state.gather.slots(group, "all_gather", x, 1)
    slots[state.rank][0].copy_(flat)
    state.gather.exchange("all_gather")
    gathered = torch.cat(from_all_ranks(slots, 0, flat, state))
    state.gather.end()
    return gathered


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum `x` over the ranks and keep this rank's chunk of dim 0: (ranks * n, ...) -> (n, ...), any dtype.

    All ranks pass equal shapes. Without a group, or with one of one rank, x itself is returned. Not differentiable.
    Through shared memory the sum runs in rank order, floating point in at least float32: deterministic.
    Communicates: one reduce-scatter; each rank receives (ranks - 1) / ranks * x.nbytes.
    Raises ValueError if the ranks do not divide dim 0; RuntimeError (shared memory) if ranks differ in operation, shape
    or dtype.
    """
    if group is None or (state := collective_state(group)).size == 1:
        return x
    size = state.size
    check_divisible(x.shape[0] if x.dim() else None, size)
    record("reduce_scatter", x.numel() * x.dtype.itemsize)
    if state.shared and x.is_cpu:
        return _scatter_shared(x, group, state, "reduce_scatter")
    output = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    reduce_scatter_single(output, x.detach().contiguous(), group=group)
    return output


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """reduce_scatter whose sum runs in rank order, floating point in at least float32, on every device: deterministic.

    Communicates: one all-to-all; each rank receives (ranks - 1) / ranks * x.nbytes, as in a reduce-scatter.
    Errors: those of reduce_scatter.
    """
    return start_scatter_sum(x, group)()


def start_scatter_sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], torch.Tensor]:
    """Begin a scatter_sum. What it returns waits and gives the result; until then x stays unwritten.

    On a GPU what is queued in between runs beside it. Through shared memory it is done at once.
    """
    if group is None or (state := collective_state(group)).size == 1:
        return lambda: x
    check_divisible(x.shape[0] if x.dim() else None, state.size)
    if state.shared and x.is_cpu:
        record("all_to_all", x.numel() * x.dtype.itemsize)
        result = _scatter_shared(x, group, state, "scatter_sum")
        return lambda: result
    wait = start_all_to_all(x, group)
    return lambda: combine(list(wait().chunk(state.size)), torch.add)


def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> torch.Tensor:
    """The rows that all ranks have for this one, in rank order: (sum of sent, ...) -> (sum of received, ...), any dtype
    but float8.

    sent: how many rows of x are for each rank, those for rank 0 first. received: how many come from each, which is what
    that rank sends. Any number may be 0. Without both, all ranks pass equal shapes, of which each gets an equal part.
    Without a group, or with one of one rank, x itself is returned. Not differentiable.
    Communicates: one all-to-all, of x.nbytes; unequal parts always by torch.distributed, since ranks that share memory
    would have to agree on its size first.
    Raises ValueError if the ranks do not divide dim 0, or if `sent` does not add up to it; RuntimeError (shared memory)
    if ranks differ in operation, shape or dtype.
    """
    return x if group is None or group.size() == 1 else start_all_to_all(x, group, sent, received)()


def start_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Callable[[], torch.Tensor]:
    """Begin an all_to_all of several ranks. What it returns waits and gives the result, once; x is not written before.

    On a GPU what is queued in between runs beside it. Through shared memory it is done at once.
    """
    state, rows = collective_state(group), x.shape[0] if x.dim() else None
    if sent is None and received is None:
        check_divisible(rows, state.size, "all_to_all")
    elif sent is None or received is None or sum(sent) != rows or not len(sent) == len(received) == state.size:
        raise ValueError(
            f"all_to_all of {rows} rows over {state.size} ranks with sent={sent}, received={received}: give a number "
            f"for each rank in both, in sent {rows} together"
        )
    record("all_to_all", x.numel() * x.dtype.itemsize)
    x = x.detach().contiguous()
    if state.shared and x.is_cpu and sent is None:
        slots, own = state.reduce.slots(group, "all_to_all", x, state.size), x.view(-1).tensor_split(state.size)
        publish_parts(slots, own, state, "all_to_all")
        arrived = torch.cat(from_all_ranks(slots, state.rank, own[state.rank], state)).resize_(x.shape)
        state.reduce.end()
        return lambda: arrived
    output = x.new_empty(x.shape if received is None else (sum(received), *x.shape[1:]))
    splits = [None if each is None else list(each) for each in (received, sent)]
    work = dist.all_to_all_single(output, x, *splits, group=group, async_op=True)
    under_way = [(work, output, x)]  # x is read until it ends

    def wait() -> torch.Tensor:
        if not under_way:
            raise RuntimeError("an all-to-all that was waited for gives its result once: keep what the first call gave")
        work, output, _ = under_way.pop()  # so that this function, which may live on, keeps neither
        wait_for(work, group, output)
        return output

    return wait


def wait_for(work: dist.Work, group: dist.ProcessGroup, output: torch.Tensor) -> None:
    """Wait for a collective of torch.distributed. On a CPU also look whether a peer has given the group up."""
    calls = REGISTRY.calls.get(group) if output.is_cpu else None
    if calls is None:
        work.wait()
        return
    while not work.is_completed():
        with suppress(RuntimeError):  # of the time, or its own one, which the last wait raises
            work.wait(PATIENCE)
        if not work.is_completed():
            calls.check()
    work.wait()


def _scatter_shared(x: torch.Tensor, group: dist.ProcessGroup, state: CollectiveState, name: str) -> torch.Tensor:
    slots = state.reduce.slots(group, name, x, state.size)
    reduced = reduce_own_part(slots, x.detach().reshape(-1), state, name, torch.add)
    state.reduce.end()
    return reduced.resize_(x.shape[0] // state.size, *x.shape[1:])


def check_divisible(rows: int | None, size: int, name: str = "reduce_scatter") -> None:
    """Raise ValueError unless `size` ranks can share the rows of a reduce-scatter (None: there is no dim 0)."""
    if rows is None or rows % size:
        raise ValueError(
            f"{name} over {size} ranks: dim 0 has {'no' if rows is None else rows} rows, which {size} does not "
            "divide; pad dim 0 to a multiple of the ranks, or use a number of ranks that divides it"
        )


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None, op: str = "sum") -> torch.Tensor:
    """Sum (or with op="max" the maximum) of `x` over the ranks, as a new tensor of the same shape and dtype.

    All ranks pass equal shapes. Without a group, or with one of one rank, x itself is returned. Not differentiable.
    Through shared memory the sum runs in rank order, floating point in at least float32: the same bits on all ranks.
    Communicates: one all-reduce; each rank receives (ranks - 1) * x.nbytes (one-shot: 2 ranks, or below 512 KiB),
    else 2 * (ranks - 1) / ranks * x.nbytes (two-shot).
    Raises ValueError for an unknown op; RuntimeError (shared memory) if ranks differ in operation, shape or dtype.
    """
    if op not in REDUCTIONS:
        raise ValueError(f"all_reduce knows the ops {tuple(REDUCTIONS)}, not {op!r}")
    function, torch_op, name = REDUCTIONS[op]
    if group is None or (state := collective_state(group)).size == 1:
        return x
    flat = x.detach().reshape(-1)
    nbytes = flat.numel() * x.dtype.itemsize
    record("all_reduce", nbytes)
    if not (state.shared and x.is_cpu):
        output = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, torch_op, group=group)
        return output
    if state.size == 2 or nbytes < TWO_SHOT_BYTES:  # at 2 ranks one-shot moves as much, and signals only once
        slots = state.reduce.slots(group, name, x, 1)
        slots[state.rank][0].copy_(flat)
        state.reduce.exchange(name)
        reduced = combine(from_all_ranks(slots, 0, flat, state), function)
    else:
        slots = state.reduce.slots(group, name, x, state.size)
        part = reduce_own_part(slots, flat, state, name, function)
        # Nobody reads a rank's own part of its own slot before the second exchange, so the result can be written there.
        slots[state.rank][state.rank].copy_(part)
        state.reduce.exchange(name)
        parts = [slot[rank] for rank, slot in enumerate(slots)]
        parts[state.rank] = part
        reduced = torch.cat(parts)
    state.reduce.end()
    return reduced.resize_(x.shape)


def start_all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Begin an all_reduce of several ranks, a sum. What it returns waits and gives the result, each time it is called.

    On a GPU, and over a network, what comes in between runs beside it. Through shared memory it is done at once.
    """
    if collective_state(group).shared and x.is_cpu:
        result = all_reduce(x, group)
        return lambda: result
    record("all_reduce", x.numel() * x.dtype.itemsize)
    output = x.detach().clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(output, group=group, async_op=True)

    def wait() -> torch.Tensor:
        wait_for(work, group, output)
        return output

    return wait


def reduce_own_part(
    slots: list[list[torch.Tensor]],
    flat: torch.Tensor,
    state: CollectiveState,
    name: str,
    function: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Publish the parts of `flat` that other ranks reduce, and return the reduced part of this rank, a new tensor."""
    parts = flat.tensor_split(state.size)
    publish_parts(slots, parts, state, name)
    return combine(from_all_ranks(slots, state.rank, parts[state.rank], state), function)


def publish_parts(
    slots: list[list[torch.Tensor]], parts: Sequence[torch.Tensor], state: CollectiveState, name: str
) -> None:
    """Write the parts that other ranks take to this rank's slot, and wait until all ranks have."""
    for index, part in enumerate(parts):
        if index != state.rank:
            slots[state.rank][index].copy_(part)
    state.reduce.exchange(name)


def from_all_ranks(
    slots: list[list[torch.Tensor]], part: int, own: torch.Tensor, state: CollectiveState
) -> list[torch.Tensor]:
    """Part number `part` of every rank's slot, in rank order; `own` is this rank's, which need not be read again."""
    return [own if rank == state.rank else slot[part] for rank, slot in enumerate(slots)]


def combine(parts: list[torch.Tensor], function: Callable[..., torch.Tensor]) -> torch.Tensor:
    """parts[0] op parts[1] op ..., from left to right, rounded once; always a new tensor."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if wide == dtype or len(parts) == 2:  # torch adds two 16-bit numbers in float32, and rounds once, anyway
        total = function(parts[0], parts[1])
        for part in parts[2:]:
            function(total, part, out=total)
        return total
    total = parts[0].to(wide)
    for part in parts[1:]:
        function(total, part, out=total)
    return total.to(dtype)


def record_collectives() -> AbstractContextManager[list[tuple[str, int]]]:
    """A context that gives a list, which gets (name, bytes) for each collective of this process.

    bytes: of the full tensor, that is the gathered output, the input of reduce_scatter, or all_reduce's tensor.
    Calls without a group or with one rank communicate nothing and are not recorded.
    """
    return REGISTRY.recorded.listen()


def record(name: str, nbytes: int) -> None:
    """Tell whoever records collectives of one, with the bytes of its full tensor."""
    REGISTRY.recorded.tell((name, nbytes))

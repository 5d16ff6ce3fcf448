"""Ranks that call different operations are told so, with both calls' names, whoever comes first. Nobody goes on with
another operation's numbers, after an exception, in a forked child or in two threads either."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from opened import opened
from testing import on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.distributed import all_gather, all_reduce, close, reduce_scatter, shared_memory, use_backend
from tpformer.distributed.calls import KEPT, NUMBER, SLOTS, TEXTS, Calls
from tpformer.distributed.groups import calls_of, host_group, kernel_state
from tpformer.distributed.workspace import Workspace

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs Linux with POSIX semaphores")

ONE, OTHER = ("one", (2, 4), torch.float16), ("other", (2, 4), torch.float32, "", "more")


def beside(ranks: int, number: int = 0) -> list[Calls]:
    """The calls of several ranks, all in this process, after so many."""
    nbytes = Calls.nbytes()
    common = {"size": ranks, "buffer": bytearray(ranks * nbytes), "region_offset": lambda rank: rank * nbytes}
    found = [Calls(SimpleNamespace(rank=rank, **common), range(8, 8 + ranks)) for rank in range(ranks)]  # type: ignore
    for each in found:
        each._number = number
        for old in range(number - SLOTS + 1, number + 1):
            each._words[old % SLOTS * ranks + each.rank] = old % 2**30 << NUMBER
    return found


def together(ranks: list[Calls], first: int, key: tuple) -> None:
    """All make the same call, this rank first, and compare it."""
    order = ranks[first:] + ranks[:first]
    for rank, word in [(rank, rank.note(key)) for rank in order]:
        rank.compare(word)


def said(call: Callable[[], object], *parts: str, error: type[Exception] = RuntimeError) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("before", [0, 3, SLOTS + KEPT])
@pytest.mark.parametrize("number", [0, 2**30 - 3])
def test_who_comes_second_names_both_and_who_came_first_hears_it(number: int, before: int) -> None:
    """At any place of the memory, and where the calls' numbers wrap."""
    ranks = first, second, third = beside(3, number)
    for index in range(before):
        together(ranks, index % 3, ("same", (index % (TEXTS + 1),), torch.int64))
    first_call, second_call = (
        "rank 0 (global rank 8): one of (2, 4) float16",
        "rank 2 (global rank 10): other of (2, 4)",
    )
    words = f"the ranks made different calls: {first_call}, {second_call} float32, more; every"
    first.note(ONE), second.note(ONE)
    first.check()
    said(lambda: third.note(OTHER), words)
    for later in (lambda: third.note(ONE), first.check, lambda: second.note(ONE), lambda: first.note(ONE)):
        said(later, words)


def test_ranks_that_missed_each_other_see_it_in_the_next_call() -> None:
    """As on a processor that reads before its own write is seen. The first call that differs is named."""
    first, second = beside(2)
    together([first, second], 0, ("same", (1,), torch.int64))
    with mock.patch.object(second, "_peers", []):
        first.note(ONE), second.note(OTHER)
    first.note(ONE)
    said(lambda: second.note(ONE), "rank 0 (global rank 8): one of", "rank 1 (global rank 9): other of")


def test_a_rank_that_was_waited_for_must_have_made_the_call() -> None:
    first, second = beside(2)
    with mock.patch.object(second, "_peers", []):
        first.note(ONE), second.note(OTHER)
    said(lambda: first.compare(first.note(ONE)), "one of", "other of")


def test_who_gives_up_is_heard_by_who_waits_and_by_who_is_late() -> None:
    first, second, third = beside(3)
    first.note(ONE), second.note(ONE)
    second.fail("rank 1 has no memory")
    said(first.check, "rank 1 has no memory")
    third.note(ONE)
    said(lambda: third.note(ONE), "rank 1 has no memory")


def world() -> dist.ProcessGroup:
    """A fresh state for each call of this, and no rank that still reports when the next begins."""
    assert dist.group.WORLD is not None
    dist.barrier()
    close(dist.group.WORLD)
    use_backend(dist.group.WORLD, "shared", timeout=20)
    return dist.group.WORLD


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


TYPES, WHOLE = (torch.float16, torch.bfloat16), {"sequence_parallel": False}
COLLECTIVES = {
    "dtype of as many bytes": (lambda g, odd: all_reduce(ones(4, dtype=TYPES[odd]), g), "bfloat16"),
    "integers": (lambda g, odd: all_reduce(ones(4, dtype=(torch.int32, torch.float32)[odd]), g), "int32"),
    "shape of as many bytes": (lambda g, odd: all_gather(ones(*((2, 4), (4, 2))[odd]), g), "all_gather of (4, 2)"),
    "shape that needs more memory": (lambda g, odd: all_gather(ones((4, 1 << 19)[odd]), g), "all_gather of (524288,)"),
    "maximum for sum": (lambda g, odd: all_reduce(ones(4), g, ("sum", "max")[odd]), "all_reduce_max of (4,)"),
    "operation": (lambda g, odd: (all_reduce, reduce_scatter)[odd](ones(4), g), "reduce_scatter of (4,)"),
    "one call more": (
        lambda g, odd: [odd and all_reduce(ones(2), g), all_reduce(ones(4), g)],
        "all_reduce_sum of (2,)",
    ),
}


NORMS = ops.Norm("layernorm", None, None, 1e-5), ops.Norm("rmsnorm", None, None, 1e-5)


def linear(operation: Callable, x: Tensor, group: dist.ProcessGroup, weight: Tensor | None = None, **given) -> Any:
    where = {name: given.pop(name) for name in ("sequence_parallel", "transport") if name in given}
    weight = ones(3, 4, dtype=x.dtype) if weight is None else weight
    return operation(x, weight, transport=opened(group, x, **where), **given)


def late(odd: bool, operation: Callable, rows: int, group: dist.ProcessGroup, **given) -> Any:
    """The even rank comes when the other one waits."""
    time.sleep(0 if odd else 0.5)
    return linear(operation, ones(rows, 4), group, **{"transport": "pipelined", **given})


def drop(p: float, key: int = 7) -> ops.Dropout:
    return ops.Dropout(torch.zeros(1, dtype=torch.int64), key, p)


def mixed(group: dist.ProcessGroup, **options: Any) -> Any:
    routing = ops.Routing(torch.zeros(4, 1, dtype=torch.int32), ones(4, 1))
    x, matrices = ones(2, 4), ops.ExpertWeights(ones(1, 4, 4), ones(1, 4, 2))
    return ops.experts(x, matrices, routing=routing, n_experts=2, transport=opened(group, x), **options)


def loss(group: dist.ProcessGroup, first: int = 0, width: int = 4, entries: int = 8, **options) -> Tensor:
    vocab = ops.VocabSlice(first + group.rank() * width, width, entries)
    return ops.vocab_parallel_cross_entropy(ones(2, 4), torch.tensor([0, 5]), vocab, group=group, **options)


def routed(group: dist.ProcessGroup, experts: int, k: int) -> ops.Routing:
    return ops.route(ones(2, 4), ones(experts, 4), ops.Router(ops.Policy(k)), group=group)[0]


def embed(group: dist.ProcessGroup, width: int, entries: int) -> Tensor:
    vocab = ops.VocabSlice(group.rank() * width, width, entries)
    return ops.vocab_parallel_embedding(torch.tensor([0, 5]), ones(width, 4), vocab, group=group)


OPERATIONS = {
    "rows": (lambda g, odd: linear(ops.column_linear, ones(2 + odd, 4), g), "column_linear of (3, 4)"),
    "features": (lambda g, odd: linear(ops.column_linear, ones(2, 4 + odd), g, ones(3, 4 + odd)), "linear of (2, 5)"),
    "outputs": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, ones(3 + odd, 4)), "row_linear of (2, 4)"),
    "type": (lambda g, odd: linear(ops.row_linear, ones(2, 4, dtype=TYPES[odd]), g), "bfloat16"),
    "operation": (lambda g, odd: linear((ops.row_linear, ops.column_linear)[odd], ones(2, 4), g), "column_linear of"),
    "gradients": (lambda g, odd: linear(ops.column_linear, ones(2, 4, grad=odd), g), "float32, gradients of inputs"),
    "gradients alone": (
        lambda g, odd: [linear(ops.column_linear, ones(2, 4, grad=odd), g, **WHOLE), all_reduce(ones(2), g)],
        "gradients of inputs",
    ),
    "all rows": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, **({}, WHOLE)[odd]), "sequence parallel"),
    "z loss": (lambda g, odd: loss(g, z_loss=0.5 * odd), "z_loss=0.5"),
    "reduction": (lambda g, odd: loss(g, reduction=("sum", "mean")[odd]), "mean"),
    "transport": (
        lambda g, odd: late(odd, ops.row_linear, 2, g, transport=("sequential", "pipelined")[odd]), "pipelined"),
    "rows to gather in chunks": (lambda g, odd: late(odd, ops.column_linear, 2 + odd, g), "column_linear of (3, 4)"),
    "rows to scatter in chunks": (lambda g, odd: late(odd, ops.row_linear, 2 + 2 * odd, g), "row_linear of (4, 3)"),
    "rows to reduce in chunks": (lambda g, odd: late(odd, ops.row_linear, 2 + odd, g, **WHOLE), "row_linear of (3, 3)"),
    "activation": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, activation=("gelu", "silu")[odd]), "silu"),
    "dropout": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, dropout=drop(0.25 * odd + 0.5)), "0.75"),
    "dropout's key": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, dropout=drop(0.5, 31 + odd)), "0.5, 1"),
    "next norm": (lambda g, odd: linear(ops.row_linear, ones(2, 4), g, next_norm=NORMS[odd])[0], "rmsnorm"),
    "norm": (lambda g, odd: linear(ops.column_linear, ones(2, 4), g, norm=NORMS[odd]), "rmsnorm"),
    "activation of experts": (lambda g, odd: mixed(g, activation=("gelu", "silu")[odd]), "silu"),
    "router": (lambda g, odd: routed(g, 3, 1 + odd), "k=2"),
    "experts": (lambda g, odd: routed(g, 3 + odd, 1), "4, Policy"),
    "vocabulary": (lambda g, odd: loss(g, entries=8 - odd), "7 entries in slices of 4"),
    "table": (lambda g, odd: embed(g, 4, 8 - odd), "7 entries in slices of 4"),
    "move": (lambda g, odd: ops.gather_rows(ones(2, 4 + odd), g), "gather_rows of (2, 5)"),
    "columns": (lambda g, odd: ops.gather_columns(ones(2, 4), 8 + odd, g), "gather_columns of (2, 9)"),
}  # fmt: skip


@pytest.mark.parametrize("warm", [True, False])
@on_every_rank(2)
def test_ranks_that_disagree_are_told_by_the_operation(warm: bool) -> None:
    """Whether the group has been used before or not. Both ranks hear of both calls."""
    for call, words in [*COLLECTIVES.values(), *OPERATIONS.values()]:
        group = world()
        if warm:
            all_reduce(ones(2), group)
            all_gather(ones(2), group)
        with mock.patch.object(shared_memory, "MAXIMUM_SLEEP", 0.01):  # of who came first
            said(lambda call=call, group=group: call(group, group.rank() == 1), "rank 0: ", "rank 1: ", words)
    close(dist.group.WORLD)


@on_every_rank(2)
def test_a_collective_compares_again_behind_its_wait() -> None:
    """Ranks that missed each other before it get no result."""
    group, note = world(), Calls.note
    all_reduce(ones(2), group)

    def blind(calls: Calls, key: tuple) -> int:
        with mock.patch.object(calls, "_peers", []):
            return note(calls, key)

    x = ones(2, dtype=TYPES[group.rank()])
    with mock.patch.object(Calls, "note", blind):
        said(lambda: all_reduce(x, group), "rank 0: all_reduce_sum of (2,) float16", "bf")


@on_every_rank(2)
def test_ranks_may_differ_in_what_is_theirs() -> None:
    """Shards of different sizes agree, and nobody records a forward that communicates nothing and needs no gradient."""
    group = world()
    rank = group.rank()
    linear(ops.column_linear, ones(2, 4), group, ones(3 + rank, 4))
    linear(ops.row_linear, ones(2, 3 + rank), group, ones(4, 3 + rank))
    ops.gather_columns(ones(2, 2 - rank), 3, group)
    if rank:
        linear(ops.column_linear, ones(5, 4), group, sequence_parallel=False)
    assert all_reduce(ones(2), group).tolist() == [2, 2]


@pytest.mark.parametrize("first, width, entries", [(4, 4, 8), (0, 3, 7)])
@on_every_rank(1, 2)
def test_slices_cover_the_vocabulary(first: int, width: int, entries: int) -> None:
    ranks = dist.get_world_size()
    with pytest.raises(ValueError, match=f"on rank {dist.get_rank()} of {ranks}: slices of one width cover"):
        loss(dist.group.WORLD, first, width // ranks, entries)


@on_every_rank(2)
def test_an_exception_within_a_collective_is_the_last_one_of_the_group() -> None:
    group = world()
    all_reduce(ones(2), group)
    if group.rank() == 0:
        with mock.patch.object(Workspace, "_make_views", side_effect=MemoryError("full")):
            said(lambda: all_reduce(ones(3), group), "full", error=MemoryError)
    said(lambda: all_reduce(ones(3), group), "all_reduce_sum of (3,) float32 was left by an exception on rank 0")
    close(group)


@on_every_rank(2)
def test_a_forked_child_is_refused() -> None:
    """It is refused every group that it inherits. It may make groups of its own."""
    group, (read, write) = world(), os.pipe()
    all_reduce(ones(2), group)
    host_group(group)
    if group.rank() == 0 and os.fork() == 0:
        try:
            calls = partial(all_gather, ones(2)), partial(linear, ops.column_linear, ones(2, 4))
            for call in (*calls, kernel_state, host_group):
                said(partial(call, group), "this process was forked from a rank")
            os.write(write, b"refused")
        finally:
            os._exit(0)
    os.close(write)
    assert group.rank() == 1 or os.read(read, 9) == b"refused"
    assert all_gather(ones(1) * group.rank(), group).tolist() == [0, 1]


@on_every_rank(2)
def test_two_threads_at_once_are_refused_and_one_after_the_other_are_not() -> None:
    group, answers = world(), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: answers.append(all_reduce(ones(2), group).tolist()))
        thread.start()
        thread.join()
    assert answers == [[2, 2], [2, 2]]
    entered, exchange = threading.Event(), Workspace.exchange

    def waiting(space: Workspace, operation: str) -> None:
        entered.set()
        exchange(space, operation)

    def other() -> None:
        entered.wait(20)
        parts = "thread second called all_gather of (3,)", "thread MainThread was in all_reduce"
        said(lambda: all_gather(ones(3), group), *parts)
        answers.append("refused")

    if group.rank() == 0:
        thread = threading.Thread(target=other, name="second")
        thread.start()
        with mock.patch.object(Workspace, "exchange", waiting), mock.patch.object(shared_memory, "MAXIMUM_SLEEP", 0.01):
            said(lambda: all_reduce(ones(2), group), "thread second called")
        thread.join()
        assert answers[2:] == ["refused"]
    dist.barrier()
    if group.rank() == 1:
        assert all_reduce(ones(2), group).tolist() == [2, 2]  # rank 0 had published that
        said(lambda: all_reduce(ones(2), group), "thread second called")
    assert calls_of(group).failure  # type: ignore[union-attr]
    close(group)

"""Calls of launchers that are done again from a plan, beside the same calls in Triton's own way.

Belongs here: which calls, and what came to the driver for both, made comparable. driving.py runs it.
"""

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from variants import Call, Shelf, Variant, fused, gemms, grouped, local_channel, rows_alone

from checks.driver.stub import Stub
from tpformer.kernels import replay
from tpformer.kernels.all_gather_matmul import kernel as gathers
from tpformer.kernels.finish import Finish
from tpformer.kernels.matmul.kernel import matmul
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce
from tpformer.kernels.protocol import Channel, bump_kernel

ADDRESS = 1 << 40  # of a process's memory, at least; no size here is as large
SAID = ("launch", "function", "grid", "threads", "shared", "cooperative", "taken", "maps")


def launches(attempt: dict, given: list[Tensor], results: list[Tensor]) -> list:
    """What the driver was told of each launch. Addresses of memory that is not given, which differ between two calls,
    become the number of the result, or the order in which they come."""
    ranges = [(x.data_ptr(), x.data_ptr() + max(1, x.numel() * x.element_size())) for x in given]
    places: dict[int, str] = {x.data_ptr(): f"result {number}" for number, x in enumerate(results)}

    def known(value: int) -> int | str:
        if value < ADDRESS or any(first <= value < end for first, end in ranges):
            return value
        return places.setdefault(value, f"allocated {len(places)}")

    said = [{name: note[name] for name in SAID} for note in attempt["records"] if "launch" in note]
    for note in said:
        note["taken"] = [[size, known(value) if size in (8, 128) else value] for size, value in note["taken"]]
        note["maps"] = [[known(words[0]), *words[1:]] for words in note["maps"]]
    return [attempt["error"], said]


@contextmanager
def in_tritons_way() -> Iterator[None]:
    """A context in which nothing is recorded, and no plan is used."""
    with mock.patch.object(replay, "device_of_launches", lambda: None):
        yield


@contextmanager
def counted() -> Iterator[list[None]]:
    """A context that gives a list with one member for each call that is done from a plan."""
    done: list[None] = []
    original = replay.replay

    def counting(*arguments: Any) -> Any:
        done.append(None)
        return original(*arguments)

    with mock.patch.object(replay, "replay", counting):
        yield done


def leaves(value: Any) -> list:
    """The members of nested tuples and lists."""
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple | list) else [value]


def kinds(value: Any) -> Any:
    """The types of nested tuples and lists; None for everything else."""
    return [type(value).__name__, *map(kinds, value)] if isinstance(value, tuple | list) else None


def geometry(x: Any, tensors: list[Tensor]) -> Any:
    """What a result must share with that of another call: its layout, and which of the call's tensors it is."""
    if not isinstance(x, Tensor):
        return x
    same = next((number for number, tensor in enumerate(tensors) if tensor is x), None)
    return tuple(x.shape), x.stride(), str(x.dtype), same


def compared(stub: Stub, shelf: Shelf, recorded: Callable[[], Call], call: Callable[[], Call]) -> dict:
    """Whether a call is replayed that agrees with a recorded one, and whether the driver and the caller get the same
    as in Triton's way. Both functions take tensors from the shelf."""
    held = []  # until the end, so that no other result has the address of a recorded one

    def run(make: Callable[[], Call], tensors: list[Tensor]) -> tuple[dict, list]:
        shelf.begin(tensors)
        launcher, arguments, options = make()
        attempt = stub.attempt(lambda: held.append(launcher(*arguments, **options)))
        results = [] if attempt["error"] else leaves(held[-1])
        own = [x for x in results if isinstance(x, Tensor) and not any(x is given for given in shelf.given)]
        said = launches(attempt, shelf.given, own)
        return attempt, [said, [geometry(x, tensors) for x in results], attempt["error"] or kinds(held[-1])]

    first: list[Tensor] = []
    with in_tritons_way():
        plain, wanted = run(call, first)
    _, (_, layouts, _) = run(recorded, [])
    with counted() as done:
        _, found = run(call, first)
    same = wanted == found and wanted[1] == layouts
    return {"plain": plain, "replayed": len(done), "same": same, "layouts": layouts, "said": [wanted, found]}


@replay.replayed
def of_own(first: Any, second: Any, served: int = 2, spoil: bool = False, zeroed: int = 2) -> Tensor:
    """A launcher of parts of what it is given and of what it allocates."""
    tensors = [*first, *second]
    scratch = tensors[0].new_empty(64)
    if spoil:
        scratch.fill_(0)
    if len(first) > 1:
        tensors = tensors[::-1]
    replay.launch(bump_kernel, (1,), tensors[0][8:], tensors[-1].view(-1)[4:], served, num_warps=1)
    replay.launch(bump_kernel, (1,), scratch[16:], tensors[0], zeroed, num_warps=1)
    return scratch


@replay.replayed
def of_many(x: Tensor, scale: float = 0.5) -> Any:
    """A launcher whose result has what it is given, what it allocates, numbers, and tuples and lists of all kinds."""
    wide, none = x.new_empty(4, 16), x.new_empty(0, 3)
    replay.launch(bump_kernel, (1,), wide, x, 2, num_warps=1)
    return Finish(x, None, [wide, (none,), [], ()], scale)  # type: ignore[arg-type]


def own(shelf: Shelf) -> Iterator[Variant]:
    """The same of calls of a launcher that shows what those that ship do not."""
    word = partial(shelf, 64, dtype=torch.int32)
    yield "parts", True, lambda key: (of_own, ([word()], [word()]), {})
    yield "a list of two, and one of none", True, lambda key: (of_own, ([word(), word()], []), {})
    yield "an option", True, lambda key: (of_own, ([word()], [word()]), {"served": 3})
    yield "another option of this value", True, lambda key: (of_own, ([word()], [word()]), {"zeroed": 3})
    for scale in (0.5, 0.25):
        yield f"results of all kinds, {scale}", True, lambda key, scale=scale: (of_many, (word(),), {"scale": scale})
    yield "memory is filled", False, lambda key: (of_own, ([word()], [word()]), {"spoil": True})


def aliases(shelf: Shelf, channel: Channel) -> Iterator[tuple[str, Callable[[], Call], Callable[[], Call]]]:
    """Pairs of calls that differ in which of their tensors are one and the same."""

    def reduce(same: bool, rows: int) -> Call:
        x = shelf(rows, 512)
        residual = x if same else shelf(rows, 512)
        return matmul_all_reduce, ([x], [shelf(512, 512)], channel, Finish(residual=residual)), {}

    def product(same: bool, rows: int) -> Call:
        w = shelf(128, 64)
        return matmul, (shelf(rows, 64), [w, w if same else shelf(128, 64)]), {}

    for make in (reduce, product):
        for first, rows in ((False, 248), (True, 240)):
            calls = (partial(make, same, rows) for same in (first, not first))
            yield f"{make.__name__}, one tensor for two: {first}", *calls


def call_variants(stub: Stub) -> list[dict]:
    """`compared` of each variant, with what is expected. All are recorded before the first is replayed, so that one
    would show that takes another's plan."""
    shelf = Shelf()
    channel = local_channel(shelf)
    every = [*gemms(shelf), *grouped(shelf), *fused(shelf, channel), *rows_alone(shelf), *own(shelf)]
    layouts = []
    for _, _, make in every:
        shelf.begin([])
        launcher, arguments, options = make(1)
        layouts.append([geometry(x, shelf.tensors) for x in leaves(launcher(*arguments, **options))])
    done = []
    for (name, expected, make), layout in zip(every, layouts, strict=True):
        found = compared(stub, shelf, partial(make, 2**63 + 5), partial(make, 7))
        found["same"] &= found["layouts"] == layout
        done.append({"name": name, "expected": int(expected), **found})
    for name, first, second in aliases(shelf, channel):
        done.append({"name": name, "expected": 1, **compared(stub, shelf, first, second)})
    return done


def keep_little() -> dict[str, Any]:
    """How many plans and tensor maps are kept of many calls, and how much of what the calls used is still alive."""
    shelf = Shelf()
    channel = local_channel(shelf)
    matmul.plans.clear()
    with mock.patch.object(replay, "PLANS", 4), mock.patch.object(replay, "MAPS", 4):
        for rows in range(1, 9):
            matmul(shelf(rows, 64), [shelf(16, 64)])
            gathers.await_gathered(channel, shelf(rows, 64), True)
        for _ in range(8):
            matmul(shelf(8, 64), [shelf(16, 64)])
        (at, *_, encode), *_ = list(matmul.plans.values())[-1].launches[0].maps
        kept = {"plans": len(matmul.plans), "channel": len(channel.plans), "maps": encode.cache_info().currsize}
    rooms = [mmap.mmap(-1, 1 << 16) for _ in range(2)]
    a, w = (torch.frombuffer(room, dtype=torch.bfloat16).view(512, 64) for room in rooms)
    with counted() as done:
        results = [matmul(a, [w])[0] for _ in range(2)]
        gathers.await_gathered(channel, a, True)
    watched = [weakref.ref(each) for each in (*rooms, *results, a, w, channel)]
    before = sum(each() is not None for each in watched)
    del rooms, results, a, w, channel
    gc.collect()
    return {**kept, "replayed": len(done), "before": before, "alive": sum(each() is not None for each in watched)}

"""Calls of launchers that are done again from a plan, beside the same calls in Triton's own way.

Belongs here: the calls, with tensors from memory that is handed out again in the same order, and what came to the
driver for both, made comparable. driving.py runs them, and makes those of the compile check's cases twice, too.
"""

import gc
import mmap
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from checks.driver.stub import Stub, memory
from tpformer.kernels import replay
from tpformer.kernels.all_gather_matmul import kernel as gathers
from tpformer.kernels.configurations import TILES
from tpformer.kernels.dropout.kernel import finish_backward, finish_forward
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.norm.kernel import finish_norm_forward, norm_forward
from tpformer.kernels.protocol import Channel, bump, bump_kernel

WORLD = 8
ADDRESS = 1 << 40  # of a process's memory, at least; no size here is as large
SAID = ("launch", "function", "grid", "threads", "shared", "cooperative", "taken", "maps")

Call = tuple[Callable, tuple, dict[str, Any]]
Variant = tuple[str, bool, Callable[..., Call]]
"""The name of a call, whether it is replayed, and the call, made with a key."""


class Shelf:
    """Hands out memory, and on a later round the same in the same order."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        """All that it has ever handed out."""
        self.begin([])

    def begin(self, tensors: list[Tensor]) -> None:
        """Hand out these from now on, and append to them what is wanted beyond."""
        self.tensors, self.taken = tensors, 0

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, skew: int = 0) -> Tensor:
        """skew: elements by which the memory begins behind a multiple of 16 bytes."""
        if self.taken == len(self.tensors):
            numel = torch.Size(shape).numel()
            self.tensors.append(memory(numel + skew, dtype=dtype)[skew:].view(shape))
            self.given.append(self.tensors[-1])
        self.taken += 1
        return self.tensors[self.taken - 1]


def local_channel(shelf: Shelf) -> Channel:
    """A channel of one rank of WORLD, larger than all calls below need."""
    capacity, flags = 1 << 22, 1 << 12
    word, table = partial(shelf, dtype=torch.int32), partial(shelf, dtype=torch.int64)
    slot = partial(shelf, capacity, dtype=torch.uint8)
    return Channel(
        rank=3, served=1, world=WORLD, data=table(1, WORLD), flags=table(1, WORLD), epoch=word(1), error=word(1, 4),
        stopped=word(1, 2), slots=(slot(), slot()), parity_stride=capacity, capacity=capacity, writer_flags=flags,
        limit=160, counters=word(1, WORLD * flags),
    )  # fmt: skip


def finish_of(shelf: Shelf, rows: int, key: int, parts: str = "bias dropout residual", p: float = 0.25) -> Finish:
    """The end of an operation with 512 columns."""
    dropout = Dropout(shelf(rows, dtype=torch.int64), key, p) if "dropout" in parts else None
    bias = shelf(512) if "bias" in parts else None
    return Finish(bias, dropout, shelf(rows, 512) if "residual" in parts else None)


def launches(attempt: dict, given: list[Tensor], results: list[Tensor]) -> list:
    """What the driver was told of each launch. Addresses of memory that is not given, which differ between two calls,
    become the number of the result, or the order in which they come."""
    ranges = [(x.data_ptr(), x.data_ptr() + max(1, x.nbytes)) for x in given]
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


def counted() -> Any:
    """A context that gives a mock, whose calls are those that are done from a plan."""
    return mock.patch.object(replay, "replay", wraps=replay.replay)


def leaves(value: Any) -> list:
    """The members of nested tuples and lists."""
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple | list) else [value]


def described(x: Any, tensors: list[Tensor]) -> Any:
    """What a result must share with that of another call: types, layouts, and which of the call's tensors it is."""
    if isinstance(x, tuple | list):
        return [type(x).__name__, *(described(each, tensors) for each in x)]
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
        result = None if attempt["error"] else held[-1]
        own = [x for x in leaves(result) if isinstance(x, Tensor) and not any(x is given for given in shelf.given)]
        return attempt, [launches(attempt, shelf.given, own), described(result, tensors)]

    first: list[Tensor] = []
    with mock.patch.object(replay, "driver_of_launches", lambda: None):  # nothing is recorded, and no plan is used
        plain, wanted = run(call, first)
    _, (_, layouts) = run(recorded, [])
    with counted() as done:
        _, found = run(call, first)
    same = wanted == found and wanted[1] == layouts
    return {"plain": plain, "replayed": done.call_count, "same": same, "layouts": layouts, "said": [wanted, found]}


def gemms(shelf: Shelf) -> Iterator[Variant]:
    """Calls without communication."""

    def product(key, m=256, n=128, k=64, weights=1, bias=None, dtype=torch.bfloat16, skew=0, **options) -> Call:
        a = shelf(*((k, m) if options.get("a_transposed") else (m, k)), dtype=dtype, skew=skew)
        b = [shelf(*((k, n) if options.get("b_transposed") else (n, k)), dtype=dtype) for _ in range(weights)]
        biases = None if bias is None else [shelf(n, dtype=dtype, skew=bias) for _ in b]
        return matmul, (a, b, biases), options

    def derivative(key: int, gate: bool) -> Call:
        a, w, x = shelf(256, 64), shelf(64, 128), shelf(256, 128)
        return matmul_derivative, (a, w, x, "silu", shelf(256, 128) if gate else None), {}

    options: dict[str, Any]
    for options in (
        {}, {"n": 1}, {"m": 1}, {"m": 100, "n": 129, "k": 72}, {"m": 128, "n": 130, "k": 8},
        {"bias": 0}, {"bias": 1}, {"bias": 4}, {"weights": 3}, {"weights": 2, "bias": 0, "activation": "gelu"},
        {"m": 64, "k": 256, "a_transposed": True, "b_transposed": True}, {"dtype": torch.float32},
        {"dtype": torch.float16}, {"programs": 1}, {"tile": TILES["small"]}, {"tile": TILES["medium"]},
    ):  # fmt: skip
        yield f"matmul {options}", True, partial(product, **options)
    yield "rows apart", True, lambda key: (matmul, (shelf(256, 128)[:, :64], [shelf(128, 64)], None), {})
    yield "input, skewed: it is copied", False, partial(product, skew=1)
    yield "rows of 130 bytes: they are copied", False, partial(product, k=65)
    for gate in (False, True):
        yield f"derivative, gate {gate}", True, partial(derivative, gate=gate)


def fused(shelf: Shelf, channel: Channel) -> Iterator[Variant]:
    """Calls over a channel."""

    def gather(key: int, push: bool) -> Call:
        weights = [shelf(*shape) for shape in ((128, 512), (64, 512), (64, 512))]
        return gathers.all_gather_matmul, (shelf(32, 512), weights, channel), {"push": push, "keep": push}

    def reduce(key: int, parts: str, launcher: Callable, rows: int) -> Call:
        finish = finish_of(shelf, rows, key, parts)
        return launcher, ([shelf(256, 64)], [shelf(512, 64)], channel, finish), {"spare": 4}

    for push in (False, True):
        yield f"gather, 3 weights, push {push}", True, partial(gather, push=push)
    yield "gather", True, lambda key: (gathers.await_gathered, (channel, shelf(32, 512), True), {})
    yield "gathered copy", True, lambda key: (gathers.gathered_copy, (channel, shelf(32, 512)), {})
    yield "gathered copy, a part", False, lambda key: (gathers.gathered_copy, (channel, shelf(32, 511)), {})
    yield "bump", True, lambda key: (bump, (channel,), {})
    for parts in ("", "bias", "dropout residual", "bias dropout residual"):
        for launcher, rows in ((matmul_reduce_scatter, 32), (matmul_all_reduce, 256)):
            yield f"{launcher.__name__}, {parts}", True, partial(reduce, parts=parts, launcher=launcher, rows=rows)


def finishes(shelf: Shelf) -> Iterator[Variant]:
    """Calls that multiply nothing, and in which members may be missing."""

    finish = partial(finish_of, shelf, 64)

    def normed(key: int, parts: str) -> Call:
        norm = Norm("layernorm", shelf(512), shelf(512), eps=1e-5)
        return finish_norm_forward, (shelf(64, 512), finish(key, parts)._replace(norm=norm)), {}

    for parts in ("", "bias dropout residual"):
        yield f"norm behind {parts}", True, partial(normed, parts=parts)
    for p in (0.25, 0.5):
        yield f"dropout {p}", True, lambda key, p=p: (finish_forward, (shelf(64, 512), finish(key, p=p)), {})
    yield "bias's gradient alone", True, lambda key: (finish_backward, (shelf(64, 512), None, True), {})
    yield "dropout's gradient", True, lambda key: (finish_backward, (shelf(64, 512), finish(key).dropout, True), {})
    unweighted = Norm("rmsnorm", None, None, None)
    yield "norm without a weight: ones are made", False, lambda key: (norm_forward, (shelf(64, 512), unweighted), {})


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
    """Calls of launchers that show what those that ship do not."""
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
    every = [*gemms(shelf), *fused(shelf, channel), *finishes(shelf), *own(shelf)]
    layouts = []
    for _, _, make in every:
        shelf.begin([])
        launcher, arguments, options = make(1)
        layouts.append(described(launcher(*arguments, **options), shelf.tensors))
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
        replayed = done.call_count
        done.reset_mock()  # it keeps arguments
    watched = [weakref.ref(each) for each in (*rooms, *results, a, w, channel)]
    before = sum(each() is not None for each in watched)
    del rooms, results, a, w, channel
    gc.collect()
    return {**kept, "replayed": replayed, "before": before, "alive": sum(each() is not None for each in watched)}

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

from checks.driver.stub import Stub, memory
from tpformer.kernels import replay
from tpformer.kernels.activation.kernel import activation_backward, activation_forward
from tpformer.kernels.all_gather_matmul import kernel as gathers
from tpformer.kernels.combine.kernel import combine
from tpformer.kernels.configurations import TILES
from tpformer.kernels.dropout.kernel import finish_backward, finish_forward
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.grouped_matmul.kernel import grouped_matmul, grouped_weight_gradient
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.norm.kernel import finish_norm_forward, norm_backward, norm_forward
from tpformer.kernels.protocol import Channel, bump, bump_kernel
from tpformer.kernels.rope.kernel import rope_rotate
from tpformer.kernels.route.kernel import route_backward, route_forward
from tpformer.kernels.route.reference import Policy
from tpformer.kernels.weighted_activation.kernel import weighted_activation_backward, weighted_activation_forward

ADDRESS = 1 << 40  # of a process's memory, at least; no size here is as large
SAID = ("launch", "function", "grid", "threads", "shared", "cooperative", "taken", "maps")
WORLD = 8

Call = tuple[Callable, tuple, dict[str, Any]]


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


def finish_of(
    shelf: Shelf, rows: int, n: int, key: int, parts: str = "bias dropout residual", p: float = 0.25
) -> Finish:
    dropout = Dropout(shelf(rows, dtype=torch.int64), key, p) if "dropout" in parts else None
    bias = shelf(n) if "bias" in parts else None
    return Finish(bias, dropout, shelf(rows, n) if "residual" in parts else None)


Variant = tuple[str, bool, Callable[..., Call]]


def gemms(shelf: Shelf) -> Iterator[Variant]:
    """Names of calls without communication, whether they are replayed, and the calls; their argument is a key."""

    def product(m, n, k, weights=1, bias=None, dtype=torch.bfloat16, skew=0, **options) -> Callable[..., Call]:
        def make(key: int) -> Call:
            a = shelf(*((k, m) if options.get("a_transposed") else (m, k)), dtype=dtype, skew=skew)
            b = [shelf(*((k, n) if options.get("b_transposed") else (n, k)), dtype=dtype) for _ in range(weights)]
            biases = None if bias is None else [shelf(n, dtype=dtype, skew=bias) for _ in b]
            return matmul, (a, b, biases), options

        return make

    yield "matmul", True, product(256, 128, 64)
    yield "one column", True, product(256, 1, 64)
    yield "one row", True, product(1, 128, 64)
    yield "odd sizes", True, product(100, 129, 72)
    yield "one element wide", True, product(128, 130, 8)
    yield "bias", True, product(256, 128, 64, bias=0)
    yield "bias, skewed", True, product(256, 128, 64, bias=1)
    yield "bias, skewed by half", True, product(256, 128, 64, bias=4)
    yield "three weights", True, product(256, 128, 64, weights=3)
    yield "two weights, biases, activation", True, product(256, 128, 64, weights=2, bias=0, activation="gelu")
    yield "weight gradient", True, product(64, 128, 256, a_transposed=True, b_transposed=True)
    yield "float32", True, product(256, 128, 64, dtype=torch.float32)
    yield "float16", True, product(256, 128, 64, dtype=torch.float16)
    yield "programs", True, product(256, 128, 64, programs=1)
    for name in ("small", "medium"):
        yield f"{name} tile", True, product(256, 128, 64, tile=TILES[name])
    yield "rows apart", True, lambda key: (matmul, (shelf(256, 128)[:, :64], [shelf(128, 64)], None), {})
    yield "input, skewed: it is copied", False, product(256, 128, 64, skew=1)
    yield "rows of 130 bytes: they are copied", False, product(256, 128, 65)
    for gate in (False, True):

        def derivative(key: int, gate: bool = gate) -> Call:
            x = (shelf(256, 64), shelf(64, 128), shelf(256, 128), "silu", shelf(256, 128) if gate else None)
            return matmul_derivative, x, {}

        yield f"derivative, gate {gate}", True, derivative


def grouped(shelf: Shelf) -> Iterator[Variant]:
    """The same of grouped GEMMs, of 8 groups."""

    def call(launcher: Callable, sizes: tuple, indexed: tuple, **options) -> Callable[..., Call]:
        def make(key: int) -> Call:
            numbers = [shelf(n, dtype=torch.int32) if n else None for n in (9, *(256 * each for each in indexed))]
            return launcher, (shelf(256, 64), shelf(*sizes), *numbers), options

        return make

    for i in (False, True):
        yield f"groups, index {i}", True, call(grouped_matmul, (8, 128, 64), (i,))
        yield f"groups, transposed, index {i}", True, call(grouped_matmul, (8, 64, 96), (i,), transposed=True)
        yield f"gradient of groups, index {i}", True, call(grouped_weight_gradient, (256, 96), (i, not i))


def fused(shelf: Shelf, channel: Channel) -> Iterator[Variant]:
    """The same of calls over a channel."""
    one, three = [(128, 512)], [(128, 512), (64, 512), (64, 512)]
    for shapes in (one, three):
        for push in (False, True):

            def gather(key: int, shapes: list = shapes, push: bool = push) -> Call:
                weights = [shelf(*shape) for shape in shapes]
                return gathers.all_gather_matmul, (shelf(32, 512), weights, channel), {"push": push, "keep": push}

            yield f"gather, {len(shapes)} weights, push {push}", True, gather
    yield (
        "gather, derivative",
        True,
        lambda key: (
            gathers.all_gather_matmul_derivative,
            (shelf(32, 512), shelf(512, 128), channel, shelf(256, 128), "gelu"),
            {"spare": 32},
        ),
    )
    yield "gather", True, lambda key: (gathers.await_gathered, (channel, shelf(32, 512), True), {})
    yield "gathered copy", True, lambda key: (gathers.gathered_copy, (channel, shelf(32, 512)), {})
    yield "gathered copy, a part", False, lambda key: (gathers.gathered_copy, (channel, shelf(32, 511)), {})
    yield "bump", True, lambda key: (bump, (channel,), {})
    for parts in ("", "bias", "dropout residual", "bias dropout residual"):
        for launcher, rows in ((matmul_reduce_scatter, 32), (matmul_all_reduce, 256)):

            def reduce(key: int, parts: str = parts, launcher: Callable = launcher, rows: int = rows) -> Call:
                finish = finish_of(shelf, rows, 512, key, parts)
                return launcher, ([shelf(256, 64)], [shelf(512, 64)], channel, finish), {"spare": 4}

            yield f"{launcher.__name__}, {parts}", True, reduce


def rows_alone(shelf: Shelf) -> Iterator[Variant]:
    """The same of calls that multiply nothing."""
    norm = partial(Norm, "layernorm", eps=1e-5)

    def normalise(key: int, parts: str) -> Call:
        finish = finish_of(shelf, 64, 512, key, parts)
        return finish_norm_forward, (shelf(64, 512), finish._replace(norm=norm(shelf(512), shelf(512)))), {}

    yield "norm", True, lambda key: (norm_forward, (shelf(64, 512), norm(shelf(512), shelf(512))), {})
    yield "norm of x itself", True, partial(normalise, parts="")
    yield "finish and norm", True, partial(normalise, parts="bias dropout residual")
    yield "norm without a weight: ones are made", False, lambda key: (
        norm_forward, (shelf(64, 512), Norm("rmsnorm", None, None, None)), {},
    )  # fmt: skip

    def norm_gradient(key: int) -> Call:
        statistics = (shelf(64, 1, dtype=torch.float32), shelf(64, 1, dtype=torch.float32))
        x = (shelf(64, 512), shelf(64, 512), statistics, norm(shelf(512), shelf(512)), shelf(64, 512))
        return norm_backward, x, {}

    yield "norm's gradient", True, norm_gradient
    for p in (0.25, 0.5):
        yield f"dropout {p}", True, lambda key, p=p: (
            finish_forward, (shelf(64, 512), finish_of(shelf, 64, 512, key, p=p)), {},
        )  # fmt: skip
    yield "bias's gradient alone", True, lambda key: (finish_backward, (shelf(64, 512), None, True), {})
    yield "dropout's gradient", True, lambda key: (
        finish_backward, (shelf(64, 512), finish_of(shelf, 64, 512, key).dropout, True), {},
    )  # fmt: skip
    yield "activation", True, lambda key: (activation_forward, (shelf(64, 512), "gelu", None), {})
    yield "no activation", True, lambda key: (activation_forward, (shelf(64, 512), None, None), {})
    yield "activation's gradient", True, lambda key: (
        activation_backward, (shelf(64, 512), shelf(64, 512), "silu", shelf(64, 512)), {},
    )  # fmt: skip
    yield "rope", True, lambda key: (
        rope_rotate,
        (
            shelf(64, 4, 64), shelf(64, 2, 64), tuple(shelf(64, 32, dtype=torch.float32) for _ in range(2)),
            shelf(64, dtype=torch.int64),
        ),
        {},
    )  # fmt: skip


def of_experts(shelf: Shelf) -> Iterator[Variant]:
    """The same of the passes of experts that multiply nothing."""
    floats, integers = partial(shelf, dtype=torch.float32), partial(shelf, dtype=torch.int32)
    for launcher, arguments in (
        (weighted_activation_forward, lambda: (shelf(64, 512), "silu", floats(64))),
        (weighted_activation_backward, lambda: (shelf(64, 256), shelf(64, 512), "silu", floats(64))),
        (combine, lambda: (shelf(128, 512), integers(128), integers(64, 2))),
        (route_forward, lambda: (floats(64, 16), Policy(2), floats(16))),
        (route_backward, lambda: (floats(64, 2), integers(64, 2), floats(64, 16), Policy(2), floats(64, 16))),
    ):
        yield launcher.__name__, True, lambda key, call=(launcher, arguments): (call[0], call[1](), {})


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
    every = [
        *gemms(shelf), *grouped(shelf), *fused(shelf, channel), *rows_alone(shelf), *of_experts(shelf), *own(shelf),
    ]  # fmt: skip
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
    return {
        **kept,
        "replayed": len(done),
        "before": before,
        "alive": sum(each() is not None for each in watched),
    }

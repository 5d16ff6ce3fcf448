"""Calls of every launcher, with tensors from memory that is handed out again in the same order.

Belongs here: which calls, and whether they are replayed. replaying.py makes them twice.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checks.driver.stub import memory
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
from tpformer.kernels.protocol import Channel, bump
from tpformer.kernels.rope.kernel import rope_rotate
from tpformer.kernels.route.kernel import route_backward, route_forward
from tpformer.kernels.route.reference import Policy
from tpformer.kernels.weighted_activation.kernel import weighted_activation_backward, weighted_activation_forward

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
    floats, integers = partial(shelf, dtype=torch.float32), partial(shelf, dtype=torch.int32)
    positions, norm = partial(shelf, dtype=torch.int64), partial(Norm, "layernorm", eps=1e-5)

    def wide() -> Tensor:
        return shelf(64, 512)

    def normed(key: int, parts: str) -> tuple:
        return wide(), finish_of(shelf, 64, 512, key, parts)._replace(norm=norm(shelf(512), shelf(512)))

    def dropout(key: int, p: float = 0.25) -> Finish:
        return finish_of(shelf, 64, 512, key, p=p)

    def statistics() -> tuple:
        return floats(64, 1), floats(64, 1)

    for name, launcher, arguments in (
        ("norm", norm_forward, lambda key: (wide(), norm(shelf(512), shelf(512)))),
        ("norm of x itself", finish_norm_forward, lambda key: normed(key, "")),
        ("finish and norm", finish_norm_forward, lambda key: normed(key, "bias dropout residual")),
        (
            "norm's gradient", norm_backward,
            lambda key: (wide(), wide(), statistics(), norm(shelf(512), shelf(512)), wide()),
        ),
        ("dropout 0.25", finish_forward, lambda key: (wide(), dropout(key))),
        ("dropout 0.5", finish_forward, lambda key: (wide(), dropout(key, 0.5))),
        ("bias's gradient alone", finish_backward, lambda key: (wide(), None, True)),
        ("dropout's gradient", finish_backward, lambda key: (wide(), dropout(key).dropout, True)),
        ("activation", activation_forward, lambda key: (wide(), "gelu", None)),
        ("no activation", activation_forward, lambda key: (wide(), None, None)),
        ("activation's gradient", activation_backward, lambda key: (wide(), wide(), "silu", wide())),
        (
            "rope", rope_rotate,
            lambda key: (shelf(64, 4, 64), shelf(64, 2, 64), (floats(64, 32), floats(64, 32)), positions(64)),
        ),
        ("weighted", weighted_activation_forward, lambda key: (wide(), "silu", floats(64))),
        ("weighted, gradient", weighted_activation_backward, lambda key: (shelf(64, 256), wide(), "silu", floats(64))),
        ("combine", combine, lambda key: (shelf(128, 512), integers(128), integers(64, 2))),
        ("route", route_forward, lambda key: (floats(64, 16), Policy(2), floats(16))),
        (
            "route, gradient", route_backward,
            lambda key: (floats(64, 2), integers(64, 2), floats(64, 16), Policy(2), floats(64, 16)),
        ),
    ):  # fmt: skip
        yield name, True, lambda key, call=(launcher, arguments): (call[0], call[1](key), {})
    yield "norm without a weight: ones are made", False, lambda key: (
        norm_forward, (wide(), Norm("rmsnorm", None, None, None)), {},
    )  # fmt: skip

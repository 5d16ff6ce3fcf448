"""The cases of every GEMM and gather, for each architecture, dtype, tile and variant, and the list of all cases.

Belongs here: one function per kernel that communicates or multiplies, listed in KERNELS; memory_bound.py has the
others. Launchers take tensors of device meta with the sizes of a model, as Triton compiles another kernel for integers
that are no multiples of 16.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from tpformer.kernels.all_gather_matmul.kernel import (
    all_gather_matmul,
    all_gather_matmul_derivative,
    await_gathered,
    gathered_copy,
)
from tpformer.kernels.configurations import TILES, tile_names
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.protocol import ERROR_WORDS, Channel, bump, poll_in_vain

from .cases import CAPABILITIES, DTYPES, Case, meta
from .memory_bound import MEMORY_BOUND

WORLD = 8
M, N, K = 8192, 4096, 2048
ROWS = M // WORLD
PROGRAMS = 132
OWN = frozenset(("shard", "a", "problem"))
OPERANDS = OWN | {f"{name}{i}" for name in ("a", "b") for i in range(3)}


def channel(served: int = 1) -> Channel:
    """A workspace without memory, large enough for every case. It serves virtual ranks if `served` is above 1."""
    capacity, flags = 1 << 34, 1 << 16
    tables, words = partial(meta, dtype=torch.int64), partial(meta, dtype=torch.int32)
    slots = (meta(served * capacity, dtype=torch.uint8), meta(served * capacity, dtype=torch.uint8))
    return Channel(
        rank=0,
        served=served,
        world=WORLD,
        data=tables(served, WORLD),
        flags=tables(served, WORLD),
        epoch=words(served),
        error=words(served, ERROR_WORDS.value),
        stopped=words(served, 2),
        slots=slots,
        parity_stride=served * capacity,
        capacity=capacity,
        writer_flags=flags,
        limit=10**6,
        counters=words(served, WORLD * flags),
    )


Variant = tuple[str, Callable[[torch.dtype, Tile], object]]


def gemm(kernel: str, variants: Sequence[Variant], **expected) -> Iterator[Case]:
    """The cases of a GEMM's variants: one for each architecture, dtype and tile. expected: other fields of Case."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            for tile in (TILES[name] for name in tile_names(capability, dtype.itemsize)):
                for name, launch in variants:
                    yield Case(
                        name=name,
                        kernel=kernel,
                        dtype=dtype,
                        capability=capability,
                        tile=tile,
                        launch=partial(launch, dtype, tile),
                        **expected,
                    )


def weights(dtype: torch.dtype, *, transposed: bool = False, several: bool = False) -> list[Tensor]:
    """One weight (N, K), or three of which two are narrower; transposed: (K, N)."""
    widths = (N, N // 4, N // 4) if several else (N,)
    return [meta(K, n, dtype=dtype) if transposed else meta(n, K, dtype=dtype) for n in widths]


def biases(dtype: torch.dtype, several: bool = False) -> list[Tensor]:
    """The biases of these weights."""
    return [meta(len(w), dtype=dtype) for w in weights(dtype, several=several)]


def all_parts(rows: int, dtype: torch.dtype) -> Finish:
    """A finish with a bias, dropout and a residual."""
    dropout = Dropout(meta(rows, dtype=torch.int64), 1 << 63, 0.1)
    return Finish(meta(N, dtype=dtype), dropout, meta(rows, N, dtype=dtype))


def matmul_cases() -> Iterator[Case]:
    """The cases of matmul_kernel."""

    def forward(dtype, tile):
        matmul(
            meta(M, K, dtype=dtype), weights(dtype, several=True), biases(dtype, several=True),
            activation="gelu", tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def plain(dtype, tile):
        matmul(meta(M, K, dtype=dtype), weights(dtype), tile=tile, programs=PROGRAMS)

    def dgrad(dtype, tile):
        w = weights(dtype, transposed=True)
        matmul(meta(M, K, dtype=dtype), w, b_transposed=True, tile=tile, programs=PROGRAMS)

    def wgrad(dtype, tile):
        matmul(
            meta(M, N, dtype=dtype), [meta(M, K, dtype=dtype)],
            a_transposed=True, b_transposed=True, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def derivative(dtype, tile, gated):
        x = meta(M, N, dtype=dtype)
        w = weights(dtype, transposed=True)[0]
        matmul_derivative(
            meta(M, K, dtype=dtype), w, x, "silu" if gated else "gelu", x if gated else None,
            tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    yield from gemm(
        "matmul_kernel",
        [
            ("plain", plain),
            ("3 weights, bias, gelu", forward),
            ("dgrad", dgrad),
            ("wgrad", wgrad),
            ("derivative", partial(derivative, gated=False)),
            ("gated derivative", partial(derivative, gated=True)),
        ],
    )


def all_gather_matmul_cases() -> Iterator[Case]:
    """The cases of all_gather_matmul_kernel."""

    def forward(dtype, tile, push, several, served=1):
        all_gather_matmul(
            meta(served * ROWS, K, dtype=dtype),
            [meta(served * len(w), K, dtype=dtype) for w in weights(dtype, several=several)],
            channel(served), [meta(served * len(b), dtype=dtype) for b in biases(dtype, several)],
            push=push, keep=push, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def derivative(dtype, tile, gated):
        x = meta(M, N, dtype=dtype)
        all_gather_matmul_derivative(
            meta(ROWS, K, dtype=dtype), weights(dtype, transposed=True)[0], channel(), x,
            "silu" if gated else "gelu_tanh", x if gated else None, keep=True, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def dgrad(dtype, tile):
        w = weights(dtype, transposed=True)
        all_gather_matmul(
            meta(ROWS, K, dtype=dtype), w, channel(), b_transposed=True, keep=True, tile=tile, programs=PROGRAMS
        )

    kernel, expected = "all_gather_matmul_kernel", {"acquires": 2, "own": OPERANDS}
    copies = [("copies", partial(forward, push=False, several=False))]
    yield from gemm(kernel, copies, releases=1, **expected)
    pushes: list[Variant] = [
        ("3 weights, push", partial(forward, push=True, several=True)),
        ("virtual ranks", partial(forward, push=True, several=False, served=WORLD)),
        ("dgrad", dgrad),
        ("derivative", partial(derivative, gated=False)),
        ("gated derivative", partial(derivative, gated=True)),
    ]
    yield from gemm(kernel, pushes, releases=2, **expected)


def matmul_reduce_scatter_cases() -> Iterator[Case]:
    """The cases of matmul_reduce_scatter_kernel."""

    def forward(dtype, tile, served=1):
        end = all_parts(served * ROWS, dtype)._replace(bias=meta(served * N, dtype=dtype))
        matmul_reduce_scatter(
            [meta(served * M, K, dtype=dtype)], [meta(served * N, K, dtype=dtype)], channel(served), end,
            tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def dgrad(dtype, tile, partial):
        matmul_reduce_scatter(
            [meta(M, K, dtype=dtype)] * 3, weights(dtype, transposed=True) * 3, channel(),
            b_transposed=True, partial=partial, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    variants: list[Variant] = [
        ("finish", forward),
        ("virtual ranks", partial(forward, served=WORLD)),
        ("3 inputs", partial(dgrad, partial=None)),
        ("3 inputs, float32 partials", partial(dgrad, partial=torch.float32)),
    ]
    expected = {"releases": 2, "acquires": 2, "local_atomics": 1}
    yield from gemm("matmul_reduce_scatter_kernel", variants, own=OPERANDS, **expected)


def matmul_all_reduce_cases() -> Iterator[Case]:
    """The cases of matmul_all_reduce_kernel."""

    def forward(dtype, tile, m, one_shot):
        matmul_all_reduce(
            [meta(m, K, dtype=dtype)], weights(dtype), channel(), all_parts(m, dtype),
            one_shot=one_shot, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def dgrad(dtype, tile):
        matmul_all_reduce(
            [meta(M, K, dtype=dtype)] * 3, weights(dtype, transposed=True) * 3, channel(),
            b_transposed=True, one_shot=False, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    kernel = "matmul_all_reduce_kernel"
    one_shot = [("one-shot", partial(forward, m=64, one_shot=True))]
    yield from gemm(kernel, one_shot, releases=2, acquires=2, own=OPERANDS)
    two_shot: list[Variant] = [("two-shot", partial(forward, m=M, one_shot=False)), ("two-shot, 3 inputs", dgrad)]
    yield from gemm(kernel, two_shot, releases=4, acquires=4, own=OPERANDS)


def gather_cases() -> Iterator[Case]:
    """The gather that runs under a reducing GEMM, what begins an operation and what times polls: nothing multiplies."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            x = meta(M, 512, dtype=dtype)
            launches = {
                "await_gathered_kernel": (partial(await_gathered, channel(), x, True), 1),
                "copy_slot_kernel": (partial(gathered_copy, channel(), x), 0),
            }
            for kernel, (launch, count) in launches.items():
                yield Case(
                    name="8 ranks", kernel=kernel, dtype=dtype, capability=capability, launch=launch,
                    releases=2 * count, acquires=2 * count, own=OWN,
                )  # fmt: skip
        flags = {"dtype": torch.int32, "capability": capability}
        yield Case(name="1 rank", kernel="bump_kernel", launch=partial(bump, channel()), **flags)
        polls = partial(poll_in_vain, meta(1, dtype=torch.int32), 1 << 14)
        yield Case(name="1 rank", kernel="poll_in_vain_kernel", launch=polls, acquires=2, **flags)


KERNELS: tuple[Callable[[], Iterator[Case]], ...] = (
    matmul_cases,
    all_gather_matmul_cases,
    matmul_reduce_scatter_cases,
    matmul_all_reduce_cases,
    gather_cases,
    *MEMORY_BOUND,
)


def cases() -> list[Case]:
    """All cases of the kernels that ship."""
    return [case for kernel in KERNELS for case in kernel()]

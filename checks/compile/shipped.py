"""The cases of every GEMM and gather, for each architecture, dtype, tile and variant, and the list of all cases.

Belongs here: one function per kernel that communicates or multiplies, listed in KERNELS; the files imported below have
others. Launchers take meta tensors of a model's sizes: for integers no multiples of 16 Triton compiles other kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_grouped_matmul
from tpformer.kernels.all_gather_matmul.kernel import (
    all_gather_matmul,
    all_gather_matmul_derivative,
    await_gathered,
    gathered_copy,
)
from tpformer.kernels.all_gather_matmul.plan import IN_FLIGHT
from tpformer.kernels.configurations import TILES, narrow_tile_names, tile_names
from tpformer.kernels.finish import Dropout, Finish
from tpformer.kernels.grouped_matmul.kernel import grouped_matmul, grouped_weight_gradient
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul.kernel import matmul, matmul_derivative
from tpformer.kernels.matmul_all_reduce.kernel import matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import matmul_reduce_scatter
from tpformer.kernels.protocol import bump, poll_in_vain

from .cases import CAPABILITIES, DTYPES, WORLD, Case, channel, meta, meta_packed
from .memory_bound import MEMORY_BOUND
from .quantized import QUANTIZED

M, N, K = 8192, 4096, 2048
ODD = 4001  # columns
ODD_INNER = 2001  # of both factors
NARROW = frozenset(("wide_stores",))  # for ODD columns: most rows do not begin at a multiple of 16 bytes
ROWS = M // WORLD
GROUPS = 16
PROGRAMS = 132
OWN = frozenset(("shard", "a", "problem"))
OPERANDS = OWN | {f"{name}{i}" for name in ("a", "b") for i in range(3)}


Variant = tuple[str, Callable[[torch.dtype, Tile], object]]
Names = Callable[[int, int], Sequence[str]]


def gemm(
    kernel: str, variants: Sequence[Variant], names: Names = tile_names, dtypes: Sequence[torch.dtype] = DTYPES,
    **expected,
) -> Iterator[Case]:  # fmt: skip
    """The cases of a GEMM's variants: one for each architecture, dtype and tile of these names. expected: other fields
    of Case."""
    for capability in CAPABILITIES:
        for dtype in dtypes:
            for tile in (TILES[name] for name in names(capability, dtype.itemsize)):
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


def all_names(capability: int, itemsize: int) -> Sequence[str]:
    """The names of all tiles, those for few rows, too."""
    found = tile_names(capability, itemsize)
    return (*found, *(name for name in narrow_tile_names(capability, itemsize) if name not in found))


def weights(dtype: torch.dtype, *, transposed: bool = False, several: bool = False, columns: int = N) -> list[Tensor]:
    """One weight (columns, K), or three of which two are narrower; transposed: (K, columns)."""
    widths = (columns, columns // 4, columns // 4) if several else (columns,)
    return [meta(K, n, dtype=dtype) if transposed else meta(n, K, dtype=dtype) for n in widths]


def biases(dtype: torch.dtype, several: bool = False, columns: int = N) -> list[Tensor]:
    """The biases of these weights."""
    return [meta(len(w), dtype=dtype) for w in weights(dtype, several=several, columns=columns)]


def all_parts(rows: int, dtype: torch.dtype) -> Finish:
    """A finish with a bias, dropout and a residual."""
    dropout = Dropout(meta(rows, dtype=torch.int64), 1 << 63, 0.1)
    return Finish(meta(N, dtype=dtype), dropout, meta(rows, N, dtype=dtype))


def matmul_cases() -> Iterator[Case]:
    """The cases of matmul_kernel."""

    def forward(dtype, tile, columns=N):
        each = {"several": True, "columns": columns}
        matmul(
            meta(M, K, dtype=dtype), weights(dtype, **each), biases(dtype, **each),
            activation="gelu", tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def plain(dtype, tile, columns=N):
        matmul(meta(M, K, dtype=dtype), weights(dtype, columns=columns), tile=tile, programs=PROGRAMS)

    def dgrad(dtype, tile):
        w = weights(dtype, transposed=True)
        matmul(meta(M, K, dtype=dtype), w, b_transposed=True, tile=tile, programs=PROGRAMS)

    def wgrad(dtype, tile):
        matmul(
            meta(M, N, dtype=dtype), [meta(M, K, dtype=dtype)],
            a_transposed=True, b_transposed=True, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def derivative(dtype, tile, gated, columns=N, packed=False):
        x = meta_packed(M, columns) if packed else meta(M, columns, dtype=dtype)
        w = weights(dtype, transposed=True, columns=columns)[0]
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
        ],
        all_names,
    )
    yield from gemm(
        "matmul_kernel",
        [
            ("derivative", partial(derivative, gated=False)),
            ("gated derivative", partial(derivative, gated=True)),
        ],
        partial(tile_names, operands=3),
    )
    odd: list[Variant] = [
        ("plain, odd columns", partial(plain, columns=ODD)),
        ("3 weights, bias, gelu, odd columns", partial(forward, columns=ODD)),
    ]
    yield from gemm("matmul_kernel", odd, all_names, waived=NARROW)
    odd = [("gated derivative, odd columns", partial(derivative, gated=True, columns=ODD))]
    yield from gemm("matmul_kernel", odd, partial(tile_names, operands=3), waived=NARROW)
    yield from gemm("matmul_kernel", packed_derivatives(derivative), partial(tile_names, operands=3), (torch.bfloat16,))


def packed_derivatives(derivative: Callable) -> list[Variant]:
    """A kernel's derivatives of packed values, which are bfloat16."""
    each = ("packed derivative", False), ("packed gated derivative", True)
    return [(name, partial(derivative, gated=gated, packed=True)) for name, gated in each]


def grouped_matmul_cases() -> Iterator[Case]:
    """The cases of grouped_matmul_kernel and grouped_weight_gradient_kernel: rows side by side, and by an index."""

    def product(dtype, tile, indexed=False, transposed=False, columns=N, inner=K):
        grouped_matmul(
            meta(M, inner, dtype=dtype),
            meta(GROUPS, *((inner, columns) if transposed else (columns, inner)), dtype=dtype),
            meta(GROUPS + 1, dtype=torch.int32), meta(2 * M, dtype=torch.int32) if indexed else None,
            transposed=transposed, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def gradient(dtype, tile, of_dy=False, of_x=False, columns=N):
        indices = [meta(M, dtype=torch.int32) if indexed else None for indexed in (of_dy, of_x)]
        grouped_weight_gradient(
            meta(M, columns, dtype=dtype), meta(M, K, dtype=dtype), meta(GROUPS + 1, dtype=torch.int32), *indices,
            tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    kernel = "grouped_matmul_kernel"
    products: list[Variant] = [
        ("rows", product),
        ("indexed rows", partial(product, indexed=True)),
        ("dgrad, rows", partial(product, transposed=True)),
        ("dgrad, indexed rows", partial(product, indexed=True, transposed=True)),
    ]
    products += [
        (f"{name}, odd inner dim", partial(product, inner=ODD_INNER, **options))
        for name, options in (
            ("rows", {}),
            ("indexed rows", {"indexed": True}),
            ("dgrad, indexed rows", {"indexed": True, "transposed": True}),
        )
    ]
    yield from gemm(kernel, products)
    odd: list[Variant] = [("indexed rows, odd columns", partial(product, indexed=True, columns=ODD))]
    yield from gemm(kernel, odd, waived=NARROW)
    gradients: list[Variant] = [
        ("rows", gradient),
        ("indexed dy", partial(gradient, of_dy=True)),
        ("indexed x", partial(gradient, of_x=True)),
    ]
    yield from gemm("grouped_weight_gradient_kernel", gradients)
    odd = [("indexed dy, odd columns", partial(gradient, of_dy=True, columns=ODD))]
    yield from gemm("grouped_weight_gradient_kernel", odd, waived=NARROW)


def all_gather_matmul_cases() -> Iterator[Case]:
    """The cases of all_gather_matmul_kernel."""

    def forward(dtype, tile, push, several, served=1, columns=N):
        stored = weights(dtype, several=several, columns=columns)
        all_gather_matmul(
            meta(served * ROWS, K, dtype=dtype), [meta(served * len(w), K, dtype=dtype) for w in stored],
            channel(served), [meta(served * len(w), dtype=dtype) for w in stored],
            push=push, keep=push, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def derivative(dtype, tile, gated, columns=N, packed=False):
        x = meta_packed(M, columns) if packed else meta(M, columns, dtype=dtype)
        all_gather_matmul_derivative(
            meta(ROWS, K, dtype=dtype), weights(dtype, transposed=True, columns=columns)[0], channel(), x,
            "silu" if gated else "gelu_tanh", x if gated else None, keep=True, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def dgrad(dtype, tile):
        w = weights(dtype, transposed=True)
        all_gather_matmul(
            meta(ROWS, K, dtype=dtype), w, channel(), b_transposed=True, keep=True, tile=tile, programs=PROGRAMS
        )

    kernel = "all_gather_matmul_kernel"
    expected: dict[str, Any] = {"acquires": 2, "own": OPERANDS}
    copies = [("copies", partial(forward, push=False, several=False))]
    yield from gemm(kernel, copies, releases=1, **expected)
    expected |= {"releases": 2, "local_atomics": 1, "in_flight": IN_FLIGHT}
    pushes: list[Variant] = [
        ("3 weights, push", partial(forward, push=True, several=True)),
        ("virtual ranks", partial(forward, push=True, several=False, served=WORLD)),
        ("dgrad", dgrad),
    ]
    yield from gemm(kernel, pushes, **expected)
    derivatives: list[Variant] = [
        ("derivative", partial(derivative, gated=False)),
        ("gated derivative", partial(derivative, gated=True)),
    ]
    yield from gemm(kernel, derivatives, partial(tile_names, operands=3), **expected)
    packed = packed_derivatives(derivative)
    yield from gemm(kernel, packed, partial(tile_names, operands=3), (torch.bfloat16,), **expected)
    odd = [("3 weights, push, odd columns", partial(forward, push=True, several=True, columns=ODD))]
    yield from gemm(kernel, odd, waived=NARROW, **expected)
    odd = [("gated derivative, odd columns", partial(derivative, gated=True, columns=ODD))]
    yield from gemm(kernel, odd, partial(tile_names, operands=3), waived=NARROW, **expected)


def all_gather_grouped_matmul_cases() -> Iterator[Case]:
    """The cases of all_gather_grouped_matmul_kernel."""

    def product(dtype, tile, push=True, transposed=False, columns=N, inner=K):
        words = partial(meta, dtype=torch.int32)
        all_gather_grouped_matmul(
            meta(ROWS, inner, dtype=dtype),
            meta(GROUPS, *((inner, columns) if transposed else (columns, inner)), dtype=dtype),
            channel(), words(WORLD, GROUPS), words(M), transposed=transposed,
            push=push, keep=push, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    kernel = "all_gather_grouped_matmul_kernel"
    # TMA loads the matrices alone, which no rank writes
    expected: dict[str, Any] = {
        "acquires": 2,
        "own": frozenset(("shard", "tokens", "weights", "starts", "problem")),
        "waived": frozenset(("fence_before_tma_load",)),
    }
    yield from gemm(kernel, [("copies", partial(product, push=False))], releases=1, **expected)
    expected |= {"releases": 2, "local_atomics": 1, "in_flight": IN_FLIGHT}
    pushes: list[Variant] = [
        ("push", product),
        ("dgrad", partial(product, transposed=True)),
        ("push, odd inner dim", partial(product, inner=ODD_INNER)),
        ("dgrad, odd inner dim", partial(product, transposed=True, inner=ODD_INNER)),
    ]
    yield from gemm(kernel, pushes, **expected)
    expected["waived"] |= NARROW
    yield from gemm(kernel, [("push, odd columns", partial(product, columns=ODD))], **expected)


def matmul_reduce_scatter_cases() -> Iterator[Case]:
    """The cases of matmul_reduce_scatter_kernel."""

    def forward(dtype, tile, served=1, world=WORLD):
        end = all_parts(served * M // world, dtype)._replace(bias=meta(served * N, dtype=dtype))
        matmul_reduce_scatter(
            [meta(served * M, K, dtype=dtype)], [meta(served * N, K, dtype=dtype)], channel(served, world), end,
            tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    def dgrad(dtype, tile, partial):
        matmul_reduce_scatter(
            [meta(M, K, dtype=dtype)] * 3, weights(dtype, transposed=True) * 3, channel(),
            b_transposed=True, partial=partial, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    variants: list[Variant] = [
        ("finish", forward),
        ("finish, 2 ranks", partial(forward, world=2)),  # more rows at a time
        ("virtual ranks", partial(forward, served=WORLD)),
        ("3 inputs", partial(dgrad, partial=None)),
        ("3 inputs, float32 partials", partial(dgrad, partial=torch.float32)),
    ]
    expected: dict[str, Any] = {"releases": 2, "acquires": 2, "local_atomics": 1}
    for case in gemm("matmul_reduce_scatter_kernel", variants, own=OPERANDS, **expected):
        # for tcgen05 the pipeliner takes the last step out of the loop, with an epilogue of its own
        peeled = case.capability == 100 and case.dtype.itemsize == 2
        yield replace(case, releases=3, local_atomics=2) if peeled else case


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

    kernel, one_shot = "matmul_all_reduce_kernel", partial(forward, m=64, one_shot=True)
    two_shot: list[Variant] = [("two-shot", partial(forward, m=M, one_shot=False)), ("two-shot, 3 inputs", dgrad)]
    # TMA loads a and b alone, which no rank writes during a launch
    expected: dict[str, Any] = {"own": OPERANDS, "waived": frozenset(("fence_before_tma_load",))}
    yield from gemm(
        kernel, [("one-shot", one_shot)], all_names, releases=1, fences=1, flags=WORLD, acquires=2, **expected
    )
    yield from gemm(kernel, two_shot, releases=3, fences=1, flags=WORLD - 1, acquires=4, **expected)


def gather_cases() -> Iterator[Case]:
    """The gather that runs under a reducing GEMM, what begins an operation and what times polls: nothing multiplies."""
    for capability in CAPABILITIES:
        for dtype in DTYPES:
            common = {"dtype": dtype, "capability": capability, "own": OWN}
            gather = {"kernel": "await_gathered_kernel", "acquires": 2, **common}
            for name, width in (("8 ranks", 512), ("8 ranks, odd rows", 516)):
                push = partial(await_gathered, channel(), meta(M + 1, width, dtype=dtype), True)
                yield Case(name=name, launch=push, releases=2, local_atomics=1, in_flight=IN_FLIGHT, **gather)
            x = meta(M, 512, dtype=dtype)
            yield Case(name="copies", launch=partial(await_gathered, channel(), x, False), releases=1, **gather)
            copy = partial(gathered_copy, channel(), x)
            yield Case(name="8 ranks", kernel="copy_slot_kernel", launch=copy, **common)
        flags = {"dtype": torch.int32, "capability": capability}
        yield Case(name="1 rank", kernel="bump_kernel", launch=partial(bump, channel()), **flags)
        polls = partial(poll_in_vain, meta(1, dtype=torch.int32), 1 << 14)
        yield Case(name="1 rank", kernel="poll_in_vain_kernel", launch=polls, acquires=2, **flags)


KERNELS: tuple[Callable[[], Iterator[Case]], ...] = (
    matmul_cases,
    grouped_matmul_cases,
    all_gather_matmul_cases,
    all_gather_grouped_matmul_cases,
    matmul_reduce_scatter_cases,
    matmul_all_reduce_cases,
    gather_cases,
    *MEMORY_BOUND,
    *QUANTIZED,
)


def cases() -> list[Case]:
    """All cases of the kernels that ship."""
    return [case for kernel in KERNELS for case in kernel()]

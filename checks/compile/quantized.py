"""The cases of kernels that make blocks of e4m3, or multiply them, for the architectures that have e4m3.

Belongs here: what KERNELS of shipped.py lists of them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor

from tpformer.kernels.activation.kernel import activation_backward, activation_forward
from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.all_gather_grouped_matmul.kernel import all_gather_quantized_grouped_matmul
from tpformer.kernels.all_gather_matmul.plan import IN_FLIGHT
from tpformer.kernels.all_gather_quantized_matmul.kernel import (
    all_gather_quantized_matmul,
    all_gather_quantized_matmul_derivative,
)
from tpformer.kernels.configurations import TILES, tile_names
from tpformer.kernels.dropout.kernel import finish_backward
from tpformer.kernels.finish import NOTHING, Dropout, Finish, Norm
from tpformer.kernels.launch import Tile
from tpformer.kernels.matmul_all_reduce.kernel import quantized_matmul_all_reduce
from tpformer.kernels.matmul_reduce_scatter.kernel import quantized_matmul_reduce_scatter
from tpformer.kernels.norm.kernel import WIDEST_BACKWARD, finish_norm_forward, norm_backward, norm_forward
from tpformer.kernels.quantize.format import (
    BLOCK,
    EXPONENTS,
    VALUES,
    Blocks,
    row_exponents,
    shard_bytes,
    weight_exponents,
)
from tpformer.kernels.quantize.kernel import (
    dequantize,
    dequantize_shards,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
    quantize_weight_twice,
)
from tpformer.kernels.quantized_grouped_matmul.kernel import quantized_grouped_matmul
from tpformer.kernels.quantized_matmul.kernel import quantized_matmul

from . import memory_bound
from .cases import CAPABILITIES, DTYPES, WORLD, Case, channel, meta, meta_packed

PROGRAMS = 132


def rows_of(m: int, k: int) -> Blocks:
    """Blocks of rows, without memory."""
    return Blocks(meta(m, k, dtype=VALUES), meta(*row_exponents(m, k), dtype=EXPONENTS))


def weight_of(n: int, k: int) -> Blocks:
    """Blocks of a weight, without memory."""
    return Blocks(meta(n, k, dtype=VALUES), meta(*weight_exponents(n, k), dtype=EXPONENTS))


def shards_of(ranks: int, n: int, k: int, dtype: torch.dtype) -> tuple[Blocks, Tensor]:
    """Blocks of a weight's shards (n, k), of which each rank has sent 16 bytes more, and what they become."""
    sent = n * k + n * k // BLOCK**2 + 16
    values, exponents = (meta(ranks, sent, dtype=kind)[:, : n * k] for kind in (VALUES, EXPONENTS))
    blocks = Blocks(values.view(ranks, n, k), exponents[:, : n * k // BLOCK**2].view(ranks, *weight_exponents(n, k)))
    return blocks, meta(ranks, 2 * n * k, dtype=dtype)[:, : n * k].view(ranks, n, k)


def quantize_cases() -> Iterator[Case]:
    """Rows and weights there and back, for the architectures that have e4m3."""
    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            x = meta(8192, 4096, dtype=dtype)
            launches = {
                ("quantize_rows_kernel", ""): partial(quantize_rows, x),
                ("quantize_weight_kernel", "one copy"): partial(quantize_weight, x),
                ("quantize_weight_kernel", "two copies"): partial(quantize_weight_twice, x),
                ("dequantize_kernel", "rows"): partial(dequantize, rows_of(8192, 4096), dtype),
                ("dequantize_kernel", "weight"): partial(dequantize_weight, weight_of(8192, 4096), dtype),
                ("dequantize_kernel", "shards"): partial(dequantize_shards, *shards_of(8, 1024, 4096, dtype)),
            }
            for (kernel, name), launch in launches.items():
                yield Case(name=name, kernel=kernel, dtype=dtype, capability=capability, launch=launch)


def blocks_cases() -> Iterator[Case]:
    """Norms of rows of one tile, several rows in it, and wider rows, activations, and gradients behind dropout and a
    bias, whose results are blocks; and gradients of norms and activations, which have blocks beside them."""
    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            same = {"dtype": dtype, "capability": capability}
            for n in (128, 768, 4096, 5120, 16384, 32768):
                x = meta(8192, n, dtype=dtype)
                norm = Norm("layernorm", meta(n, dtype=dtype), meta(n, dtype=dtype), 1e-5)
                launches: dict[str, Callable[[], object]] = {
                    "blocks": partial(norm_forward, x, norm, blocks=True),
                    "blocks finish": partial(
                        finish_norm_forward, x, memory_bound.row_finish(dtype, n, norm), blocks=True
                    ),
                }
                for name, launch in launches.items():
                    yield Case(name=f"{name} {n}", kernel="norm_forward_kernel", launch=launch, **same)
                kernel = "wide_norm_backward_kernel" if n > WIDEST_BACKWARD else "norm_backward_kernel"
                for form, kept in [("", x), *([("packed ", meta_packed(8192, n))] if dtype == torch.bfloat16 else [])]:
                    statistics = (meta(8192, 1, dtype=torch.float32),) * 2
                    launch = partial(norm_backward, x, kept, statistics, norm, x, blocks=True, programs=PROGRAMS)
                    yield Case(name=f"{form}blocks {n}", kernel=kernel, launch=launch, **same)
            x = meta(8192, 4096, dtype=dtype)
            dropout = memory_bound.row_finish(dtype, 4096).dropout
            for name, given in {
                "dropout": (dropout, True),
                "no dropout": (None, True),
                "no bias": (dropout, False),
            }.items():
                launch = partial(finish_backward, x, *given, blocks=True, programs=memory_bound.PROGRAMS)
                yield Case(name=f"blocks {name}", kernel="finish_backward_kernel", launch=launch, **same)
            for name, gate in ((each, each == "silu") for each in ACTIVATIONS):
                launch = partial(activation_forward, x, name, x if gate else None, blocks=True)
                yield Case(name=name, kernel="activation_blocks_kernel", launch=launch, **same)
                kept = {"": x, "packed ": meta_packed(8192, 4096)} if dtype == torch.bfloat16 else {"": x}
                for form, value in kept.items():
                    launch = partial(activation_backward, x, value, name, value if gate else None, blocks=True)
                    yield Case(name=form + name, kernel="activation_backward_blocks_kernel", launch=launch, **same)


def quantized_matmul_cases() -> Iterator[Case]:
    """Products with and without a bias, with each tile."""

    def product(bias: Tensor | None, **options) -> None:
        quantized_matmul(rows_of(8192, 2048), weight_of(4096, 2048), bias, programs=PROGRAMS, **options)

    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            for tile in (TILES[name] for name in tile_names(capability, VALUES.itemsize)):
                for name, bias in (("plain", None), ("bias", meta(4096, dtype=dtype))):
                    yield Case(
                        name=name, kernel="quantized_matmul_kernel", dtype=dtype, capability=capability, tile=tile,
                        launch=partial(product, bias, dtype=dtype, tile=tile),
                    )  # fmt: skip


def quantized_grouped_matmul_cases() -> Iterator[Case]:
    """Products of groups, with rows side by side and by an index, with both copies of the weights, with each tile."""

    def product(indexed: bool, transposed: bool, **options) -> None:
        groups, rows, n, k = 16, 8192, 1536, 2048
        weights = weight_of(n, groups * k) if transposed else weight_of(groups * n, k)
        index = meta(rows, dtype=torch.int32) if indexed else None
        quantized_grouped_matmul(
            rows_of(rows, k), weights, meta(groups + 1, dtype=torch.int32), index, transposed=transposed,
            programs=PROGRAMS, **options,
        )  # fmt: skip

    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            for tile in (TILES[name] for name in tile_names(capability, VALUES.itemsize)):
                for indexed, transposed in product_of((False, True), repeat=2):
                    yield Case(
                        name="dgrad, " * transposed + "indexed " * indexed + "rows",
                        kernel="quantized_grouped_matmul_kernel", dtype=dtype, capability=capability, tile=tile,
                        launch=partial(product, indexed, transposed, dtype=dtype, tile=tile),
                    )  # fmt: skip


def all_gather_quantized_matmul_cases() -> Iterator[Case]:
    """Gathers by copies and by pushes, of one rank and of virtual ranks, and with an activation's derivative."""
    m, n, k = 8192, 4096, 2048
    shard = partial(meta, dtype=torch.uint8)
    nbytes = shard_bytes(m // WORLD, k)

    def forward(push: bool, widths: tuple[int, ...] = (n,), served: int = 1, **options) -> None:
        weights = [weight_of(served * width, k) for width in widths]
        biases = [meta(len(w.values), dtype=options["dtype"]) for w in weights]
        all_gather_quantized_matmul(
            shard(served, nbytes), weights, channel(served, piece=nbytes), biases, push=push, keep=push,
            programs=PROGRAMS, **options,
        )  # fmt: skip

    def derivative(gated: bool, dtype: torch.dtype, tile: Tile, packed: bool = False) -> None:
        x = meta_packed(m, n) if packed else meta(m, n, dtype=dtype)
        all_gather_quantized_matmul_derivative(
            shard(1, nbytes), weight_of(n, k), channel(), x, "silu" if gated else "gelu_tanh", x if gated else None,
            keep=True, tile=tile, programs=PROGRAMS,
        )  # fmt: skip

    launches: dict[str, Callable[..., object]] = {
        "copies": partial(forward, False),
        "3 weights, push": partial(forward, True, (n, n // 4, n // 4)),
        "virtual ranks": partial(forward, True, served=WORLD),
        "derivative": partial(derivative, False),
        "gated derivative": partial(derivative, True),
    }
    packed = {
        "packed derivative": partial(derivative, False, packed=True),
        "packed gated derivative": partial(derivative, True, packed=True),
    }
    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            for tile in (TILES[name] for name in tile_names(capability, VALUES.itemsize)):
                for name, launch in (launches | (packed if dtype == torch.bfloat16 else {})).items():
                    pushes = name != "copies"
                    yield Case(
                        name=name, kernel="all_gather_quantized_matmul_kernel", dtype=dtype, capability=capability,
                        tile=tile, launch=partial(launch, dtype=dtype, tile=tile), acquires=2, releases=1 + pushes,
                        local_atomics=int(pushes), in_flight=IN_FLIGHT * pushes,
                        own=frozenset(("shard", "a", "problem", "b0", "b1", "b2")),
                    )  # fmt: skip


def all_gather_quantized_grouped_matmul_cases() -> Iterator[Case]:
    """Gathers for experts by copies and by pushes, with both copies of the weights, also of virtual ranks. The kernel
    is that of 16 bits."""
    tokens, n, k, groups = 8192, 1536, 2048, 16
    nbytes = shard_bytes(tokens // WORLD, k)

    def product(push: bool, transposed: bool, served: int = 1, **options) -> None:
        words = partial(meta, dtype=torch.int32)
        weights = weight_of(served * n, groups * k) if transposed else weight_of(served * groups * n, k)
        all_gather_quantized_grouped_matmul(
            meta(served, nbytes, dtype=torch.uint8), weights, channel(served, piece=nbytes),
            words(served * WORLD, groups), words(served * tokens), transposed=transposed, push=push, keep=push,
            programs=PROGRAMS, **options,
        )  # fmt: skip

    launches: dict[str, Callable[..., object]] = {
        "blocks, copies": partial(product, False, False),
        "blocks, push": partial(product, True, False),
        "blocks, dgrad": partial(product, True, True),
        "blocks, virtual ranks": partial(product, True, True, served=WORLD),
    }
    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            for tile in (TILES[name] for name in tile_names(capability, VALUES.itemsize)):
                for name, launch in launches.items():
                    pushes = name != "blocks, copies"
                    # TMA loads the matrices alone, which no rank writes
                    yield Case(
                        name=name, kernel="all_gather_grouped_matmul_kernel", dtype=dtype, capability=capability,
                        tile=tile, launch=partial(launch, dtype=dtype, tile=tile), acquires=2, releases=1 + pushes,
                        local_atomics=int(pushes), in_flight=IN_FLIGHT * pushes,
                        own=frozenset(("shard", "tokens", "weights", "starts", "problem")),
                        waived=frozenset(("fence_before_tma_load",)),
                    )  # fmt: skip


def quantized_reduction_cases() -> Iterator[Case]:
    """The reductions of one product with a finish, also of virtual ranks, and of three products. The kernels are those
    of 16 bits."""
    n, k = 4096, 2048

    def factors(m: int, inputs: int, served: int = 1) -> tuple[list[Blocks], list[Blocks]]:
        return [rows_of(served * m, k)] * inputs, [weight_of(served * n, k)] * inputs

    def finish(rows: int, dtype: torch.dtype, served: int = 1) -> Finish:
        dropout = Dropout(meta(rows, dtype=torch.int64), 1 << 63, 0.1)
        return Finish(meta(served * n, dtype=dtype), dropout, meta(rows, n, dtype=dtype))

    def scatter(inputs: int, served: int = 1, **options) -> None:
        end = finish(served * 8192 // WORLD, options["dtype"], served) if inputs == 1 else NOTHING
        given = *factors(8192, inputs, served), channel(served), end
        quantized_matmul_reduce_scatter(*given, programs=PROGRAMS, **options)

    def all_reduce(inputs: int, m: int, one_shot: bool, **options) -> None:
        end = finish(m, options["dtype"]) if inputs == 1 else NOTHING
        given = *factors(m, inputs), channel(), end
        quantized_matmul_all_reduce(*given, one_shot=one_shot, programs=PROGRAMS, **options)

    own = frozenset(("problem", *(f"{side}{i}" for side in "ab" for i in range(3))))
    common: dict[str, Any] = {"acquires": 2, "own": own}
    of_scatter = common | {"kernel": "matmul_reduce_scatter_kernel", "releases": 2, "local_atomics": 1}
    # no rank writes what TMA loads
    common |= {"kernel": "matmul_all_reduce_kernel", "waived": frozenset(("fence_before_tma_load",)), "fences": 1}
    of_one_shot = common | {"releases": 1, "flags": WORLD}
    of_two_shot = common | {"releases": 3, "flags": WORLD - 1, "acquires": 4}
    launches: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
        "blocks, finish": (partial(scatter, 1), of_scatter),
        "blocks, virtual ranks": (partial(scatter, 1, served=WORLD), of_scatter),
        "blocks, 3 inputs": (partial(scatter, 3), of_scatter),
        "blocks, one-shot": (partial(all_reduce, 1, 64, True), of_one_shot),
        "blocks, two-shot": (partial(all_reduce, 1, 8192, False), of_two_shot),
        "blocks, two-shot, 3 inputs": (partial(all_reduce, 3, 8192, False), of_two_shot),
    }
    for capability in CAPABILITIES:
        for dtype in DTYPES if capability >= 90 else ():
            for tile in (TILES[name] for name in tile_names(capability, VALUES.itemsize)):
                for name, (launch, expected) in launches.items():
                    yield Case(
                        name=name, dtype=dtype, capability=capability, tile=tile,
                        launch=partial(launch, dtype=dtype, tile=tile), **expected,
                    )  # fmt: skip


QUANTIZED: tuple[Callable[[], Iterator[Case]], ...] = (
    quantize_cases,
    blocks_cases,
    quantized_matmul_cases,
    quantized_grouped_matmul_cases,
    all_gather_quantized_matmul_cases,
    all_gather_quantized_grouped_matmul_cases,
    quantized_reduction_cases,
)

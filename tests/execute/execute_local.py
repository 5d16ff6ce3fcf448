"""Every kernel that does not communicate, compiled for sm_80 and executed, equals its reference; nothing races. GEMMs
do so also with the tiles that ship, as their launchers pick them; the other kernels have those anyway.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import row_checks
import test_activation_kernel as activations
import test_combine_kernel as combinations
import test_cross_entropy_kernel as losses
import test_dropout_kernel as dropouts
import test_grouped_matmul_kernel as groups
import test_matmul_kernel as matmuls
import test_norm_kernel as norms
import test_pack_kernel as packing
import test_rope_kernel as ropes
import test_route_kernel as routes
import test_update_kernel as updates
import test_weighted_activation_kernel as weighted
import torch
from execution import DTYPES, FEW, PLAIN, SCHEDULES, SHIPPED, TILE, executing

from tpformer.kernels.configurations import TILES, narrow_tile_names, select_local_tile, tile_names
from tpformer.kernels.matmul.kernel import matmul_derivative
from tpformer.kernels.matmul.reference import matmul_derivative_reference

BF16, _, FP32 = DTYPES
NAMES = [*activations.ACTIVATIONS]


def grouped(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    for check in (groups.products, groups.gradients):
        check(groups.kernel(), counts, 21, 19, dtype, "cpu", TILE)


def norm(case: tuple, dtype: torch.dtype) -> None:
    kind, rows, n, options = case
    x, dy, dresidual = row_checks.draw(n, dtype, "cpu", *[(rows, n)] * 3)
    weights = row_checks.draw_norm(n, n, kind, dtype)
    row_checks.check_norm(norms.kernel(), x, weights, dy, dresidual, **options)


def activation(name: str, dtype: torch.dtype) -> None:
    for gated in (False, True):
        activations.check(activations.kernel, name, gated, *activations.draw((7, 13), dtype))


def cross_entropy(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    vocab, padding, per_slice = case
    for terms in losses.TERMS[:2]:
        losses.check(losses.kernel(), losses.draw(vocab, 3, vocab, padding, dtype), per_slice, vocab, terms)


def weighted_activation(case: tuple, dtype: torch.dtype) -> None:
    *shape, name = case
    weighted.check(weighted.kernel, name, *weighted.draw(*shape, dtype))


def pack() -> None:
    mixes = packing.mixes()
    del mixes["every pattern"]  # another mix has the same patterns, shuffled
    with mock.patch.object(packing, "mixes", lambda: mixes):
        packing.equals_the_reference()


# the check, and what it takes: each in bfloat16, the first also in the other dtypes
IN_DTYPES: dict[str, tuple[Callable[[Any, torch.dtype], None], list]] = {
    "layouts of matmul": (lambda shape, dtype: matmuls.layouts(*shape, dtype, "cpu", TILE),
        [(17, 37, 19), (1, 1, 1), (16, 32, 48)]),
    "groups": (grouped, [*groups.COUNTS]),
    "norm": (norm, [
        ("layernorm", 5, 33, {}), ("rmsnorm", 5, 33, {}), ("layernorm", 3, 64, {}),
        ("layernorm", 5, 33, {"widest": 16}), ("rmsnorm", 5, 33, {"widest": 16}),
    ]),
    "activation": (activation, NAMES),
    "rope": (lambda shape, dtype: ropes.check(ropes.kernel, shape, dtype), [(3, 2, 1, 6), (11, 7, 1, 128)]),
    "finish": (lambda shape, dtype: dropouts.check_finish(dropouts.kernel(), *shape, dtype), [(5, 7), (3, 36)]),
    "cross entropy": (cross_entropy, [(33, 31, 16), (17, 0, 17)]),
    "weighted activation": (weighted_activation,
        [*((3, 48, name) for name in weighted.ACTIVATIONS), (1, 1, "silu"), (2, 1033, "silu")]),
    "combine": (
        lambda shape, dtype: combinations.check(combinations.kernel, *combinations.draw(*shape, dtype)),
        [(7, 3, 13), (3, 4, 1040), (5, 8, 32)],
    ),
}  # fmt: skip
CASES: dict[str, Callable[[], None]] = {
    f"{name} {value} {dtype}": partial(check, value, dtype)
    for name, (check, values) in IN_DTYPES.items()
    for value, dtype in [*((value, BF16) for value in values), *((values[0], dtype) for dtype in DTYPES[1:])]
}
CASES |= {
    **{f"epilogue {name}": partial(matmuls.epilogues, 17, 37, 19, BF16, "cpu", TILE, [name]) for name in NAMES},
    **{f"packed values in {name}": partial(packing.activations_of_packed, 7, 24, name) for name in NAMES},
    "epilogues": partial(matmuls.epilogues, 17, 37, 19, FP32, "cpu", TILE, [None, NAMES[0]]),
    "packing": pack,
    "derivatives of packed values": partial(packing.derivatives_of_packed, 17, 40, 19, TILE),
    # more than a program has threads, so that warps add up the row blocks of all through shared memory
    "many groups": partial(groups.products, groups.kernel(), (1, 0, 2) * 33, 5, 3, BF16, "cpu", TILE),
    "ties of route": partial(routes.ties, routes.kernel),
    "strange logits": partial(routes.strange_logits, routes.kernel),
    **{
        f"route {case}": partial(routes.check, routes.kernel, *case, FP32)
        for case in [*routes.CASES[::2], *routes.LARGE]
    },
    **{
        f"norm of packed rows {kind} {rows} {n}": partial(packing.norms_of_packed, rows, n, kind, **options)
        for kind, rows, n, options in (
            ("layernorm", 5, 40, {}), ("rmsnorm", 3, 64, {}), ("rmsnorm", 5, 48, {"widest": 16}),
        )
    },
}  # fmt: skip
SEVERAL_ORDERS = ("layouts of matmul (17, 37, 19) torch.bfloat16", f"groups {groups.COUNTS[0]} torch.bfloat16")
ORDERS = {name: SCHEDULES for name in SEVERAL_ORDERS} | {"many groups": SCHEDULES[1:2]}


@pytest.mark.parametrize("name", CASES)
def test_compiled_code_equals_its_reference(name: str) -> None:
    for schedule in ORDERS.get(name, (PLAIN,)):
        with executing(schedule):
            CASES[name]()


@pytest.mark.parametrize("name", updates.VARIANTS)
def test_compiled_updates_have_the_bits_of_separate_operations(name: str) -> None:
    """A launch has the addresses of tensors in a table, so the executor is told of them."""
    with executing() as run:
        for dtypes in ((BF16, FP32), *([DTYPES[1:2]] if name == "adamw" else [])):
            updates.check(updates.VARIANTS[name], dtypes, BF16, reach=lambda tensors: run.memory.add(*tensors))


# name of a tile -> (dtype, rows of each group, N, K)
GROUPED: dict = {
    "ampere": (BF16, (136, 40), 250, 176), "ampere_small": (BF16, (24, 0, 104), 40, 264),
    "exact": (FP32, (32, 0, 40), 40, 56),
}  # fmt: skip


def test_these_are_all_tiles_that_ship() -> None:
    assert ORDERS.keys() <= CASES.keys()
    assert set(SHIPPED) == set(GROUPED) == {*tile_names(80, 2), *tile_names(80, 4)}
    assert len({(SHIPPED[name][0], TILES[name].warps) for name in SHIPPED}) == len(SHIPPED)
    assert set(FEW) == {*narrow_tile_names(80, 2), *narrow_tile_names(80, 4)}


@pytest.mark.parametrize("name", SHIPPED)
def test_tiles_that_ship(name: str) -> None:
    dtype, (m, n, k) = SHIPPED[name]
    a, w, x, gate = matmuls.draw(1, dtype, "cpu", (m, k), (k, n), (m, n), (m, n))
    with executing(tile=name):
        matmuls.layouts(m, n, k, dtype, "cpu", None)
        outputs = matmul_derivative(a, w, x, "gelu", gate)
    matmuls.close(outputs, matmul_derivative_reference, a, w, x, "gelu", gate)
    dtype, *case = GROUPED[name]
    with executing(tile=name):
        for check in (groups.products, groups.gradients):
            check(groups.kernel(), *case, dtype, "cpu", None)


@pytest.mark.parametrize("name", FEW)
def test_tiles_for_few_rows(name: str) -> None:
    """The widest tile that gives every SM a program."""
    dtype, shape = FEW[name]
    with executing(tile=name):
        assert select_local_tile(torch.device("cuda"), dtype, *shape[:2]) == TILES[name]
        matmuls.layouts(*shape, dtype, "cpu", None)

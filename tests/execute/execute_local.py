"""Every kernel that does not communicate, compiled for sm_80 and executed, equals its reference; nothing races.

`make execute` names this file; `make test` does not collect it, because compiling takes minutes.
"""

from typing import Any

import pytest
import torch
from execution import DTYPES, PLAIN, SCHEDULES, TILE, executing

pytest.importorskip("triton")

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
import test_weighted_activation_kernel as weighted


def in_dtypes(name: str, *values: Any) -> pytest.MarkDecorator:
    """Run a test for each value in bfloat16, and for the first one in the other dtypes."""
    pairs = [*((value, torch.bfloat16) for value in values), *((values[0], dtype) for dtype in DTYPES[1:])]
    return pytest.mark.parametrize(f"{name}, dtype", pairs, ids=str)


@in_dtypes("shape", (17, 37, 19), (1, 1, 1), (16, 32, 48))
def test_layouts_of_matmul(shape, dtype) -> None:
    for schedule in SCHEDULES if shape[0] == 17 and dtype == torch.bfloat16 else (PLAIN,):
        with executing(schedule):
            matmuls.layouts(*shape, dtype, "cpu", TILE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_epilogues_of_matmul(dtype) -> None:
    each = (None, *activations.ACTIVATIONS)
    with executing():
        matmuls.epilogues(17, 37, 19, dtype, "cpu", TILE, each if dtype == torch.bfloat16 else each[:2])


@in_dtypes("counts", *groups.COUNTS)
def test_groups(counts, dtype) -> None:
    for schedule in SCHEDULES if counts == groups.COUNTS[0] and dtype == torch.bfloat16 else (PLAIN,):
        with executing(schedule):
            for check in (groups.products, groups.gradients):
                check(groups.kernel(), counts, 21, 19, dtype, "cpu", TILE)


def test_many_groups() -> None:
    """More than a program has threads, so that warps add up the row blocks of all through shared memory."""
    with executing(SCHEDULES[1]):
        groups.products(groups.kernel(), (1, 0, 2) * 33, 5, 3, torch.bfloat16, "cpu", TILE)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@in_dtypes("case", (5, 33, {}), (3, 64, {}), (5, 33, {"widest": 16}))
def test_norms(case, kind, dtype) -> None:
    rows, n, options = case
    x, dy, dresidual = row_checks.draw(n, dtype, "cpu", *[(rows, n)] * 3)
    with executing():
        norm = row_checks.draw_norm(n, n, kind, dtype)
        row_checks.check_norm(norms.kernel(), x, norm, dy, dresidual, **options)


def test_packing() -> None:
    with executing(SCHEDULES[2]):
        packing.equals_the_reference()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("rows, n, options", [(5, 40, {}), (3, 64, {}), (5, 48, {"widest": 16})])
def test_norms_of_packed_rows(rows, n, options, kind) -> None:
    with executing():
        packing.norms_of_packed(rows, n, kind, **options)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activations_of_packed_values(name) -> None:
    with executing():
        packing.activations_of_packed(7, 24, name)


def test_derivatives_of_packed_values() -> None:
    with executing():
        packing.derivatives_of_packed(17, 40, 19, TILE)


@in_dtypes("name", *activations.ACTIVATIONS)
def test_activations(name, dtype) -> None:
    with executing():
        for gated in (False, True):
            activations.check(activations.kernel, name, gated, *activations.draw((7, 13), dtype))


@in_dtypes("shape", (3, 2, 1, 6), (11, 7, 1, 128))
def test_rope(shape, dtype) -> None:
    with executing():
        ropes.check(ropes.kernel, shape, dtype)


@in_dtypes("shape", (5, 7), (3, 36))
def test_finish(shape, dtype) -> None:
    with executing():
        dropouts.check_finish(dropouts.kernel(), *shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype) -> None:
    with executing():
        for vocab, padding, per_slice in ((17, 0, 17), (33, 31, 16)):
            for terms in losses.TERMS[:2]:
                case = losses.draw(vocab, 3, vocab, padding, dtype)
                losses.check(losses.kernel(), case, per_slice, vocab, terms)


@in_dtypes("shape", (3, 48), (1, 1), (2, 1033))
def test_weighted_activations(shape, dtype) -> None:
    with executing():
        for name in weighted.ACTIVATIONS if shape == (3, 48) else ("silu",):
            weighted.check(weighted.kernel, name, *weighted.draw(*shape, dtype))


@in_dtypes("shape", (7, 3, 13), (3, 4, 1040), (5, 8, 32))
def test_combine(shape, dtype) -> None:
    with executing():
        combinations.check(combinations.kernel, *combinations.draw(*shape, dtype))


@pytest.mark.parametrize("case", [*routes.CASES[::2], *routes.LARGE], ids=str)
def test_route(case) -> None:
    with executing():
        routes.check(routes.kernel, *case, torch.float32)


@pytest.mark.parametrize("edge", [routes.ties, routes.strange_logits], ids=lambda edge: edge.__name__)
def test_edges_of_route(edge) -> None:
    with executing():
        edge(routes.kernel)

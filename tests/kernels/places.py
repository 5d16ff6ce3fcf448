"""One check of an operation, asked wherever it is computed: of its reference, and of its kernel in Triton's interpreter
and on a GPU.

Belongs here: how a check becomes tests, what such checks draw, and how operands may lie in memory. No checks.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from testing import assert_identical, poisoned_memory
from torch import Tensor

Dtypes = Mapping[str, Sequence[torch.dtype | None]]  # by place

ONCE: Dtypes = dict.fromkeys(("reference", "interpreter", "gpu"), (None,))
FLOATS: Dtypes = {
    "reference": (torch.float64, torch.float32, torch.bfloat16),
    "interpreter": (torch.float32, torch.float16),  # which computes wrongly in bfloat16
    "gpu": (torch.bfloat16, torch.float16, torch.float32),
}
OF_KERNEL: Dtypes = {place: ONCE[place] for place in ("interpreter", "gpu")}


def at(places: Dtypes, *names: str) -> Dtypes:
    """Those of the places that have these names."""
    return {name: places[name] for name in names}


def everywhere(operation: str, check: Callable[..., None], places: Dtypes = ONCE) -> Callable[..., None]:
    """The tests of check(module, dtype, device) at each place in its dtypes, or of check(module, device) once at each.

    module: the operation's reference, or its kernel. A worker finds the check by its name in its module.
    """
    cases = [(place, dtype) for place, dtypes in places.items() for dtype in dtypes]
    marks = {"gpu": [pytest.mark.gpu]}

    @pytest.mark.parametrize(
        "place, dtype", [pytest.param(*case, marks=marks.get(case[0], []), id=name_of(*case)) for case in cases]
    )
    def test(request: pytest.FixtureRequest, place: str, dtype: torch.dtype | None) -> None:
        if place == "interpreter":
            request.getfixturevalue("interpreted")(1).run(check_at, operation, check, place, dtype)
        else:
            check_at(operation, check, place, dtype)

    return test


def name_of(place: str, dtype: torch.dtype | None) -> str:
    return place if dtype is None else f"{place} {dtype}".replace("torch.", "")


def check_at(operation: str, check: Callable[..., None], place: str, dtype: torch.dtype | None) -> None:
    pytest.importorskip("triton")
    name = "reference" if place == "reference" else "kernel"
    module = import_module(f"tpformer.kernels.{operation}.{name}")
    check(module, *([] if dtype is None else [dtype]), "cuda" if place == "gpu" else "cpu")


def draw(seed: int, dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> list[Tensor]:
    """What a function gives, and its gradients with regard to all of its inputs, by autograd."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def between_nans(x: Tensor, margin: int = 3) -> Tensor:
    """x (R, ...) as columns of a wider matrix, whose other columns are NaNs, or the largest integer."""
    rows = x.reshape(len(x), -1) if len(x) else x
    wide = rows.new_full(
        (len(x), rows.shape[1] + 2 * margin), float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    )
    wide[:, margin:-margin] = rows
    return wide[:, margin:-margin].unflatten(1, x.shape[1:]) if x.dim() > 1 else wide[:, margin]


def columnwise(x: Tensor) -> Tensor:
    """x (R, C, ...) with its columns, not its rows, side by side in memory; x (R,) with its elements apart."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else between_nans(x)


def check_layouts(function: Callable[..., Any], *operands: Tensor) -> None:
    """A function of rows gives the same bits wherever they lie: between NaNs, and one column after the other. Of no
    rows it gives no rows, and sums of 0."""
    with poisoned_memory():
        expected = results_of(function, operands)
        for layout in (between_nans, columnwise):
            assert_identical(results_of(function, [layout(x) for x in operands]), expected)
        empty = results_of(function, [x[:0] for x in operands])
    for x, whole in zip(empty, expected, strict=True):
        of_rows = whole is not None and len(whole) == len(operands[0])
        assert_identical(x, whole[:0] if of_rows else None if whole is None else torch.zeros_like(whole))


def results_of(function: Callable[..., Any], operands: Sequence[Tensor]) -> list[Tensor | None]:
    found = function(*operands)
    return [found] if isinstance(found, Tensor) else list(found)

"""What the tests of kernels share: one check of an operation becomes tests of its reference, and of its kernel in
Triton's interpreter and on a GPU.

Belongs here: how a check becomes tests, what such checks draw, how operands may lie in memory, and the oracles of norms
and dropout. No tests.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor
from turns import TURNS

from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.philox.reference import random_words

Dtypes = Mapping[str, Sequence[torch.dtype | None]]  # by place

ONCE: Dtypes = dict.fromkeys(("reference", "interpreter", "gpu"), (None,))
FLOATS: Dtypes = {
    "reference": (torch.float64, torch.float32, torch.bfloat16),
    "interpreter": (torch.float32, torch.float16),  # which computes wrongly in bfloat16
    "gpu": (torch.bfloat16, torch.float16, torch.float32),
}
OF_KERNEL: Dtypes = {**ONCE, "reference": ()}


def everywhere(operation: str, places: Dtypes = ONCE) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The tests of check(module, dtype, device) at each place in its dtypes, or of check(module, device) once at each.

    module: the operation's reference, or its kernel.
    """

    def case(place: str, dtype: torch.dtype | None) -> object:
        name = place if dtype is None else f"{place} {dtype}".replace("torch.", "")
        marks = [pytest.mark.gpu] if place == "gpu" else []
        if (place, dtype) == ("interpreter", torch.float16):  # differs from float32 by its roundings alone
            marks = [pytest.mark.proof, pytest.mark.rotates(len(operation) % TURNS)]
        return pytest.param(place, dtype, marks=marks, id=name)

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("place, dtype", [case(place, dtype) for place in places for dtype in places[place]])
        def test(request: pytest.FixtureRequest, place: str, dtype: torch.dtype | None) -> None:
            if place == "interpreter":
                request.getfixturevalue("interpreted")(1).run(check_at, operation, check, place, dtype)
            else:
                check_at(operation, check, place, dtype)

        if check.__name__.startswith("test_"):  # so the test has its name, by which a worker would look for it
            test.function, check.__qualname__ = check, f"{check.__name__}.function"  # type: ignore[attr-defined]
        return test

    return decorate


def check_at(operation: str, check: Callable[..., None], place: str, dtype: torch.dtype | None) -> None:
    pytest.importorskip("triton")
    module = import_module(f"tpformer.kernels.{operation}.{'reference' if place == 'reference' else 'kernel'}")
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
    filling = float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max
    wide = rows.new_full((len(x), rows.shape[1] + 2 * margin), filling)
    wide[:, margin:-margin] = rows
    return wide[:, margin:-margin].unflatten(1, x.shape[1:]) if x.dim() > 1 else wide[:, margin]


def columnwise(x: Tensor) -> Tensor:
    """x (R, C, ...) with its columns, not its rows, side by side in memory; x (R,) with its elements apart."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else between_nans(x)


LAYOUTS = (between_nans, columnwise)


def check_layouts(function: Callable[..., Any], *operands: Tensor) -> None:
    """A function of rows gives the same bits wherever they lie: between NaNs, and one column after the other. Of no
    rows it gives no rows, and sums of 0."""
    with poisoned_memory():
        expected = function(*operands)
        for layout in LAYOUTS:
            assert_identical(function(*map(layout, operands)), expected)
        empty = function(*(x[:0] for x in operands))
    if isinstance(expected, Tensor):
        empty, expected = [empty], [expected]
    for x, whole in zip(empty, expected, strict=True):
        of_rows = whole is not None and len(whole) == len(operands[0])
        assert_identical(x, whole[:0] if of_rows else None if whole is None else torch.zeros_like(whole))


EPS = 1e-5
FAR = 5 * 2**33  # an index beyond 32 bits
KEYS = (0, 1, 2**64 - 1, 2**63 + 12345)


def draw_norm(seed: int, n: int, kind: str, dtype: torch.dtype, device: str = "cpu", with_bias: bool = True) -> Norm:
    """rmsnorm's bias, which must not be read, is NaN."""
    weight, bias = draw(seed + 1000, dtype, device, (n,), (n,))
    return Norm(kind, weight, (bias if kind == "layernorm" else bias * float("nan")) if with_bias else None, EPS)


def draw_dropout(rows: int, n: int, p: float, device: str = "cpu") -> Dropout:
    """The rows are whole rows of a large tensor, so that their starts are multiples of 4 if n is one."""
    return Dropout((FAR // 4 + torch.arange(rows, device=device)) * n, KEYS[-1], p)


def formula(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return y if norm.bias is None else y + norm.bias


def by_torch(x: Tensor, norm: Norm) -> Tensor:
    if norm.kind == "rmsnorm":
        return F.rms_norm(x, x.shape[1:], norm.weight, norm.eps)
    return F.layer_norm(x, x.shape[1:], norm.weight, norm.bias, norm.eps)


def by_autograd(function, x: Tensor, norm: Norm, dy: Tensor, dresidual, compute, store) -> list[Tensor]:
    """y, dx (+ dresidual), dweight and layernorm's dbias, computed in one dtype and rounded once to another."""

    def normalise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return function(x, norm._replace(weight=weight, bias=bias))

    bias = norm.bias if norm.kind == "layernorm" else None
    inputs = [t.to(compute) for t in (x, norm.weight, bias) if t is not None]
    y, dx, *parameters = with_gradients(normalise, inputs, dy.to(compute))
    if dresidual is not None:
        dx = dx + dresidual.to(compute)
    return [t.to(store) for t in (y, dx, *parameters)]


def check_norm(module, x: Tensor, norm: Norm, dy: Tensor, dresidual: Tensor | None = None, **options) -> None:
    """Compare every output and gradient of a module's norm with float64 autograd."""
    with poisoned_memory():
        y, statistics = module.norm_forward(x, norm, **options)
    if not options:
        assert torch.equal(module.norm_rebuilt(x, statistics, norm), y)
    check_normalised(module, x, y, statistics, norm, dy, dresidual, **options)


def check_normalised(module, x: Tensor, y: Tensor, statistics, norm: Norm, dy: Tensor, dresidual, **options) -> None:
    """Compare the y and the statistics that a module made of x, and its norm_backward, with float64 autograd."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, rstd = statistics
    assert rstd.shape == (len(x), 1) and rstd.dtype == wide
    assert (mean is None) if norm.kind == "rmsnorm" else (mean.shape == (len(x), 1) and mean.dtype == wide)
    with poisoned_memory():
        gradients = module.norm_backward(dy, x, statistics, norm, dresidual, **options)[:3]
    actual = [y, *(t for t in gradients if t is not None)]
    oracle = by_autograd(formula, x, norm, dy, dresidual, torch.float64, torch.float64)
    # the baseline computes in float32 and rounds once, which is what is promised for 16-bit rows
    baseline = by_autograd(by_torch, x, norm, dy, dresidual, wide, x.dtype)
    for name, a, o, b in zip(("y", "dx", "dweight", "dbias")[: len(oracle)], actual, oracle, baseline, strict=True):
        assert_kernel_close(a, o, b, f"{norm.kind} {name} {tuple(x.shape)} {x.dtype} {options}")


def check_finish_norm(module, x: Tensor, finish: Finish, dy: Tensor, dz: Tensor, **options) -> None:
    """Check that z follows from x, and that all of the norm follows from z as it is stored."""
    given = x.clone()  # x may be overwritten
    with poisoned_memory():
        z, y, statistics = module.finish_norm_forward(given, finish, **options)
    name = f"z {tuple(x.shape)} {x.dtype} {options} {[part is not None for part in finish]}"
    assert (z is given) or any(part is not None for part in finish[:3]), name
    check_finished(z, x, finish, name)
    if x.device.type == "cpu":  # y follows from z as it is stored, to the bit
        assert torch.equal(y, module.norm_forward(z, finish.norm, **options)[0]), name
    check_normalised(module, z, y, statistics, finish.norm, dy, dz, **options)


def dropped(x: Tensor, start: Tensor, key: int, p: float) -> Tensor:
    """dropout(x) by its definition: Philox words, compared as integers, and one multiplication."""
    keep = random_words(key, start, x.shape[1]) >= round(p * 2**32)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def finished(x: Tensor, finish: Finish) -> Tensor:
    """residual + dropout(x + bias) in x's dtype."""
    if finish.bias is not None:
        x = x + finish.bias.to(x.dtype)
    if finish.dropout is not None:
        x = dropped(x, *finish.dropout)
    return x if finish.residual is None else x + finish.residual.to(x.dtype)


def check_finished(z: Tensor, x: Tensor, finish: Finish, name: str) -> None:
    """z = residual + dropout(x + bias), and its dropped elements are exactly the residual's."""
    oracle, baseline = finished(x.double(), finish), finished(x.to(torch.promote_types(x.dtype, torch.float32)), finish)
    assert_kernel_close(z, oracle, baseline.to(x.dtype), name)
    if finish.dropout is not None and finish.residual is not None:
        nothing = (oracle - finish.residual.double()) == 0
        assert torch.equal(z[nothing], finish.residual[nothing]), name

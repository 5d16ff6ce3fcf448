"""Activations, gated or not, equal float64 autograd of their published formulas: the reference and the kernel."""

import itertools
import math
from types import ModuleType

import pytest
import row_checks
import torch
import torch.nn.functional as F
from row_checks import FLOATS, ONCE, everywhere, with_gradients
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.activation import kernel, reference
from tpformer.kernels.activation.reference import ACTIVATIONS


def formula(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "relu2":
        return torch.where(x > 0, x**2, 0)
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def torch_activation(x: Tensor, name: str) -> Tensor:
    if name == "relu2":
        return F.relu(x).square()
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


SPECIAL = (0.0, 40.0, -40.0, 1e-6, -5.0)


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, gate, da, with special values: at 0 slopes are 1/2 or 0, at 40 and -40 float32's tanh and erf are
    saturated."""
    tensors = row_checks.draw(0, torch.float64, "cpu", *[shape] * 3)
    for x in tensors[:2]:
        if x.numel() > 5:
            x.view(-1)[:5] = torch.tensor(SPECIAL)
    return [x.to(device, dtype) for x in tensors]


def check(module: ModuleType, name: str, gated: bool, x: Tensor, gate: Tensor, da: Tensor) -> None:
    """Compare a module's functions with float64, where torch stays finite in the same dtype."""
    given_gate, given = gate if gated else None, da.clone()
    with poisoned_memory():
        forward = module.activation_forward(x, name, given_gate)
        dx, dgate, a = module.activation_backward(given, x, name, given_gate)
    assert (dgate is not None) == gated
    assert module is reference or dx.data_ptr() == given.data_ptr()  # the kernel writes dx into da
    actual = [forward, dx, *([dgate] if gated else []), a]

    def expected(activation, dtype: torch.dtype) -> list[Tensor]:
        def function(x: Tensor, gate: Tensor | None = None) -> Tensor:
            return activation(x, name) if gate is None else activation(gate, name) * x

        results = with_gradients(function, [t.to(dtype) for t in ((x, gate) if gated else (x,))], da.to(dtype))
        return [*results, results[0]]  # the backward also gives the forward's result again

    oracle, baseline = expected(formula, torch.float64), expected(torch_activation, x.dtype)
    for index, (y, o, b) in enumerate(zip(actual, oracle, baseline, strict=True)):
        finite = b.isfinite()
        assert y.shape == x.shape
        assert_kernel_close(y[finite], o[finite], b[finite], f"{name} gated={gated} result {index} {x.dtype}")


@everywhere("activation", FLOATS)
def test_equals_float64_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Of a part of a block, a whole one of the float32 backward, several and a rest. Without a GPU all activations have
    one of the shapes, and one is one element, whose rounding may allow less than a GPU's approximate exponential needs.
    """
    shapes = ((7, 13), (8, 128), (3, 1031), *(((1, 4097), (2048, 5504)) if device == "cuda" else ((1, 1),)))
    for shape, gated in itertools.product(shapes, (False, True)):
        for name in ACTIVATIONS if device == "cuda" or shape == (7, 13) else ("gelu",):
            check(module, name, gated, *draw(shape, dtype, device))
    for name in ACTIVATIONS:
        unaligned = [x.view(-1)[1:] for x in draw((3, 2731), dtype, device)]  # off a 16-byte boundary by one element
        check(module, name, True, *unaligned)


@everywhere("activation", FLOATS | {"reference": ()})
def test_extreme_values_stay_finite(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Values are of the largest magnitudes: their squares, cubes and exponentials leave every format."""
    largest = 6e4 if dtype == torch.float16 else 1e18
    x = torch.tensor([largest, -largest, 1e4, -1e4, 200.0, -200.0, 88.0, -88.0, 0.0, -0.0], dtype=torch.float64)
    x = x.repeat(2, 1).to(device, dtype)
    for name in ACTIVATIONS:
        check(module, name, False, x, torch.ones_like(x), torch.full_like(x, 0.25))
        check(module, name, True, torch.ones_like(x), x, torch.full_like(x, 0.25))


@everywhere("activation", ONCE | {"gpu": ()})
def test_slopes_do_not_cancel(module: ModuleType, device: str) -> None:
    """Here gelu_tanh's slope is 1 + x * (a difference of numbers near 1) * (a factor of up to 40)."""
    x = torch.linspace(0, 12, 1031)
    for name in ACTIVATIONS:
        check(module, name, False, x, x, torch.ones_like(x))


@everywhere("activation")
def test_no_activation_is_the_identity(module: ModuleType, device: str) -> None:
    x, _, da = draw((2, 3), torch.float32, device)
    assert module.activation_forward(x, None) is x
    assert module.activation_backward(da, x, None) == (da, None, x)


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    """The elements around 2**31 and the last ones of a bfloat16 array of 4 GiB are right."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("less than 24 GiB of GPU memory are free")
    x = torch.zeros(2**31 + 4099, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 4098], device="cuda")
    x[places] = 3.0
    y = kernel.activation_forward(x, "relu2")
    dx, _, a = kernel.activation_backward(torch.ones_like(x), x, "relu2")
    for result, value in ((y, 9.0), (a, 9.0), (dx, 6.0)):
        assert bool((result[places] == value).all()) and int(result.count_nonzero()) == len(places)

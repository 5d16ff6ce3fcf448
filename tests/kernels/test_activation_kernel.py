"""Activation references equal float64 autograd of their published formulas, gated or not, every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from testing import assert_kernel_close
from torch import Tensor

from tpformer.kernels.activation.reference import ACTIVATIONS, activation_backward, activation_cost, activation_forward


def formula(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def torch_activation(x: Tensor, name: str) -> Tensor:
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def by_autograd(activation, x: Tensor, gate: Tensor | None, da: Tensor, name: str) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in (x, gate) if t is not None]
    y = activation(inputs[0], name) if gate is None else activation(inputs[1], name) * inputs[0]
    return [y.detach(), *torch.autograd.grad(y, inputs, da)]


# 40 and -40 are beyond where float32's tanh and erf saturate, 0 is where silu's derivative is 1/2
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_float64_autograd(name, gated, dtype):
    generator = torch.Generator().manual_seed(0)
    x, gate, da = (torch.randn(7, 13, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    special = torch.tensor([0.0, 40.0, -40.0, 1e-6, -5.0], dtype=dtype)
    (gate if gated else x)[0, :5] = special
    given_gate = gate if gated else None
    forward = activation_forward(x, name, given_gate)
    # a clone: the backward may write into da
    actual = [forward, *(t for t in activation_backward(da.clone(), x, name, given_gate) if t is not None)]
    oracle = by_autograd(formula, x.double(), None if given_gate is None else given_gate.double(), da.double(), name)
    baseline = by_autograd(torch_activation, x, given_gate, da, name)
    # the backward also gives the forward's result again
    oracle, baseline = ([*each, each[0]] for each in (oracle, baseline))
    assert len(actual) == len(oracle) == (4 if gated else 3)
    for what, a, o, b in zip(("y", "dx", "dgate or y", "y"), actual, oracle, baseline, strict=False):
        assert_kernel_close(a, o, b, f"{name} gated={gated} {what} {dtype}")


def test_no_activation_is_the_identity():
    x, da = torch.randn(2, 3), torch.randn(2, 3)
    assert activation_forward(x, None) is x
    assert activation_backward(da, x, None) == (da, None, x)


# by hand: operands * m * f * itemsize with operands 2, 5 (x, gate, da, dx, dgate) and 3
@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((2, 3, 4), (60, 48)),
        ((2, 3, 4, True, True), (288, 120)),
        ((5, 7, 2, True, False), (700, 210)),
        ((5, 7, 2, False, True), (840, 210)),
    ],
)
def test_cost(arguments, expected):
    assert activation_cost(*arguments) == expected

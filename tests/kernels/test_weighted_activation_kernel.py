"""w * act(gate) * up and its gradients equal float64 autograd of the formulas: the reference and the kernel."""

from types import ModuleType

import pytest
import row_checks
import torch
from row_checks import FLOATS, LAYOUTS, OF_KERNEL, check_layouts, everywhere, with_gradients
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from test_activation_kernel import SPECIAL, formula, torch_activation

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.weighted_activation import kernel, reference  # noqa: F401 - tests/execute takes the kernel from here


def draw(rows: int, f: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """gate_up, weights, da: gates at which float32's exponentials are saturated, weights of both signs, one of 0."""
    gate_up, da, weights = row_checks.draw(0, torch.float64, "cpu", (rows, 2 * f), (rows, f), (rows,))
    gate_up[0, : min(5, f)] = torch.tensor(SPECIAL[:f])
    weights[1:2] = 0
    wide = torch.promote_types(dtype, torch.float32)
    return [gate_up.to(device, dtype), weights.to(device, wide), da.to(device, dtype)]


def check(module: ModuleType, name: str, gate_up: Tensor, weights: Tensor, da: Tensor) -> None:
    """Compare a module's functions with float64 autograd. The baseline computes in float32 and rounds once, which is
    what is promised for 16-bit rows."""
    with poisoned_memory():
        forward = module.weighted_activation_forward(gate_up, name, weights)
        # a clone: the backward may write into da
        dgate_up, a, dweights = module.weighted_activation_backward(da.clone(), gate_up, name, weights)

    def expected(activation, dtype: torch.dtype) -> list[Tensor]:
        def function(gate_up: Tensor, weights: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, 1)
            return activation(gate, name) * up * weights[:, None]

        return with_gradients(function, (gate_up.to(dtype), weights.to(dtype)), da.to(dtype))

    oracle, baseline = expected(formula, torch.float64), expected(torch_activation, weights.dtype)
    # the weights' gradient is not rounded to the rows' dtype, and the backward also gives the forward's result again
    for x, index in ((forward, 0), (a, 0), (dgate_up, 1), (dweights, 2)):
        rounded = baseline[index] if index == 2 else baseline[index].to(gate_up.dtype)
        assert_kernel_close(x, oracle[index], rounded, f"{index} of {name} {tuple(gate_up.shape)} {gate_up.dtype}")


@everywhere("weighted_activation", FLOATS)
def test_equals_float64_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Of odd rows and columns, a vectorised width of several rows a tile, two blocks of columns with a rest, and one
    element (test_activation_kernel says why not on a GPU). In the interpreter all activations have one of the shapes.
    """
    others = ((1000, 768), (257, 14336), (64, 1001)) if device == "cuda" else ((1, 1),)
    for shape in ((3, 7), (5, 33), (9, 64), (2, 2064), *others):
        for name in ACTIVATIONS if device == "cuda" or shape == (5, 33) else ("silu",):
            check(module, name, *draw(*shape, dtype, device))


@everywhere("weighted_activation")
def test_takes_any_layout(module: ModuleType, device: str) -> None:
    given = draw(5, 6, torch.float32, device)
    for layout in LAYOUTS:
        check(module, "silu", *map(layout, given))
    # the reference's sums are torch's, whose bits depend on strides
    results = 2 if module is reference else 3

    def backward(x: Tensor, weights: Tensor, da: Tensor) -> tuple:
        return module.weighted_activation_backward(da.clone(), x, "silu", weights)[:results]

    check_layouts(backward, *given)
    check_layouts(lambda x, weights: module.weighted_activation_forward(x, "silu", weights), *given[:2])


@everywhere("weighted_activation")
def test_nans_stay_in_their_row(module: ModuleType, device: str) -> None:
    gate_up, weights, da = draw(3, 5, torch.float32, device)
    weights[1] = float("nan")
    for name in ACTIVATIONS:
        dgate_up, a, dweights = module.weighted_activation_backward(da.clone(), gate_up, name, weights)
        for x in (module.weighted_activation_forward(gate_up, name, weights), dgate_up, a):
            assert x.isnan().all(1).tolist() == x.isnan().any(1).tolist() == [False, True, False], name
        assert bool(dweights.isfinite().all())  # it does not depend on the weights


@everywhere("weighted_activation", OF_KERNEL)
def test_rows_do_not_depend_on_others(module: ModuleType, device: str) -> None:
    """A row's results are the same to the bit whatever the other rows are, and the result takes da's memory."""
    gate_up, weights, da = draw(7, 1030, torch.float32, device)
    whole = module.weighted_activation_backward(da.clone(), gate_up, "silu", weights)
    given = da[2:5].clone()
    some = module.weighted_activation_backward(given, gate_up[2:5], "silu", weights[2:5])
    assert all(torch.equal(x[2:5], y) for x, y in zip(whole, some, strict=True))
    assert some[1].data_ptr() == given.data_ptr()

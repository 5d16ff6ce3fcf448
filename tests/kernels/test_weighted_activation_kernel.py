"""w * act(gate) * up and its gradients equal float64 autograd of the formulas: the reference and the kernel."""

from types import ModuleType

import pytest
import torch
from row_checks import FLOATS, OF_KERNEL, between_nans, check_layouts, columnwise, everywhere, with_gradients
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from test_activation_kernel import formula, torch_activation

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.weighted_activation import kernel, reference  # noqa: F401 - tests/execute takes the kernel from here


def draw(rows: int, f: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """gate_up, weights, da: gates at which float32's exponentials are saturated, weights of both signs, one of 0."""
    generator = torch.Generator().manual_seed(0)
    gate_up, da, weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((rows, 2 * f), (rows, f), (rows,))
    )
    special = torch.tensor([0.0, 40.0, -40.0, 1e-6, -5.0], dtype=torch.float64)[: min(5, f)]
    gate_up[0, : len(special)] = special
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
    for what, x, index in (
        ("result", forward, 0),
        ("result again", a, 0),
        ("d gate up", dgate_up, 1),
        ("dw", dweights, 2),
    ):
        rounded = baseline[index] if index == 2 else baseline[index].to(gate_up.dtype)
        assert_kernel_close(x, oracle[index], rounded, f"{what} of {name} {tuple(gate_up.shape)} {gate_up.dtype}")


# one element, odd rows and columns, a vectorised width of several rows a tile, two blocks of columns with a rest
SHAPES = ((1, 1), (3, 7), (5, 33), (9, 64), (2, 2064))
# one element alone is left out: its rounding may allow less than a GPU's approximate exponential needs
GPU_SHAPES = (*SHAPES[1:], (1000, 768), (257, 14336), (64, 1001))


def equals_float64_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """In the interpreter, which is slow, all activations have one of the shapes."""
    for shape in GPU_SHAPES if device == "cuda" else SHAPES:
        for name in ACTIVATIONS if device == "cuda" or shape == (5, 33) else ("silu",):
            check(module, name, *draw(*shape, dtype, device))


def takes_any_layout(module: ModuleType, device: str) -> None:
    given = draw(5, 6, torch.float32, device)
    for layout in (between_nans, columnwise):
        check(module, "silu", *map(layout, given))
    # the reference's sums are torch's, whose bits depend on strides
    results = 2 if module is reference else 3
    check_layouts(lambda x, weights, da: module.weighted_activation_forward(x, "silu", weights), *given)
    check_layouts(
        lambda x, weights, da: module.weighted_activation_backward(da.clone(), x, "silu", weights)[:results], *given
    )  # fmt: skip


def nans_stay_in_their_row(module: ModuleType, device: str) -> None:
    gate_up, weights, da = draw(3, 5, torch.float32, device)
    weights[1] = float("nan")
    for name in ACTIVATIONS:
        dgate_up, a, dweights = module.weighted_activation_backward(da.clone(), gate_up, name, weights)
        for x in (module.weighted_activation_forward(gate_up, name, weights), dgate_up, a):
            assert x.isnan().all(1).tolist() == x.isnan().any(1).tolist() == [False, True, False], name
        assert bool(dweights.isfinite().all())  # it does not depend on the weights


def rows_do_not_depend_on_others(module: ModuleType, device: str) -> None:
    """A row's results are the same to the bit whatever the other rows are, and the result takes da's memory."""
    gate_up, weights, da = draw(7, 1030, torch.float32, device)
    whole = module.weighted_activation_backward(da.clone(), gate_up, "silu", weights)
    given = da[2:5].clone()
    some = module.weighted_activation_backward(given, gate_up[2:5], "silu", weights[2:5])
    assert all(torch.equal(x[2:5], y) for x, y in zip(whole, some, strict=True))
    assert some[1].data_ptr() == given.data_ptr()


test_equals_float64_autograd = everywhere("weighted_activation", equals_float64_autograd, FLOATS)
test_takes_any_layout = everywhere("weighted_activation", takes_any_layout)
test_nans_stay_in_their_row = everywhere("weighted_activation", nans_stay_in_their_row)
test_rows_do_not_depend_on_others = everywhere("weighted_activation", rows_do_not_depend_on_others, OF_KERNEL)

"""w * act(gate) * up and its gradients equal float64 autograd of the formulas: the reference and the kernel."""

from types import ModuleType

import pytest
import torch
from pool import WorkerPool
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from test_activation_kernel import formula, torch_activation

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.weighted_activation import kernel, reference


def by_autograd(activation, gate_up: Tensor, weights: Tensor, da: Tensor, name: str) -> list[Tensor]:
    """The result, and the gradients of gate_up and of the weights."""
    gate_up, weights = (x.detach().requires_grad_() for x in (gate_up, weights))
    gate, up = gate_up.chunk(2, 1)
    y = activation(gate, name) * up * weights[:, None]
    return [y.detach(), *torch.autograd.grad(y, (gate_up, weights), da)]


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
    oracle = by_autograd(formula, gate_up.double(), weights.double(), da.double(), name)
    wide = [x.to(weights.dtype) for x in (gate_up, weights, da)]
    baseline = [x.to(gate_up.dtype) for x in by_autograd(torch_activation, *wide, name)]
    # the weights' gradient is not rounded to the rows' dtype
    baseline[2] = by_autograd(torch_activation, *wide, name)[2]
    # the backward also gives the forward's result again
    actual, oracle, baseline = (forward, dgate_up, dweights, a), [*oracle, oracle[0]], [*baseline, baseline[0]]
    for index, (x, exact, plain) in enumerate(zip(actual, oracle, baseline, strict=True)):
        assert_kernel_close(x, exact, plain, f"{name} result {index} {tuple(gate_up.shape)} {gate_up.dtype}")


# one element, odd rows and columns, a vectorised width of several rows a tile, two blocks of columns with a rest
SHAPES = ((1, 1), (3, 7), (5, 33), (9, 64), (2, 2064))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reference_equals_float64_autograd(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES[1:4]:
        check(reference, name, *draw(*shape, dtype))


def equals_float64_autograd() -> None:
    for dtype in (torch.float32, torch.float16):
        for shape in SHAPES:
            for name in ACTIVATIONS if shape[1] == 33 else ("silu",):
                check(kernel, name, *draw(*shape, dtype))


def layouts(module: ModuleType, device: str = "cpu") -> None:
    """Rows that lie apart, transposed operands and no rows are taken; what is not given is not read or written."""
    gate_up, weights, da = draw(5, 6, torch.float32, device)
    y = module.weighted_activation_forward(gate_up, "silu", weights)
    apart = torch.full((5, 20), float("nan"), device=device)
    apart[:, 3:15] = gate_up
    for given in (apart[:, 3:15], gate_up.t().contiguous().t()):
        strided = weights[:, None].expand(5, 3).contiguous()[:, 1]
        check(module, "silu", given, strided, da.t().contiguous().t())
        assert torch.equal(module.weighted_activation_forward(given, "silu", strided), y)
    empty = module.weighted_activation_backward(da[:0], gate_up[:0], "silu", weights[:0])
    assert [tuple(x.shape) for x in empty] == [(0, 12), (0, 6), (0,)] and empty[2].dtype == torch.float32
    assert module.weighted_activation_forward(gate_up[:0], "silu", weights[:0]).shape == (0, 6)


def nans_stay(module: ModuleType, device: str = "cpu") -> None:
    """A row with a NaN has NaN results there, and other rows do not."""
    gate_up, weights, da = draw(3, 5, torch.float32, device)
    weights[1] = float("nan")
    for name in ACTIVATIONS:
        dgate_up, a, dweights = module.weighted_activation_backward(da.clone(), gate_up, name, weights)
        for x in (module.weighted_activation_forward(gate_up, name, weights), dgate_up, a):
            assert x.isnan().all(1).tolist() == x.isnan().any(1).tolist() == [False, True, False], name
        assert bool(dweights.isfinite().all())  # it does not depend on the weights


def in_any_order(device: str = "cpu") -> None:
    """A row's results do not depend on the other rows, to the bit, and the result takes da's memory."""
    gate_up, weights, da = draw(7, 1030, torch.float32, device)
    whole = kernel.weighted_activation_backward(da.clone(), gate_up, "silu", weights)
    given = da[2:5].clone()
    some = kernel.weighted_activation_backward(given, gate_up[2:5], "silu", weights[2:5])
    assert all(torch.equal(x[2:5], y) for x, y in zip(whole, some, strict=True))
    assert some[1].data_ptr() == given.data_ptr()


def at_the_edges() -> None:
    layouts(kernel)
    nans_stay(kernel)
    in_any_order()


def test_edges_of_the_reference() -> None:
    layouts(reference)
    nans_stay(reference)


@pytest.mark.parametrize("check", [equals_float64_autograd, at_the_edges], ids=lambda check: check.__name__)
def test_kernel(interpreted: WorkerPool, check) -> None:
    interpreted(1).run(check)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    # one element alone is left out: its rounding may allow less than a GPU's approximate exponential needs
    for shape in (*SHAPES[1:], (1000, 768), (257, 14336), (64, 1001)):
        check(kernel, name, *draw(*shape, dtype, "cuda"))


@pytest.mark.gpu
def test_edges_on_gpu() -> None:
    layouts(kernel, "cuda")
    nans_stay(kernel, "cuda")
    in_any_order("cuda")

"""Activations, gated or not, equal float64 autograd of their published formulas: the reference and the kernel."""

import math

import pytest
import torch
import torch.nn.functional as F
from pool import WorkerPool
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.activation import kernel, reference
from tpformer.kernels.activation.reference import ACTIVATIONS, activation_backward, activation_forward


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


def by_autograd(activation, x: Tensor, gate: Tensor | None, da: Tensor, name: str) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in (x, gate) if t is not None]
    y = activation(inputs[0], name) if gate is None else activation(inputs[1], name) * inputs[0]
    return [y.detach(), *torch.autograd.grad(y, inputs, da)]


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, gate, da, with special values: at 0 slopes are 1/2 or 0, at 40 and -40 float32's tanh and erf are
    saturated."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    special = torch.tensor([0.0, 40.0, -40.0, 1e-6, -5.0], dtype=torch.float64)
    for x in tensors[:2]:
        if x.numel() > 5:
            x.view(-1)[:5] = special
    return [x.to(device, dtype) for x in tensors]


def check(module, name: str, gated: bool, x: Tensor, gate: Tensor, da: Tensor) -> None:
    """Compare a module's functions with float64, where torch stays finite in the same dtype."""
    given_gate = gate if gated else None
    with poisoned_memory():
        forward = module.activation_forward(x, name, given_gate)
        # a clone: the backward may write into da
        dx, dgate, a = module.activation_backward(da.clone(), x, name, given_gate)
    assert (dgate is not None) == gated
    actual = [forward, dx, *([dgate] if gated else []), a]
    oracle = by_autograd(formula, x.double(), None if given_gate is None else given_gate.double(), da.double(), name)
    baseline = by_autograd(torch_activation, x, given_gate, da, name)
    # the backward also gives the forward's result again
    for index, (y, o, b) in enumerate(zip(actual, [*oracle, oracle[0]], [*baseline, baseline[0]], strict=True)):
        finite = b.isfinite()
        assert y.shape == x.shape
        assert_kernel_close(y[finite], o[finite], b[finite], f"{name} gated={gated} result {index} {x.dtype}")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reference_equals_float64_autograd(name, gated, dtype):
    check(reference, name, gated, *draw((7, 13), dtype))


# one element, a part of a block, a whole block of the float32 backward, several blocks and a rest
SHAPES = ((1, 1), (7, 13), (8, 128), (3, 1031))


def equals_float64_autograd() -> None:
    for dtype in (torch.float32, torch.float16):
        for shape in SHAPES:
            for name in ACTIVATIONS:
                for gated in (False, True):
                    check(kernel, name, gated, *draw(shape, dtype))


def slopes_do_not_cancel() -> None:
    """Here gelu_tanh's slope is 1 + x * (a difference of numbers near 1) * (a factor of up to 40)."""
    x = torch.linspace(0, 12, 1031)
    for name in ACTIVATIONS:
        check(kernel, name, False, x, x, torch.ones_like(x))


def extreme(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, gate, da of the largest magnitudes: their squares, cubes and exponentials leave every format."""
    largest = 6e4 if dtype == torch.float16 else 1e18
    x = torch.tensor([largest, -largest, 1e4, -1e4, 200.0, -200.0, 88.0, -88.0, 0.0, -0.0], dtype=torch.float64)
    x = x.repeat(2, 1).to(device, dtype)
    return [torch.ones_like(x), x, torch.full_like(x, 0.25)]


def extreme_values_stay_finite() -> None:
    for dtype in (torch.float32, torch.float16):
        one, x, da = extreme(dtype)
        for name in ACTIVATIONS:
            check(kernel, name, False, x, one, da)
            check(kernel, name, True, one, x, da)


def takes_any_layout() -> None:
    """dx takes da's memory; NaNs stay NaNs; rows of wider matrices and empty inputs are taken."""
    x, gate, da = draw((5, 6), torch.float32)
    given = da.clone()
    dx, _, _ = kernel.activation_backward(given, x, "silu")
    assert dx.data_ptr() == given.data_ptr()
    wide = torch.full((5, 11), float("nan"))
    wide[:, 2:8] = x
    for name in ACTIVATIONS:
        assert torch.equal(kernel.activation_forward(wide[:, 2:8], name), kernel.activation_forward(x, name))
        transposed = [y.t().contiguous().t() for y in (da, x, gate)]
        strided = kernel.activation_backward(*transposed[:2], name, transposed[2])
        packed = kernel.activation_backward(da.clone(), x, name, gate)
        assert all(torch.equal(one, other) for one, other in zip(strided, packed, strict=True))
        assert kernel.activation_forward(wide[:, :2].contiguous(), name).isnan().all()
        assert all(y.isnan().all() for y in kernel.activation_backward(wide[:, :2] * 1, wide[:, :2], name)[::2])
        empty = [y.numel() for y in kernel.activation_backward(x[:0], x[:0], name, x[:0])]
        assert empty == [0, 0, 0] and kernel.activation_forward(x[:0], name).shape == (0, 6)
    assert kernel.activation_forward(x, None) is x
    assert kernel.activation_backward(da, x, None) == (da, None, x)


@pytest.mark.parametrize(
    "check",
    [equals_float64_autograd, slopes_do_not_cancel, extreme_values_stay_finite, takes_any_layout],
    ids=lambda check: check.__name__,
)
def test_kernel(interpreted: WorkerPool, check) -> None:
    interpreted(1).run(check)


def test_no_activation_is_the_identity():
    x, da = torch.randn(2, 3), torch.randn(2, 3)
    assert activation_forward(x, None) is x
    assert activation_backward(da, x, None) == (da, None, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    # one element alone is left out: its rounding may allow less than a GPU's approximate exponential needs
    for shape in (*SHAPES[1:], (1, 4097), (2048, 5504)):
        for gated in (False, True):
            check(kernel, name, gated, *draw(shape, dtype, "cuda"))
    one, x, da = extreme(dtype, "cuda")
    check(kernel, name, False, x, one, da)
    check(kernel, name, True, one, x, da)
    unaligned = [y.view(-1)[1:] for y in draw((3, 2731), dtype, "cuda")]  # 2 or 4 bytes off a 16-byte boundary
    check(kernel, name, True, *unaligned)


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

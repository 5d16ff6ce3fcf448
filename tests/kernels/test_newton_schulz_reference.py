"""Newton-Schulz iterations orthogonalise, as torch's do in bfloat16; their cost is what torch counts."""

import pytest
import torch
from testing import assert_kernel_close, assert_same
from torch.utils.flop_counter import FlopCounterMode

from tpformer.config.run_checks import MUON
from tpformer.kernels.newton_schulz.reference import COEFFICIENTS, SCALES, muon_scale, newton_schulz, newton_schulz_cost

SHAPES = [(24, 40), (40, 24), (16, 16), (1, 7)]


def drawn(shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_vectors_stay_and_singular_values_become_the_polynomials(name, shape):
    """The iteration on a matrix is the polynomial on each singular value."""
    x = drawn(shape)
    u, values, vt = torch.linalg.svd(x, full_matrices=False)
    values = values / x.norm()
    for a, b, c in COEFFICIENTS[name]:
        values = a * values + b * values**3 + c * values**5
    assert_same(newton_schulz(x, COEFFICIENTS[name]), u @ torch.diag(values) @ vt)
    assert all(0.6 < value < 1.25 for value in values if value > 0.1) and values.max() > 0.6


def test_torchs_muon_takes_the_same_step():
    for shape in SHAPES:
        x = drawn(shape, torch.bfloat16)
        theirs = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        theirs.grad = x.clone()
        optimizer = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
        optimizer.step()
        ours = -newton_schulz(x) * muon_scale(*shape, "spectral")
        exact = -newton_schulz(x.double()) * muon_scale(*shape, "spectral")
        assert_kernel_close(ours, exact, theirs.detach(), str(shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_zeros_stay_positive_zeros(dtype):
    found = newton_schulz(torch.zeros(6, 4, dtype=dtype))
    assert not found.any() and not found.signbit().any()


def test_what_a_step_is_multiplied_by():
    assert_same([muon_scale(9, 25), muon_scale(25, 9)], [1.0, 1.0])
    assert_same([muon_scale(36, 9, "spectral"), muon_scale(9, 36, "spectral")], [2.0, 1.0])
    with pytest.raises(ValueError, match="scale='frobenius' is unknown: choose one of 'rms', 'spectral'"):
        muon_scale(2, 2, "frobenius")
    with pytest.raises(ValueError, match="newton_schulz: x is"):
        newton_schulz(torch.zeros(2, 3, 4))
    assert MUON["newton_schulz"] == tuple(COEFFICIENTS) and MUON["muon_scale"] == SCALES


def test_the_cost_is_what_torch_counts():
    x = drawn((12, 20), torch.float32)
    with FlopCounterMode(display=False) as counter:
        newton_schulz(x.mT)
    assert counter.get_total_flops() == newton_schulz_cost(20, 12, 4).flops
    assert newton_schulz_cost(20, 12, 2).bytes * 2 == newton_schulz_cost(12, 20, 4).bytes > 2 * x.nbytes

"""At the ends of the number line kernel, reference and torch agree: at infinities, NaN, the largest numbers, denormals,
zeros of both signs, and where squares and cubes overflow. What torch gives in float64 is right, rounded: its float32
has NaN for gelu(inf), as have the kernels."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from row_checks import by_torch, dropped, everywhere
from testing import assert_identical, assert_kernel_close
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.activation.reference import ACTIVATIONS
from tpformer.kernels.cross_entropy.reference import LossTerms, VocabSlice
from tpformer.kernels.finish import Dropout, Finish, Norm
from tpformer.kernels.norm.reference import NORMS
from tpformer.kernels.rope.reference import rope_table

INF, NAN = float("inf"), float("nan")
PLACES = dict.fromkeys(("reference", "interpreter", "gpu"), (torch.float32, torch.float16))
FAR = 128  # float32's activations of x beyond it are x or x**2, and those of -x are -0
NEAR = 2.0**40  # beyond it torch's float32 gelu, and the kernels' gelu and gelu_tanh, may overflow
TORCH = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


def ends(dtype: torch.dtype, device: str) -> Tensor:
    """Numbers of both signs: the ends, and powers of 4 up to them."""
    info = torch.finfo(dtype)
    positive = [INF, info.max, info.tiny, info.smallest_normal / 8, 0.0, *(4.0**power for power in range(-4, 64))]
    return torch.tensor([*positive, *(-x for x in positive), NAN], dtype=torch.float64).to(device, dtype)


def agree(
    actual: Tensor, oracle: Tensor, what: str, exact: Tensor | None = None, overflows: Tensor | None = None
) -> None:
    """Actual has the oracle's infinities and NaNs, where `exact` is true its bits, and elsewhere is near. Where
    `overflows` is true it may also be infinite or NaN."""
    rounded = oracle.to(actual.dtype)
    if overflows is not None:
        actual = torch.where(overflows & ~actual.isfinite(), rounded, actual)
    finite = rounded.isfinite()
    exact = ~finite if exact is None else ~finite | exact
    assert_identical(actual[exact], rounded[exact], what)
    assert_kernel_close(actual[~exact], oracle.double()[~exact], rounded[~exact], what)


@everywhere("activation", PLACES)
def test_activations(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    numbers = ends(dtype, device)
    for name in ACTIVATIONS:
        limited = name == "gelu" or (name == "gelu_tanh" and not module.__name__.endswith("reference"))
        gate, overflows = numbers, numbers.double().abs() > NEAR if limited else None
        far, ones = gate.abs() > FAR, torch.ones_like(gate)
        leaf = gate.double().requires_grad_()
        value = TORCH[name](leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        for factor in (-1.0, 4.0):
            what, x = f"{name} {dtype} {factor}", factor * ones
            product = value.detach() * factor
            agree(module.activation_forward(x, name, gate), product, what, far, overflows)
            dx, dgate, a = module.activation_backward(ones.clone(), x, name, gate)
            for y, oracle in ((dx, value.detach()), (dgate, slope * factor), (a, product)):
                agree(y, oracle, what, far, overflows)
        agree(module.activation_forward(gate, name), value.detach(), name, far, overflows)
        dx, _, a = module.activation_backward(ones.clone(), gate, name)
        agree(dx, slope, name, far, overflows)
        agree(a, value.detach(), name, far, overflows)
    x, gate = torch.full((3,), INF, dtype=dtype, device=device), torch.tensor([-1, 0, 1], dtype=dtype, device=device)
    dgate = module.activation_backward(torch.ones_like(x), x, "relu2", gate)[1]
    assert dgate.isnan().tolist() == [True, True, False] and dgate[2] == INF


@everywhere("norm", PLACES)
def test_norms(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """One such number in each row."""
    numbers = ends(dtype, device)
    x = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device, dtype=dtype).repeat(len(numbers), 1)
    x[:, 3] = numbers
    weight, bias = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.0, 1.0, 0.0, -1.0]], device=device, dtype=dtype)
    for kind in NORMS:
        norm = Norm(kind, weight, bias if kind == "layernorm" else None, None)
        theirs = norm._replace(eps=torch.finfo(torch.float32).eps)
        oracle = by_torch(x.double(), theirs._replace(weight=weight.double(), bias=bias.double()))
        y = module.norm_forward(x, norm)[0]
        fits = (numbers.abs() < 2.0**63) | ~numbers.isfinite()  # squares of others overflow float32
        agree(y[fits], oracle[fits], f"{kind} {dtype}")
        if kind == "rmsnorm":  # of layernorms torch's own have 0 or NaN there
            assert not y[~fits].any()


@everywhere("cross_entropy", PLACES)
def test_cross_entropy(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    numbers = ends(dtype, device)
    logits = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device, dtype=dtype).repeat(2 * len(numbers), 1)
    logits[:, 3] = numbers.repeat(2)
    targets = torch.tensor([3, 0], device=device).repeat_interleave(len(numbers))
    vocab, terms = VocabSlice(0, 4, 4), LossTerms()
    statistics, work = module.slice_statistics(logits, targets, vocab, terms)
    normalisers, losses = module.combine_statistics(statistics[None], targets, vocab, terms)
    gradient = module.slice_gradient(logits, normalisers, targets, None, vocab, terms, work=work)
    leaf = logits.double().requires_grad_()
    theirs = F.cross_entropy(leaf, targets, reduction="none")
    (expected,) = torch.autograd.grad(theirs.sum(), leaf)
    near = numbers.repeat(2).abs() <= FAR
    agree(losses[near], theirs.detach()[near], f"losses {dtype}")
    agree(gradient[near], expected[near], f"gradient {dtype}")
    for index in (~near).nonzero().flatten().tolist():
        what = f"{logits[index].tolist()} {int(targets[index])}"
        agree(losses[index], theirs[index].detach(), what)
        agree(gradient[index], expected[index], what)


@everywhere("rope", PLACES)
def test_rope(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    numbers = ends(dtype, device)
    pairs = torch.stack([numbers, numbers.roll(1)], 1).repeat(3, 1)[:, None]
    positions = torch.arange(3, device=device).repeat_interleave(len(numbers))
    table = rope_table(3, 2, 1e4, dtype, device)
    (c, s), (a, b) = (each.double()[positions] for each in table), pairs.double().unbind(2)
    oracle = torch.stack([a * c - b * s, b * c + a * s], 2)
    for y in module.rope_rotate(pairs, pairs, table, positions):
        for row, expected in zip(y, oracle, strict=True):
            agree(row, expected, f"{row} {expected}")


@everywhere("dropout", PLACES)
def test_what_is_dropped_is_zero(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    x = ends(dtype, device).repeat(4, 1)
    site = Dropout(torch.arange(4, device=device) * x.shape[1], 5, 0.5)
    oracle = dropped(x.double(), *site)
    for y in (module.dropout_apply(x.clone(), *site), module.finish_forward(x.clone(), Finish(dropout=site))):
        assert_identical(y, oracle.to(dtype))


@everywhere("update")
def test_gradients(module: ModuleType, device: str) -> None:
    """A step of AdamW, from torch's own on a CPU. On a GPU torch squares a gradient before it multiplies it by
    1 - beta2, so squares overflow from 2**64 on; here, and on a CPU, from 2**69 on."""
    gradient = ends(torch.float32, device)
    p, m, v = (torch.full_like(gradient, value) for value in (0.5, 0.25, 1.0))
    theirs = torch.nn.Parameter(p.cpu().clone())
    adamw = torch.optim.AdamW([theirs], lr=0.5, weight_decay=0.0)
    count = torch.ones((), device=device)
    adamw.state[theirs] = {"step": torch.ones(()), "exp_avg": m.cpu().clone(), "exp_avg_sq": v.cpu().clone()}
    theirs.grad = gradient.cpu().clone()
    adamw.step()
    options = {"lr": 0.5, "scale": 1.0, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    skipped = torch.zeros((), device=device)
    module.adamw_([p], [gradient], [m], [v], [count], None, skipped=skipped, **options)
    agree(p.cpu(), theirs.detach().double(), "AdamW")

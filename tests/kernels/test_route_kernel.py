"""The choice of experts, their weights and gradients equal brute force and autograd: the reference and the kernel."""

import itertools
from types import ModuleType

import pytest
import torch
from row_checks import columnwise, everywhere
from row_checks import draw as draw_normal
from testing import assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.route import kernel, reference  # noqa: F401 - tests/execute takes the kernel from here
from tpformer.kernels.route.reference import SCORES, Policy

LEAST = 1e-20  # what reference.py adds to a sum that divides
NAN, INFINITY = float("nan"), float("inf")


def policies(k: int, groups: int = 1, top_groups: int = 1) -> list[Policy]:
    return [Policy(k, score, normalised, 2.5, groups, top_groups) for score in SCORES for normalised in (True, False)]


# tokens, and policies with the number of experts: one expert, all of them, powers of two and not, groups of one, of two
# and of five experts, and as many groups as no power of two is
CASES = [
    (1, 1, Policy(1)),
    *((5, 8, policy) for policy in policies(2)),
    (3, 7, Policy(7)),
    (9, 60, Policy(4, "sigmoid", False)),
    *((3, 16, policy) for policy in policies(3, 4, 2)),
    (4, 20, Policy(4, "sigmoid", groups=4, top_groups=2)),
    (4, 12, Policy(3, "sigmoid", groups=6, top_groups=4)),
    (4, 12, Policy(4, groups=12, top_groups=5)),
    (2, 128, Policy(8)),
]
LARGE = [
    (3, 256, Policy(8, "sigmoid", scale=2.5, groups=8, top_groups=4)),
    (3, 160, Policy(6, normalised=False, scale=16.0, groups=8, top_groups=3)),
    (2, 512, Policy(16)),
]


def draw(m: int, e: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """logits (M, E), whose scores lie apart by more than rounding, and a bias (E,), which brings none of them close.

    The logits are not symmetric: the sigmoids of x and -x would make the sums of groups equal.
    """
    generator = torch.Generator().manual_seed(m + e)
    steps = torch.stack([torch.randperm(e, generator=generator) for _ in range(m)]).to(torch.float64)
    bias = torch.randint(2, (e,), generator=generator).to(torch.float64)
    return (3 * ((steps + 0.5) / e) ** 1.3 - 1.2).to(device, dtype), bias.to(device, dtype)


def first(values: list[float], k: int) -> list[int]:
    """Indices of the k largest, of equal ones the first, and NaN the largest, one after the other."""
    taken: list[int] = []
    for _ in range(k):
        rest = [
            (value != value, value if value == value else 0, -i) for i, value in enumerate(values) if i not in taken
        ]
        taken.append(-max(rest)[2])
    return taken


def choose(scores: list[float], policy: Policy) -> list[int]:
    """One token's experts by brute force."""
    size = len(scores) // policy.groups
    members = [scores[group * size : (group + 1) * size] for group in range(policy.groups)]
    if policy.top_groups < policy.groups:
        sums = [sum(values[i] for i in first(values, min(2, size))) for values in members]
        kept = first(sums, policy.top_groups)
        members = [values if group in kept else [-INFINITY] * size for group, values in enumerate(members)]
    return sorted(first(list(itertools.chain(*members)), policy.k))


def by_formula(logits: Tensor, experts: Tensor, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, weights, shares) of experts that are given, differentiable."""
    scores = logits.softmax(1) if policy.score == "softmax" else logits.sigmoid()
    weights = torch.stack([row[index] for row, index in zip(scores, experts.long(), strict=True)])
    if policy.normalised:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST)
    return scores, weights * policy.scale, scores / (scores.sum(1, keepdim=True) + LEAST)


def check(module: ModuleType, m: int, e: int, policy: Policy, dtype: torch.dtype, device: str = "cpu") -> None:
    """The choice to the index, for the scores that are returned and for those of float64; weights, scores, shares and
    gradients by the accuracy rule."""
    logits, bias = draw(m, e, dtype, device)
    dweights, dshares = draw_normal(1, dtype, device, (m, policy.k), (m, e))
    for given in (None, bias):
        with poisoned_memory():
            experts, weights, scores = module.route_forward(logits, policy, given)
        chosen_by = scores if given is None else scores + given
        assert experts.dtype == torch.int32 and experts.tolist() == [choose(row, policy) for row in chosen_by.tolist()]
        exact = reference.route_forward(logits.double(), policy, None if given is None else bias.double())[0]
        assert torch.equal(experts, exact)
        name = f"{policy} of {e}, bias {given is not None}, {dtype}"
        leaves = [logits.to(each).requires_grad_() for each in (torch.float64, dtype)]
        formulas = [by_formula(leaf, experts, policy) for leaf in leaves]
        for what, x, oracle, plain in zip(
            ("scores", "weights", "shares"), (scores, weights, module.shares(scores)), *formulas, strict=True
        ):
            assert_kernel_close(x, oracle.detach(), plain.detach(), f"{what}, {name}")
        for gradient in (None, dshares):
            with poisoned_memory():
                dlogits = module.route_backward(dweights, experts, scores, policy, gradient)
            wanted = []
            for leaf, (_, of_weights, of_shares) in zip(leaves, formulas, strict=True):
                loss = (of_weights * dweights).sum() + (0 if gradient is None else (of_shares * gradient).sum())
                wanted += torch.autograd.grad(loss, leaf, retain_graph=True)
            assert_kernel_close(dlogits, *wanted, f"dlogits, shares {gradient is not None}, {name}")


def equals_brute_force_and_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    for m, e, policy in (*CASES, *LARGE):
        for tokens in (1, 1000) if device == "cuda" else (m,):
            check(module, tokens, e, policy, dtype, device)


def ties(module: ModuleType, device: str = "cpu") -> None:
    """Of equal scores the lower indices are taken, within groups and among groups; 0 and -0 are equal."""
    for score in SCORES:
        zeros, policy = torch.zeros(2, 8, device=device), Policy(3, score)
        assert module.route_forward(zeros, policy)[0].tolist() == [[0, 1, 2]] * 2
        some = torch.tensor([[0.0, 1, 0, 1, 1, 0, 1, 1], [1.0, 1, 0, 0, 0, 0, 0, 5]], device=device)
        assert module.route_forward(some, policy)[0].tolist() == [[1, 3, 4], [0, 1, 7]]
        grouped = policy._replace(groups=4, top_groups=2)
        assert module.route_forward(zeros, grouped)[0].tolist() == [[0, 1, 2]] * 2
        # three groups have the second largest sum of logits; then only one has
        assert module.route_forward(some, grouped)[0].tolist() == [[1, 6, 7], [0, 1, 7]]
        # bias alone decides where scores are equal, and below zero, too
        bias = torch.tensor([-1.0, -0.5, -0.5, -2, -0.5, -3, -0.25, -4], device=device)
        assert module.route_forward(zeros, policy, bias)[0].tolist() == [[1, 2, 6]] * 2
        far = torch.full((1, 8), -300.0, device=device)  # sigmoids of 0, of which the bias makes 0 and -0
        signs = torch.tensor([-0.0, 0.0] * 4, device=device)
        experts, weights, _ = module.route_forward(far, policy, signs)
        assert experts.tolist() == [[0, 1, 2]] and bool(weights.isfinite().all())


def bias_is_for_the_choice_alone(module: ModuleType, device: str = "cpu") -> None:
    logits, _ = draw(4, 8, torch.float32, device)
    bias = torch.tensor([0.0, 9, 0, 0, 0, 9, 0, 0], device=device)
    for policy in policies(2):
        experts, weights, scores = module.route_forward(logits, policy, bias)
        assert experts.tolist() == [[1, 5]] * 4
        assert torch.equal(scores, module.route_forward(logits, policy)[2])
        picked = scores[:, [1, 5]]
        oracle, baseline = (
            2.5 * (each / each.sum(1, keepdim=True) if policy.normalised else each)
            for each in (picked.double(), picked)
        )
        assert_kernel_close(weights, oracle, baseline, f"{policy}")


def strange_logits(module: ModuleType, device: str = "cpu") -> None:
    """Whatever the logits are, indices are in range, ascending and those of the reference for the same scores, and a
    score is NaN where its formula is."""
    rows = [[NAN] * 8, [-NAN, *range(7)], [INFINITY, *range(7)], [-INFINITY] * 8, [INFINITY, -INFINITY] * 4,
            [3.4e38, -3.4e38] * 4, [-INFINITY] * 6 + [1.0, 2.0]]  # fmt: skip
    logits = torch.tensor(rows, device=device)
    for policy in (*policies(3), *policies(3, 4, 2)):
        for bias in (None, torch.tensor([0.0, NAN, INFINITY, -INFINITY, 0, 0, 0, 0], device=device)):
            experts, _, scores = module.route_forward(logits, policy, bias)
            chosen_by = scores if bias is None else scores + bias
            assert experts.tolist() == [choose(row, policy) for row in chosen_by.tolist()], (policy, scores)
            assert torch.equal(experts, reference.route_forward(logits, policy, bias)[0])
            oracle, baseline = (by_formula(each, experts, policy)[0] for each in (logits.double(), logits))
            assert torch.equal(scores.isnan(), oracle.isnan()), policy
            assert_kernel_close(*(each.nan_to_num(0) for each in (scores, oracle, baseline)), f"{policy}")


def takes_any_layout(module: ModuleType, device: str = "cpu") -> None:
    """No tokens, and operands that do not lie without gaps."""
    logits, bias = draw(5, 12, torch.float32, device)
    dweights, dshares = torch.ones(5, 3, device=device), logits.abs()
    for policy in (Policy(3), Policy(3, "sigmoid", groups=4, top_groups=2)):
        empty = module.route_forward(logits[:0], policy, bias)
        assert [tuple(x.shape) for x in empty] == [(0, 3), (0, 3), (0, 12)] and empty[0].dtype == torch.int32
        assert module.route_backward(dweights[:0], empty[0], empty[2], policy, dshares[:0]).shape == (0, 12)
        apart = bias[:, None].expand(12, 2).contiguous()[:, 1]
        experts, *found = module.route_forward(columnwise(logits), policy, apart)
        given = [columnwise(x) for x in (dweights, experts, found[1])]
        found.append(module.route_backward(*given, policy, columnwise(dshares)))
        wanted = []
        for dtype in (torch.float64, torch.float32):  # where nothing is strided: torch's sums depend on strides
            chosen, *results = reference.route_forward(logits.to(dtype), policy, bias.to(dtype))
            assert torch.equal(chosen, experts)
            gradients = dweights.to(dtype), experts, results[1], policy, dshares.to(dtype)
            wanted.append([*results, reference.route_backward(*gradients)])
        for x, oracle, baseline in zip(found, *wanted, strict=True):
            assert_kernel_close(x, oracle, baseline, f"{policy}")


test_equals_brute_force_and_autograd = everywhere(
    "route", equals_brute_force_and_autograd,
    {"reference": (torch.float64, torch.float32), "interpreter": (torch.float32,), "gpu": (torch.float32,)},
)  # fmt: skip
test_ties = everywhere("route", ties)
test_bias_is_for_the_choice_alone = everywhere("route", bias_is_for_the_choice_alone)
test_strange_logits = everywhere("route", strange_logits)
test_takes_any_layout = everywhere("route", takes_any_layout)

"""The choice of experts, their weights and gradients equal brute force and autograd: the reference and the kernel."""

import itertools
from types import ModuleType

import pytest
import torch
from row_checks import ONCE, check_layouts, columnwise, everywhere
from row_checks import draw as draw_normal
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor

pytest.importorskip("triton")

from tpformer.kernels.route import kernel, reference  # noqa: F401 - tests/execute takes the kernel from here
from tpformer.kernels.route.reference import SCORES, Policy

WIDE = dict.fromkeys(ONCE, (torch.float32,)) | {"reference": (torch.float64, torch.float32)}
LEAST = 1e-20  # what reference.py adds to a sum that divides
NAN, INFINITY = float("nan"), float("inf")


def policies(k: int, groups: int = 1, top_groups: int = 1) -> list[Policy]:
    return [Policy(k, score, normalised, 2.5, groups, top_groups) for score in SCORES for normalised in (True, False)]


# tokens, experts, policy: one expert, all of them, powers of two and not; groups of one, two and five experts; six and
# twelve groups, no powers of two
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
    """Indices of the k largest, of equal ones the first, and NaN the largest."""
    order = [(x == x, -x if x == x else 0, i) for i, x in enumerate(values)]
    return [i for *_, i in sorted(order)[:k]]


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
    gradients by the accuracy rule, of formulas without the bias, which is for the choice alone."""
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
        for x, oracle, plain in zip((scores, weights, module.shares(scores)), *formulas, strict=True):
            assert_kernel_close(x, oracle.detach(), plain.detach(), f"forward, {name}")
        for gradient in (None, dshares):
            with poisoned_memory():
                dlogits = module.route_backward(dweights, experts, scores, policy, gradient)
            wanted = []
            for leaf, (_, of_weights, of_shares) in zip(leaves, formulas, strict=True):
                loss = (of_weights * dweights).sum() + (0 if gradient is None else (of_shares * gradient).sum())
                wanted += torch.autograd.grad(loss, leaf, retain_graph=True)
            assert_kernel_close(dlogits, *wanted, f"dlogits, shares {gradient is not None}, {name}")


@everywhere("route", WIDE)
def test_equals_brute_force_and_autograd(module: ModuleType, dtype: torch.dtype, device: str) -> None:
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


@everywhere("route")
def test_takes_any_layout(module: ModuleType, device: str = "cpu") -> None:
    """No tokens, and operands that do not lie without gaps."""
    logits, bias = draw(5, 12, torch.float32, device)
    dweights, dshares = torch.ones(5, 3, device=device), logits.abs()

    def placed(x: Tensor) -> Tensor:  # the reference's bits are torch's, which depend on strides
        return x.contiguous() if module is reference else x

    for policy in (Policy(3), Policy(3, "sigmoid", groups=4, top_groups=2)):

        def backward(*given: Tensor, policy: Policy = policy) -> Tensor:
            return module.route_backward(*map(placed, given[:3]), policy, placed(given[3]))

        check_layouts(lambda x, policy=policy: module.route_forward(placed(x), policy, bias), logits)
        experts, weights, scores = module.route_forward(logits, policy, columnwise(bias))
        assert_identical([experts, weights, scores], list(module.route_forward(logits, policy, bias)))
        check_layouts(backward, dweights, experts, scores, dshares)


test_ties = everywhere("route")(ties)
test_strange_logits = everywhere("route")(strange_logits)

"""The judge passes what rounding explains and nothing else, and its copies hide nothing."""

import math

import torch
from torch import nn

from tpformer.parallel.judge import RecordedCall, allowed, departs, largest_difference, with_random_values

X = torch.linspace(-1, 1, 9, dtype=torch.float64)


def test_a_tensor_may_differ_by_rounding_and_by_no_more():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # models compute parts in float32
        x = X.to(dtype)
        assert not departs((X + 2 * eps).to(dtype), x, eps=eps)
        assert departs((X + 2 * allowed(1.0, eps)).to(dtype), x, eps=eps)
    assert allowed(1.0, 2**-8) < 0.1, "a dtype of few digits keeps half of them"
    assert allowed(1.0, 2**-8, moved=0.0) == 6 * 2**-8


def test_what_is_missing_or_no_number_departs():
    assert not departs(None, None) and not departs(None, 0 * X) and departs(None, X) and departs(X, None)
    assert not departs(None, 1e-13 * X, rounding=1e-12), "what rounding leaves of a gradient that is zero"
    assert departs(X[1:], X) and departs(X * math.nan, X) and departs(X, X * math.nan)
    infinite = torch.tensor([1.0, math.inf])
    assert not departs(infinite, infinite) and departs(-infinite, infinite)


def test_differences_relative_to_each_element_have_a_floor():
    assert largest_difference(torch.tensor([2.0, 1e-6]), torch.tensor([1.0, 0.0]), floor=1e-3) == 1.0
    assert largest_difference(torch.tensor([1.0, 1e-2]), torch.tensor([1.0, 0.0]), floor=1e-3) > 9


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4, device="meta"), nn.LayerNorm(4)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool, device="meta"))


def test_copies_have_random_values_and_stay_tied():
    module = Tied()
    made, again = with_random_values(module), with_random_values(module)
    assert made.b.weight is made.a.weight and not made.training and bool(made.mask.all())
    for (name, x), y in zip(made.named_parameters(), again.parameters(), strict=True):
        assert x.dtype == torch.float64 and not x.is_meta and len(x.unique()) == x.numel() and x.equal(y), name
    kept = nn.Linear(4, 4)
    assert with_random_values(module, {module.a: kept}).a is kept


def test_a_call_has_new_leaves_in_each_run():
    call = RecordedCall(((torch.zeros(2, requires_grad=True), torch.ones(2), 3), {"flag": True}))
    (first, leaves), (second, _) = call.fresh(), call.fresh()
    (x, y, number), kwargs = first
    assert (number, kwargs, len(leaves)) == (3, {"flag": True}, 1)
    assert x.requires_grad and not y.requires_grad and y.equal(torch.ones(2, dtype=torch.float64))
    before = x.detach().clone()
    x.add_(1)
    y.add_(1)
    assert second[0][0].equal(before) and second[0][1].equal(torch.ones(2, dtype=torch.float64))

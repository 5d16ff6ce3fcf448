"""The bench `families` finds what is wrong in a cell."""

import torch

from bench.families.cells import ERROR, REFUSED, RIGHT, WRONG, Cell, joined
from bench.families.models import FAMILIES
from bench.families.training import compare_runs, in_float64, train, worst_of


def test_what_is_missing_or_differs_is_wrong():
    x = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert str(worst_of({"x": x + 4e-3}, {"x": x}, "forward:")) == "forward: x is off by 0.001 times its largest value"
    assert not worst_of({"x": x * (1 + 1e-10)}, {"x": x}, "").wrong
    assert not worst_of({"x": x * 1e-14}, {"x": x * 0}, "", noise=1e-13).wrong
    for found in ({}, {"x": x, "y": x}, {"x": x[:1]}, {"x": x * torch.nan}, {"x": x + 1e-8}):
        assert worst_of(found, {"x": x}, "").wrong, found


def test_a_gradient_of_zero_that_should_not_be_is_found(tmp_path):
    with in_float64():
        family = next(family for family in FAMILIES if family.name == "Qwen3")
        family.save(tmp_path)
        expected = train(family.load(tmp_path), family.batch())
        other = family.load(tmp_path)
        other.get_parameter("model.layers.1.self_attn.q_norm.weight").register_hook(torch.zeros_like)
        forward, gradients, parameters, last = compare_runs(train(other, family.batch()), expected)
    assert not forward.wrong and parameters.wrong and last.wrong
    assert str(gradients) == "gradient of model.layers.1.self_attn.q_norm.weight is off by 1 times its largest value"


def test_nothing_is_rounded_to_float32():
    x = torch.tensor(1 + 2**-40, dtype=torch.float64)
    with in_float64():
        same = (x.float(), x.to(torch.float32), x[None].softmax(0, dtype=torch.float32) * x, torch.ones(1) * x)
    assert all(y.dtype == torch.float64 and y == x for y in same) and x.float() == 1


def test_the_worst_rank_decides():
    right, wrong = Cell(RIGHT, share=0.5), Cell(WRONG, "a gradient", 0.5)
    assert joined([right, wrong]) == wrong
    assert joined([Cell(REFUSED, "no")] * 2).verdict == REFUSED
    assert joined([right, Cell(REFUSED, "no")]).reason == "only some ranks refuse: no"
    assert joined([Cell(REFUSED, "no"), Cell(ERROR, "what")]).verdict == ERROR

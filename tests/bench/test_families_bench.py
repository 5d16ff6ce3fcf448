"""The bench `families` finds what is wrong, and its page is that of its results."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch

from bench.families.cells import ERROR, REFUSED, RIGHT, THEIRS, WRONG, Cell, joined
from bench.families.matrix import problems
from bench.families.models import FAMILIES, GROUPS
from bench.families.page import COLUMNS, PAGE, draw, page
from bench.families.training import compare, compare_runs, in_float64, train

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "bench/results/cpu/families.json"


def test_the_page_is_that_of_the_results() -> None:
    rows = json.loads(RESULTS.read_text())["rows"]
    assert PAGE.read_text() == page(RESULTS), "run python -m bench families"
    assert [row["family"] for row in rows] == [family.name for family in FAMILIES] and len(GROUPS) == 8
    assert all(row["cells"].keys() == COLUMNS.keys() for row in rows)
    assert problems(rows) == []
    ours = {column for column in COLUMNS if THEIRS not in column}
    assert {row["cells"][column]["verdict"] for row in rows for column in ours} == {RIGHT}


def test_what_is_missing_or_differs_is_wrong() -> None:
    x = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert str(compare({"x": x + 4e-3}, {"x": x}, "forward:")) == "forward: x is off by 0.001 times its largest value"
    assert not compare({"x": x * (1 + 1e-10)}, {"x": x}, "").wrong
    assert not compare({"x": x * 1e-14}, {"x": x * 0}, "", noise=1e-13).wrong
    for found in ({}, {"x": x, "y": x}, {"x": x[:1]}, {"x": x * torch.nan}, {"x": x + 1e-8}):
        assert compare(found, {"x": x}, "").wrong, found


def test_a_gradient_of_zero_that_should_not_be_is_found(tmp_path: Path) -> None:
    with in_float64():
        family = next(family for family in FAMILIES if family.name == "Qwen3")
        family.save(tmp_path)
        expected = train(family.load(tmp_path), family.batch())
        other = family.load(tmp_path)
        other.get_parameter("model.layers.1.self_attn.q_norm.weight").register_hook(torch.zeros_like)
        forward, gradients, parameters, last = compare_runs(train(other, family.batch()), expected)
    assert not forward.wrong and parameters.wrong and last.wrong
    assert str(gradients) == "gradient of model.layers.1.self_attn.q_norm.weight is off by 1 times its largest value"


def test_nothing_is_rounded_to_float32() -> None:
    x = torch.tensor(1 + 2**-40, dtype=torch.float64)
    with in_float64():
        same = (x.float(), x.to(torch.float32), x[None].softmax(0, dtype=torch.float32) * x, torch.ones(1) * x)
    assert all(y.dtype == torch.float64 and y == x for y in same) and x.float() == 1


def test_the_worst_rank_decides() -> None:
    right, wrong = Cell(RIGHT, share=0.5), Cell(WRONG, "a gradient", 0.5)
    assert joined([right, wrong]) == wrong
    assert joined([Cell(REFUSED, "no")] * 2).verdict == REFUSED
    assert joined([right, Cell(REFUSED, "no")]).reason == "only some ranks refuse: no"
    assert joined([Cell(REFUSED, "no"), Cell(ERROR, "what")]).verdict == ERROR

    def row(cell: Cell) -> dict:
        return {"family": "A", "cells": {column: cell._asdict() for column in COLUMNS}}

    assert problems([row(right)]) == []
    assert problems([row(right), row(wrong)])[0] == "A, tp 2: WRONG: a gradient"
    assert problems([row(right._replace(share=0.0))]) == ["only 0 of 4 cells are right and divided, fewer than 80%"]


def test_the_drawing_has_every_cell(tmp_path: Path) -> None:
    (tmp_path / "families.json").write_text(RESULTS.read_text())
    tree = ElementTree.parse(draw(tmp_path / "families.json"))
    squares = [each for each in tree.iter("{http://www.w3.org/2000/svg}rect") if each.attrib["width"] == "70"]
    assert len(squares) == len(FAMILIES) * len(COLUMNS)

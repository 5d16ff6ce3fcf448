"""The bench of learning-rate rules: its cases, what it requires, and its files from a run of few samples."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from commands import Commands, execute

from bench.learning_rate import Case, cases, make_row, page, problems

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own, as it joins and leaves a process group.
RUN = """
import bench.learning_rate as learning_rate
from bench.runner import main
from tpformer.models import GPTConfig
from testing import build_small_split

learning_rate.build_stdlib = build_small_split
learning_rate.MODEL = GPTConfig(vocab_size=257, seq_length=16, n_layers=1, hidden_size=16, n_heads=2)
learning_rate.SAMPLES, learning_rate.VALIDATION, learning_rate.RATES = 128, 4, (1e-3, 2e-3)
learning_rate.SEEDS, learning_rate.WARM_UP = (1, 2), 0.5
sys.exit(main(["learning_rate"], [learning_rate.BENCH], Path(sys.argv[1])))
"""


def test_the_cases() -> None:
    found = cases(1e-3)
    assert found[:2] == [Case("small batch", 8, 1e-3, True), Case("small batch", 8, 1e-3, False)]
    rates = [(case.rule, round(case.rate / 1e-3, 4)) for case in found if case.samples == 64 and case.warmup]
    assert rates == [("unscaled", 1), ("square root", 2.8284), ("linear", 8)] and len(found) == 8


def content(loss: float, **tried: float) -> dict:
    rows = [make_row(Case("small batch", 8, 2e-3, True), [(loss, 40.0), (loss, float("nan"))])]
    return {"rows": rows, "unigram_entropy": 3.0, "rates_tried": tried}


def test_rows_that_say_nothing_are_named() -> None:
    assert problems(content(2.3, **{"0.001": 2.5, "0.002": 2.3, "0.004": 2.4})) == []
    assert "it did not learn" in problems(content(2.5, **{"0.001": 2.5, "0.002": 2.3, "0.004": 2.4}))[0]
    assert "0.004 is at an end" in problems(content(2.3, **{"0.001": 2.5, "0.002": 2.3, "0.004": 2.2}))[0]
    assert "it did not learn" in problems(content(float("nan"), **{"0.001": 2.5, "0.002": 2.3, "0.004": 2.4}))[0]
    assert content(2.3)["rows"][0]["noise_scale"] == 40.0


def test_a_run_writes_rows_picture_and_page(commands: Commands, tmp_path: Path) -> None:
    code, _, err = commands.call(execute, RUN, str(tmp_path)).finish()
    assert code == 1, err  # after few steps nothing is learned, or one of two rates is at an end
    path = tmp_path / "cpu" / "learning_rate.json"
    result = json.loads(path.read_text())
    assert [len(row["losses"]) for row in result["rows"]] == [2] * 8
    by_rule = {(row["rule"], row["warmup"]): row["losses"] for row in result["rows"]}
    assert by_rule["linear", True] != by_rule["linear", False] != by_rule["unscaled", False]
    assert all(row["noise_scale"] is None for row in result["rows"][2:])
    ElementTree.parse(path.with_suffix(".svg"))
    text = page(path)
    assert text.count("\n| 64 |") == 6 and text.count("\n| 8 |") == 2
    assert f"{result['rows'][0]['loss']:.3f} (" in text


RESULTS = ROOT / "bench/results/cpu/learning_rate.json"


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_page_is_that_of_the_results() -> None:
    assert (ROOT / "docs/learning_rate.md").read_text() == page(RESULTS), "run python -m bench learning_rate"
    assert problems(json.loads(RESULTS.read_text())) == []

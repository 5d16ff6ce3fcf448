"""The bench `observe`: its row and its memory at a tiny size, and what it takes for a leak."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from testing import build_small_split
from turns import of_turn

from checks import observe as bench


@of_turn(1)
def test_a_row_and_the_memory_of_each_window(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"HIDDEN": 32, "SEQ": 16, "LAYERS": 1, "QUICK_STEPS": 6, "build_stdlib": build_small_split, "POLL": 0.005}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    report = bench.run(Namespace(quick=True))
    (row,), peaks = report.content["rows"], report.content["memory_mib"]
    assert (row["provider"], row["baseline"], row["ratio"] > 0) == (bench.OBSERVED, bench.PLAIN, True)
    assert len(peaks) == bench.WINDOWS and max(peaks) > 10 and report.problems == []


@pytest.mark.parametrize("last, problems", [(203, 0), (205, 1)])
def test_memory_that_grows_is_a_problem(monkeypatch: pytest.MonkeyPatch, last: int, problems: int) -> None:
    monkeypatch.setattr(bench, "measure", lambda quick: ([], [300, 100, 190, 200, 203, last]))
    assert len(bench.run(Namespace(quick=False)).problems) == problems


def test_seconds_are_those_of_the_median_window_after_the_first(tmp_path: Path) -> None:
    rows = [{"step": 50, "tokens": 500, "tokens_per_second": 1}, {"step": 50, "val_loss": 1.0}]
    for step, speed in ((100, 100), (150, 50), (175, 25), (200, 25), (250, 50), (300, 10)):
        rows += [{"step": step, "tokens": 10 * step, "tokens_per_second": speed}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bench.training_seconds(tmp_path, 300) == 5 * 10.0  # of 5, 10, 20, 10 and 50

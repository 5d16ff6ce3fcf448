"""The bubble bench: what it requires of a recorded step, and its files from a run with short sleeps."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import bubbles
from bench.bubbles import Case, make_row, measure
from bench.runner import main
from tpformer.parallel import Action
from tpformer.planner import schedule_order, simulate


def step(schedule: str, stages: int, gap: float = 0.0) -> list[Action]:
    """As simulated, with a gap between all starts that theory knows nothing of."""
    actions = simulate(schedule_order(schedule, 4, 8, stages), lambda step: 0.2 if step.kind == "B" else 0.1)
    return [a._replace(start=a.start * (1 + gap), end=a.start * (1 + gap) + a.end - a.start) for a in actions]


def test_the_bar_is_a_part_of_the_share() -> None:
    row = make_row(Case("ZBVZeroBubble", 8, 0.1), 1, step("ZBVZeroBubble", 2))
    assert row["measured_share"] == row["simulated_share"] == row["formula_share"] == 0.05882 and row["ok"]
    close, far = (make_row(Case("ZBVZeroBubble", 8, 0.1), 1, step("ZBVZeroBubble", 2, gap)) for gap in (0.002, 0.005))
    assert close["ok"] and 0.02 < close["relative"] < 0.05
    assert not far["ok"] and far["relative"] > 0.05 and far["difference"] < 0.01
    assert make_row(Case("1F1B", 8, 0.1), 1, step("1F1B", 1))["formula_share"] == 0.27273


def test_another_order_is_refused() -> None:
    actions = step("1F1B", 1)
    first, second = (next(a for a in actions if a[:4] == (3, 3, microbatch, "F")) for microbatch in (0, 1))
    swapped = [a._replace(microbatch=1 - a.microbatch) if a in (first, second) else a for a in actions]
    with pytest.raises(ValueError, match="1F1B: rank 3 ran"):
        make_row(Case("1F1B", 8, 0.1), 1, swapped)


class Ranks:
    """Gives what ranks would give, a list per rank, of one case after the other."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = list(gaps)

    def call(self, name: str) -> list[list[Action]]:
        actions = step(name.split()[0], 1, self.gaps.pop(0))
        return [[action for action in actions if action.rank == rank] for rank in range(4)]


def test_what_misses_is_repeated_within_the_budget() -> None:
    cases = [Case("1F1B", 8, 0.1), Case("GPipe", 8, 0.1)]
    late = Ranks(0.5, 0.01, 0.4, 0.7, 0.015)  # GPipe passes at once, 1F1B the fourth time
    found = measure(late, cases, 60)
    assert not late.gaps and [row["steps"] for row, _ in found.values()] == [4, 1]
    assert all(row["ok"] for row, _ in found.values())
    ((row, actions),) = measure(Ranks(0.5), cases[:1], 0).values()
    assert not row["ok"] and row["steps"] == 1 and len(actions) == 64


def test_a_run_writes_shares_and_timelines(forked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"NAMES": ("1F1B",), "MICROBATCHES": (8,), "SHORTEST": 0.01, "LENGTHENED": 0.0, "BUDGET": 0.0}
    for name, value in short.items():
        monkeypatch.setattr(bubbles, name, value)
    monkeypatch.setattr(bubbles, "BAR", -1.0)  # what no share can be within
    assert main(["bubbles"], [bubbles.BENCH], tmp_path) == 1
    (row,) = json.loads((tmp_path / "cpu" / "bubbles.json").read_text())["rows"]
    assert row["seconds"] == 0.01 and row["steps"] == 1 and row["span"] > 33 * 0.01 and 0 < row["measured_share"] < 1
    for name in ("bubbles", "pipeline_1F1B"):
        ElementTree.parse(tmp_path / "cpu" / f"{name}.svg")
    assert len(json.loads((tmp_path / "cpu" / "pipeline_1F1B.json").read_text())["traceEvents"]) > 64

"""The ZeRO bench: what it requires, and its files. Its formulas are the planner's (tests/planner/test_memory.py)."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from checks import zero
from checks.held import BUFFERS, KINDS, Held
from checks.split_backward import differences
from checks.zero import BACKWARD, FORWARD, IDLE, PEAK, STEP, Measured, zero_row
from harness.plot import REQUIRED
from harness.runner import main
from harness.step_counts import DATA, GEMMS, LAYERS, SENDS, Call, StepCounts
from tpformer.planner.states import GRADIENTS, OPTIMIZER, rank_moments

CASE = "ZeRO 2 x4"
CONFIG = zero.run_config(zero.CASES[CASE], "bfloat16", zero.MODEL)


def measured(factor: float = 1.0, kind: str = OPTIMIZER) -> Measured:
    """A rank that holds what it should of stage 2, times a factor for one kind."""
    formula = rank_moments(CONFIG, 0)
    by_moment = {IDLE: formula.idle, FORWARD: formula.forward, BACKWARD: formula.backward, STEP: formula.backward}
    moments: dict[str, Held] = {moment: dict.fromkeys(KINDS, 0) for moment in zero.MOMENTS}
    for moment, sizes in by_moment.items():
        moments[moment] |= {name: round(size * (factor if name == kind else 1)) for name, size in sizes.items()}
    moments[PEAK][BUFFERS] = round(formula.peak)
    memory = {moment: sum(moments[moment].values()) for moment in (IDLE, BACKWARD, STEP)}
    return Measured(moments, memory, collectives(9, 9 * zero.MICROBATCHES))


def collectives(gathers: int, scatters: int) -> StepCounts:
    calls = (("all_gather", gathers), ("reduce_scatter", scatters), ("partial all_reduce", 3))
    return Counter({Call(DATA, name, 10): times for name, times in calls})


def wrong(held: Measured) -> list[str]:
    """The moments that are not as they should be."""
    return [moment for moment, found in zero_row(CASE, CONFIG, 0, held)["moments"].items() if not found["ok"]]


def test_published_formulas() -> None:
    for optimizer, whole, stages in ((16, 2000, [800, 650, 500]), (12, 1600, [700, 550, 400])):
        assert [zero.published(100, stage, 4, optimizer) for stage in (1, 2, 3)] == stages
        assert zero.published(100, 0, 1, optimizer) == whole


def test_the_bar_is_on_each_moment() -> None:
    row = zero_row(CASE, CONFIG, 0, measured())
    assert row["shards"] == 4 and row["parameters"] == 1719808 and list(row["moments"]) == list(zero.MOMENTS)
    assert wrong(measured()) == wrong(measured(1.02)) == []
    # of the total 4 % of the gradients are too little to be seen
    late = zero_row(CASE, CONFIG, 0, measured(1.04, GRADIENTS))["moments"]
    assert [moment for moment in late if not late[moment]["ok"]] == [FORWARD, BACKWARD, STEP]
    assert all(abs(sum(found["held"]) / found["formula"] - 1) < zero.BAR for found in late.values())
    seen = measured()  # a peak, and memory that the books do not show
    seen.memory[IDLE] = round(seen.memory[IDLE] * 1.05)
    seen.moments[PEAK][BUFFERS] = round(seen.moments[PEAK][BUFFERS] * 1.05)
    assert wrong(seen) == [IDLE, PEAK]


def test_counts_are_exact() -> None:
    row = zero_row(CASE, CONFIG, 0, measured())
    assert zero.problems_of([row]) == [] and row["collectives"] == row["expected"] == [9, 36, 0]
    once = measured()._replace(collectives=collectives(9, 9))  # reduced in the last microbatch only: ZeRO-1
    (problem,) = zero.problems_of([zero_row(CASE, CONFIG, 0, once)])
    assert problem == "ZeRO 2 x4, bfloat16, pp rank 0: [9, 9, 0] collectives, not [9, 36, 0]"


def test_differences_of_steps() -> None:
    step = Counter({Call(LAYERS, "all_gather", 8): 2, Call(DATA, "reduce_scatter", 8): 1, Call(GEMMS): 100})
    assert differences(step + Counter({Call(SENDS, "send", 4): 3}), step) == []
    larger = step - Counter({Call(LAYERS, "all_gather", 8): 2}) + Counter({Call(LAYERS, "all_gather", 16): 2})
    found = [f"layers, all_gather of {text}" for text in ("16 bytes: 2, not 0", "8 bytes: 0, not 2")]
    assert sorted(differences(larger, step)) == found
    assert differences(step + Counter({Call(GEMMS): 1}), step) == ["GEMM FLOPs: 101, not 100"]


@pytest.mark.parametrize("factor, code", [(1.0, 0), (1.05, 1)])
def test_files_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, code: int) -> None:
    monkeypatch.setattr(zero, "measure_all", lambda dtypes: [zero_row(CASE, CONFIG, 0, measured(factor))])
    monkeypatch.setattr(zero, "split_rows", lambda: ([], []))
    assert main(["zero"], [zero.BENCH], tmp_path) == code
    result = json.loads((tmp_path / "cpu" / "zero.json").read_text())
    assert {"rows", "splits", "model", "note", "commit", "kinds"} <= set(result)
    assert len(result["rows"]) == 1 and result["rows"][0]["moments"][IDLE]["ok"] == (code == 0)
    drawn = ElementTree.parse(tmp_path / "cpu" / "zero.svg").getroot()
    assert {CASE, *zero.MOMENTS, *KINDS} <= {each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")}
    lines = [each.attrib["stroke"] for each in drawn.iter("{http://www.w3.org/2000/svg}line")]
    assert lines.count(REQUIRED) == len(zero.MOMENTS)


def test_one_dtype_and_only_counts_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "measure_all", lambda dtypes: [zero_row(CASE, CONFIG, 0, measured())])
    monkeypatch.setattr(zero, "split_rows", lambda: ([], ["DualPipeV, recompute none: flops: 2, not 1"]))
    assert main(["zero", "--dtype", "float32"], [zero.BENCH], tmp_path) == 0
    assert main(["zero", "--split"], [zero.BENCH], tmp_path) == 1
    assert not list(tmp_path.iterdir())

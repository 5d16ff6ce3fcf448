"""The ZeRO bench: its formulas by hand, what it requires, and its files."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository is not installed as a whole

from bench import zero  # noqa: E402
from bench.held import BUFFERS, GATHERED, OPTIMIZER, SHARDED, SHARDED_GRADIENTS, WHOLE_GRADIENTS, Held  # noqa: E402
from bench.runner import main  # noqa: E402
from bench.split_backward import differences, total  # noqa: E402
from bench.step_counts import Calls, StepCounts  # noqa: E402
from bench.zero import CollectiveRow, Measured, ZeroRow, collective_row, zero_rows  # noqa: E402
from bench.zero_formulas import BACKWARD, FORWARD, IDLE, STEP, Move, PartSizes, Plan, expected, paper, slides  # noqa: E402

# 4 layers of 200, 100 in no layer, 4 added to make shards equal
PART = PartSizes(stage=0, total=900, padded=904, root=104, layer=200, n_layers=4, queued=600, early=0)
TWICE = [Move(0, kind) for kind in "FBFB"]


def sizes(sharded: int, gathered: int = 0, whole: int = 0, grads: int = 0, optimizer: int = 0) -> Held:
    named = {SHARDED: sharded, GATHERED: gathered, WHOLE_GRADIENTS: whole, SHARDED_GRADIENTS: grads}
    return {**named, OPTIMIZER: optimizer, BUFFERS: 0}


# stage -> (end of the last forward, largest at layers), bytes; 4 ranks: 4 * 904 / 4 = 904, 8 * 900 / 4 = 1800
STAGES = {
    1: (sizes(904, 1808, 3600, 0, 1800), 904 + 1800 + 1808 + 3600 + 2 * 200),
    2: (sizes(904, 1808, 0, 904, 1800), 904 + 1800 + 1808 + 904 + (2 + 4) * 200),
    3: (sizes(904, 208, 0, 904, 1800), 904 + 1800 + 208 + 904 + (3 * 2 + 4) * 200),
}


@pytest.mark.parametrize("stage", STAGES)
def test_formulas_by_hand(stage: int) -> None:
    moves = [*TWICE, Move(0, "R")]
    found = expected([PART], Plan(stage, 4, 2, 4), moves, pipeline=False)
    forward, peak = STAGES[stage]
    assert found.moments[IDLE] == sizes(904, optimizer=1800)
    assert found.moments[FORWARD] == forward and found.peak == peak
    assert found.moments[BACKWARD] == found.moments[STEP] == sizes(904, grads=904, optimizer=1800)


def test_formula_of_stage_0_and_of_float32() -> None:
    moves, plain = [*TWICE, Move(0, "R")], PART._replace(padded=900, root=100)
    found = expected([plain], Plan(0, 1, 2, 4), moves, pipeline=False)
    assert found.moments[FORWARD] == sizes(3600, 1800, 3600, 0, 7200)
    assert found.peak == 18 * 900 + 4 * 200  # the first unit reduced: its shard is a whole gradient
    assert expected([plain], Plan(0, 1, 4, 4), moves, pipeline=False).peak == 20 * 900


def test_formula_of_a_pipeline() -> None:
    """1F1B's first rank: the second forward comes before any gradient, the third with the first's."""
    first = [Move(0, kind) for kind in "FFB"]
    assert expected([PART], Plan(3, 4, 2, 4), first, pipeline=True).moments[FORWARD] == sizes(904, 208, 0, 0, 1800)
    third = expected([PART], Plan(3, 4, 2, 4), [*first, Move(0, "F")], pipeline=True)
    assert third.moments[FORWARD] == sizes(904, 208, 0, 904, 1800)
    two = [PART, PART._replace(stage=3, early=100)]
    moves = [Move(stage, kind) for stage in (0, 3) for kind in "FIW"]
    split = expected(two, Plan(1, 4, 2, 4), moves, pipeline=True)
    assert split.moments[FORWARD] == sizes(1808, 3616, 3600, 0, 3600)
    assert split.peak == 1808 + 3616 + 2 * 3600 + 3600  # after the last W; before it 3600 less and 2 * 600 more


def test_published_formulas() -> None:
    assert [slides(100, Plan(stage, 4, 2, 4)) for stage in (1, 2, 3)] == [800, 650, 500]
    assert [paper(100, Plan(stage, 4, 2, 4)) for stage in (1, 2, 3)] == [700, 550, 400]
    assert slides(100, Plan(0, 1, 2, 4)) == 2000 and paper(100, Plan(0, 1, 2, 4)) == 1600


def measured(factor: float = 1.0, kind: str = OPTIMIZER) -> Measured:
    """A rank that holds what it should of stage 2, times a factor for one kind."""
    plan, moves = Plan(2, 4, 2, 4), [*TWICE, Move(0, "R")]
    formula = expected([PART], plan, moves, pipeline=False)
    moments = {moment: dict(held) for moment, held in formula.moments.items()}
    moments[zero.PEAK] = {**sizes(0), BUFFERS: formula.peak}
    for moment in (IDLE, FORWARD, BACKWARD, STEP):
        moments[moment][kind] = round(moments[moment][kind] * factor)
    memory = {moment: sum(held.values()) for moment, held in moments.items() if moment in (IDLE, BACKWARD, STEP)}
    units, m = 5, zero.MICROBATCHES
    data = Calls({("all_gather", 10): units, ("reduce_scatter", 20): units * m})
    return Measured([PART], plan, moves, moments, memory, StepCounts(data=data))


def test_the_bar_is_on_each_of_the_three() -> None:
    rows = zero_rows("ZeRO 2 x4", "bfloat16", 0, measured())
    assert [list(row) for row in rows] == [list(ZeroRow.__annotations__)] * 5
    assert all(row["ok"] and row["relative"] == 0 for row in rows)
    assert all(row["ok"] for row in zero_rows("ZeRO 2 x4", "bfloat16", 0, measured(1.02)))
    # of the total 4 % of the gradients are too little to be seen
    late = zero_rows("ZeRO 2 x4", "bfloat16", 0, measured(1.04, SHARDED_GRADIENTS))
    assert [row["moment"] for row in late if not row["ok"]] == [FORWARD, BACKWARD, STEP]
    assert all(abs(row["relative"]) < zero.BAR for row in late)


def test_memory_that_the_books_do_not_show_is_refused() -> None:
    seen = measured()
    seen.memory[IDLE] = round(seen.memory[IDLE] * 1.05)
    assert [row["moment"] for row in zero_rows("ZeRO 2 x4", "bfloat16", 0, seen) if not row["ok"]] == [IDLE]


def test_counts_are_exact() -> None:
    parallel = zero.CASES["ZeRO 2 x4"]
    row = collective_row("ZeRO 2 x4", "bfloat16", 0, parallel, measured())
    assert list(row) == list(CollectiveRow.__annotations__) and row["ok"] and row["expected"] == [5, 20, 0]
    once = measured()
    once.collectives.data["reduce_scatter", 20] = 5  # reduced in the last microbatch only: ZeRO-1
    assert not collective_row("ZeRO 2 x4", "bfloat16", 0, parallel, once)["ok"]


def test_differences_of_steps() -> None:
    step = StepCounts(Calls({("all_gather", 8): 2}), Calls({("reduce_scatter", 8): 1}), Calls({("send", 4): 3}), 100)
    assert total([step, step]).layers == {("all_gather", 8): 4} and total([step, step]).flops == 200
    assert differences(replace(step, messages=Calls()), step) == []
    larger = replace(step, layers=Calls({("all_gather", 16): 2}))
    assert len(differences(larger, step)) == 1 and differences(larger, step)[0].startswith("layers: ")
    assert differences(replace(step, flops=101), step) == ["flops: 101, not 100"]


@pytest.mark.parametrize("factor, code", [(1.0, 0), (1.05, 1)])
def test_files_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, code: int) -> None:
    def rows(dtypes: list[str]) -> tuple[list[ZeroRow], list[CollectiveRow]]:
        one = measured(factor)
        return (
            [row for dtype in dtypes for row in zero_rows("ZeRO 2 x4", dtype, 0, one)],
            [collective_row("ZeRO 2 x4", dtype, 0, zero.CASES["ZeRO 2 x4"], one) for dtype in dtypes],
        )

    monkeypatch.setattr(zero, "measure_all", rows)
    monkeypatch.setattr(zero, "split_rows", lambda: ([], []))
    assert main(["zero"], [zero.TOOL], tmp_path) == code
    result = json.loads((tmp_path / "cpu" / "zero.json").read_text())
    assert {"rows", "collectives", "splits", "model", "note", "commit"} <= set(result)
    assert len(result["rows"]) == 10 and all(
        row["ok"] == (code == 0) for row in result["rows"] if row["moment"] == IDLE
    )
    drawn = ElementTree.parse(tmp_path / "cpu" / "zero.svg").getroot()
    assert "ZeRO 2 x4: idle" in [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_one_dtype_and_only_counts_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "measure_all", lambda dtypes: (zero_rows("ZeRO 2 x4", dtypes[0], 0, measured()), []))
    monkeypatch.setattr(zero, "split_rows", lambda: ([], ["DualPipeV, recompute none: flops: 2, not 1"]))
    quiet = Console(quiet=True)
    assert zero.run(["--dtype", "float32"], tmp_path, quiet) == 0
    assert zero.run(["--split"], tmp_path, quiet) == 1
    assert not list(tmp_path.iterdir())

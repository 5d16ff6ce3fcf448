"""Pictures of a pipeline step show every action where it was; four ranks run and draw the step that is simulated."""

import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from bench.bubbles import build
from tpformer.cli.training import timeline_command
from tpformer.distributed import build_mesh
from tpformer.parallel import SCHEDULES, Action, gather_actions, recording
from tpformer.planner import Step, bubble_lines, bubble_share, draw_timeline, schedule_order, simulate, timeline

SVG = "{http://www.w3.org/2000/svg}"
# two ranks, one stage each, one microbatch, and a reduction on rank 0
SMALL = [
    Action(0, 0, 0, "F", 10.0, 11.0),
    Action(0, 0, 0, "B", 14.0, 16.0),
    Action(0, 0, -1, "R", 16.0, 17.0),
    Action(1, 1, 0, "F", 11.0, 12.0),
    Action(1, 1, 0, "B", 12.0, 14.0),
]


def boxes_of(path: Path) -> list[tuple[str, dict[str, str]]]:
    """(title, attributes) of every box of a picture."""
    rects = ElementTree.parse(path).iter(f"{SVG}rect")
    return [(rect.find(f"{SVG}title").text, rect.attrib) for rect in rects if len(rect)]


@pytest.mark.parametrize("schedule, number, actions", [
    ("1F1B", 1, []),
    ("another", 1, SMALL),
    ("1F1B", 1, [each._replace(kind=7) for each in SMALL]),
    ("1F1B", "1", SMALL),
])  # fmt: skip
def test_a_record_that_is_none_is_damaged(schedule, number, actions, tmp_path):
    record = {"schedule": schedule, "n_microbatches": number, "actions": actions}
    (tmp_path / "timeline.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"timeline\.json is damaged \(.*\): record the step again"):
        timeline_command([str(tmp_path)])


def test_svg_has_every_action_where_it_was(tmp_path):
    timeline.write_svg(SMALL, tmp_path / "small.svg", "two <ranks>", "formula one\nand two")
    boxes = dict(boxes_of(tmp_path / "small.svg"))
    bubble = boxes.pop("bubble")
    assert bubble["fill"] == "url(#bubble)" and len(boxes) == len(SMALL)
    second = float(bubble["width"]) / 7  # with the reduction the picture has seven seconds
    places = {
        "forward, stage 0, microbatch 0": (0, 1), "backward, stage 0, microbatch 0": (4, 2),
        "gradient reduction, stage 0": (6, 1),
        "forward, stage 1, microbatch 0": (1, 1), "backward, stage 1, microbatch 0": (2, 2),
    }  # fmt: skip
    assert {title.split(":")[0] for title in boxes} == places.keys()
    for title, box in boxes.items():
        place = (float(box["x"]) - float(bubble["x"])) / second, float(box["width"]) / second
        assert place == pytest.approx(places[title.split(":")[0]], abs=1e-3)
    assert any(title.endswith("2000.0 ms from 4000.0 ms on") for title in boxes)
    lanes = {title.split(",")[1]: box["y"] for title, box in boxes.items()}
    assert lanes[" stage 0"] != lanes[" stage 1"] and len({box["fill"] for box in boxes.values()}) == 3
    texts = {text.text for text in ElementTree.parse(tmp_path / "small.svg").iter(f"{SVG}text")}
    # 6 of 2 x 6 s are idle; a reduction neither computes nor lengthens the step
    assert "bubble measured: 50.0% of ranks' time, 1.000 of computing time" in texts
    assert {"two <ranks>", "formula one", "and two", "rank 0", "rank 1", "0 s", "7 s"} <= texts


def test_a_long_step_goes_on_below(tmp_path):
    """Two bands of lanes as wide as a phone shows; a box that begins in one and ends in the next is in both."""
    actions = simulate(schedule_order("1F1B", 2, 16, 1), lambda step: 2.0 if step.kind == "B" else 1.0)
    timeline.write_svg(actions, tmp_path / "long.svg", "", "")
    boxes = boxes_of(tmp_path / "long.svg")
    lanes = [float(each["y"]) for title, each in boxes if title == "bubble"]
    assert len(lanes) == len(set(lanes)) == 4
    assert all(float(each["x"]) + float(each["width"]) <= 58 + 560 + 0.02 for _, each in boxes)
    wide = dict.fromkeys((title for title, _ in boxes), 0.0)
    for title, each in boxes:
        wide[title] += float(each["width"])
    second = 2 * 560 / 51  # two bands of 51 s together
    del wide["bubble"]
    assert len(wide) == len(actions)
    for title, width in wide.items():
        assert width == pytest.approx((2 if title.startswith("b") else 1) * second, abs=0.05), title


def test_trace_has_every_action_in_microseconds(tmp_path):
    timeline.write_trace(SMALL, tmp_path / "small.json")
    events = json.loads((tmp_path / "small.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(SMALL)
    backward = {"ph": "X", "name": "B0", "cat": "backward", "pid": 1, "tid": 1, "ts": 2e6, "dur": 2e6}
    assert complete[2] == {**backward, "args": {"stage": 1, "microbatch": 0}}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}


def test_what_is_said_of_a_whole_step_is_the_formula_and_its_own_order():
    actions = simulate(schedule_order("1F1B", 4, 8, 1), lambda step: 2.0 if step.kind == "B" else 1.0)
    formula, order = bubble_lines(actions, "1F1B", 8).split("\n")
    assert "(p-1)/m = 0.375 of the computing time, 27.3% of the whole" in formula and order.endswith(": 27.3%")
    late = [action._replace(start=2 * action.start, end=action.start + action.end) for action in actions]
    assert bubble_share(late, 4) > 0.5 and bubble_lines(late, "1F1B", 8) == bubble_lines(actions, "1F1B", 8)
    actions = simulate(schedule_order("ZBVZeroBubble", 4, 4, 2), lambda step: 1.0)
    assert "(p-1)/(6 m) does not hold for p = 4 ranks, m = 4 microbatches" in bubble_lines(actions, "ZBVZeroBubble", 4)
    for wrong, n in ((late[1:], 8), (late + late[:1], 8), (late, 16)):
        said = f"on 4 ranks with {n} microbatches has {8 * n} actions. The record has {len(wrong)},.*one whole step"
        with pytest.raises(ValueError, match=said):
            bubble_lines(wrong, "1F1B", n)


def run_and_draw(cases: dict[str, int], directory: Path) -> list[list[Action] | None]:
    mesh = build_mesh("cpu", tensor_parallel=1, pipeline_parallel=dist.get_world_size())
    found = []
    for schedule, n_microbatches in cases.items():
        actions = gather_actions(build(schedule, n_microbatches, 0.01, mesh)())
        if actions is not None:
            draw_timeline(actions, directory / schedule, schedule, n_microbatches)
        found.append(actions)
    return found


def test_four_ranks_run_what_is_simulated_and_are_drawn(ranks, tmp_path):
    cases = {"1F1B": 5, "Interleaved1F1B": 4, "ZBVZeroBubble": 4}
    first, *others = ranks(4).run(run_and_draw, cases, tmp_path)
    assert others == [[None] * 3] * 3
    for (schedule, n_microbatches), actions in zip(cases.items(), first, strict=True):
        order = schedule_order(schedule, 4, n_microbatches, SCHEDULES[schedule].stages_per_rank)
        for rank in range(4):
            ran = [action for action in actions if action.rank == rank and action.kind != "R"]
            steps = [Step(a.stage, a.kind, a.microbatch) for a in ran]
            assert steps == [step for together in order[rank] for step in together]
            assert all(a.end - a.start >= (0.02 if a.kind == "B" else 0.01) for a in ran)
        seconds = {Step(a.stage, a.kind, a.microbatch): a.end - a.start for a in actions}
        least = bubble_share(simulate(order, seconds.__getitem__), 4)  # the least that these actions leave idle
        assert 0 < least <= bubble_share(actions, 4) < 1  # the rest depends on what else the machine runs
        events = json.loads((tmp_path / schedule / "pipeline.json").read_text())["traceEvents"]
        assert sum(event["ph"] == "X" for event in events) == len(actions)
        assert len(boxes_of(tmp_path / schedule / "pipeline.svg")) >= len(actions)


def gather_from_another_machine() -> tuple[float, list[Action] | None]:
    """Rank 1's machine has been up for 1000 s longer."""
    later = 1000.0 * dist.get_rank()
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + later)
    now = time.perf_counter()
    record = [Action(dist.get_rank(), 0, 0, "F", now + later, now + later + 1)]
    with mock.patch.multiple(recording, time=clock, _machine=lambda: f"machine {dist.get_rank()}"):
        return now, gather_actions(record)


def test_clocks_of_machines_are_aligned(ranks):
    (first, actions), (second, _) = ranks(2).run(gather_from_another_machine)
    apart = abs(actions[1].start - second)  # as far as two busy ranks leave a barrier apart
    assert actions[0].start == first and apart < abs(actions[1].start - (second + 1000.0))
    assert actions[1].end - actions[1].start == pytest.approx(1)

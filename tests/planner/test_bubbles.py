"""The closed forms of bubbles equal the idle time of torch's own orders in a simulation, which obeys their rules."""

import itertools
from fractions import Fraction

import pytest

from tpformer.parallel import SCHEDULES, Action
from tpformer.planner import RATIOS, Step, bubble_ratio, bubble_time, schedule_order, simulate

EQUAL = {"F": 1, "I": 1, "W": 1}
DURATIONS = [EQUAL, {"F": 2, "I": 3, "W": 1}, {"F": 1, "I": Fraction(3, 2), "W": Fraction(1, 2)}]


def simulated(schedule: str, ranks: int, n: int, stages: int, seconds: dict) -> list[Action]:
    times = {**seconds, "B": seconds["I"] + seconds["W"]}
    return simulate(schedule_order(schedule, ranks, n, stages), lambda step: times[step.kind])


def idle(actions: list[Action], ranks: int) -> Fraction:
    """The idle seconds of a rank, as a mean over the ranks; exact, because the durations are rational."""
    busy = sum(action.end - action.start for action in actions)
    return max(action.end for action in actions) - Fraction(busy, ranks)


def layouts() -> list[tuple[str, int, int, int]]:
    found = []
    for schedule, kind in SCHEDULES.items():
        stages = (1, 2, 3) if kind.looped else (kind.stages_per_rank,)
        for p, v, multiple in itertools.product((2, 3, 4), stages, (1, 2, 4)):
            found.append((schedule, p, 1 if schedule == "naive" else multiple * p, v))
    return [layout for layout in found if layout[0] != "DualPipeV" or layout[2] >= 2 * layout[1]]


@pytest.mark.parametrize("seconds", DURATIONS, ids=str)
def test_closed_forms_are_what_the_orders_take(seconds):
    held = set()
    for schedule, p, m, v in layouts():
        expected = bubble_time(schedule, p, m, seconds)
        if expected is not None:
            assert idle(simulated(schedule, p, m, v, seconds), p) == expected, (schedule, p, m, v)
            held.add(schedule)
    v_shaped = {name for name, kind in SCHEDULES.items() if kind.v_shaped}
    assert held == set(SCHEDULES) - (set() if seconds is EQUAL else v_shaped)


def test_the_formulas_that_are_printed():
    """With F = I = W, bubble_ratio gives what the text in RATIOS evaluates to."""
    for schedule, p, m, v in layouts():
        ratio = bubble_ratio(schedule, p, m, v)
        if ratio is not None:
            formula = RATIOS[schedule].replace(" ", "*")
            assert ratio == pytest.approx(eval(formula, {"p": p, "m": m, "v": v})), schedule


def test_no_closed_form_is_given_where_none_holds():
    assert bubble_time("1F1B", 4, 3, EQUAL) is None
    assert bubble_time("InterleavedZeroBubble", 4, 8, {"F": 1, "I": 2, "W": 2}) is None
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        assert bubble_time(schedule, 4, 8, {"F": 1, "I": 1, "W": 2}) is None
    assert bubble_time("DualPipeV", 4, 7, EQUAL) is None and bubble_time("ZBVZeroBubble", 4, 7, EQUAL) == 3
    # with fewer than 2p - 1 microbatches torch takes the order for 2p - 1, and is idle in the place of those missing
    assert bubble_time("ZBVZeroBubble", 4, 6, EQUAL) is None and bubble_ratio("ZBVZeroBubble", 4, 4, 2) is None
    assert idle(simulated("ZBVZeroBubble", 4, 4, 2, EQUAL), 4) == 6
    # its paper measures a rank from its own first start to its own last end, and there it is never idle
    actions = simulated("ZBVZeroBubble", 4, 8, 2, EQUAL)
    for rank in range(4):
        own = [action for action in actions if action.rank == rank]
        assert max(a.end for a in own) - min(a.start for a in own) == len(own) == 2 * 8 * 3


def test_results_of_steps_that_run_together_are_sent_together():
    pair = (Step(0, "F", 1), Step(0, "B", 0))
    order = [[(Step(0, "F", 0),), pair, (Step(0, "B", 1),)], []]
    order[1] = [(Step(1, kind, microbatch),) for microbatch in (0, 1) for kind in "FB"]
    start = {(a.stage, a.kind, a.microbatch): a.start for a in simulate(order, lambda step: 1)}
    assert start[1, "B", 0] == 2 and start[0, "B", 0] == 3
    assert start[1, "F", 1] == 4  # F1 of stage 0 ends at 2, and the pair at 4


def test_an_order_that_waits_for_itself_is_named():
    order = [[(Step(0, "B", 0),), (Step(0, "F", 0),)]]
    with pytest.raises(ValueError, match="every rank waits for another.*Step"):
        simulate(order, lambda step: 1)

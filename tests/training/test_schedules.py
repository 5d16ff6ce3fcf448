"""Learning rate and batch size are their formulas at every step, and a warm-up that does not fit is not silent."""

import itertools
import math

import pytest
from testing import assert_same

from tpformer.config import OptimizerSection, TrainSection, batch_sizes
from tpformer.training.schedules import batch_size, learning_rate, samples_before, warmup_notice

LR, FLOOR, WARM, STEPS = 2.0, 0.1, 10, 110
FORMULAS = {  # of x, the share of the steps after the warm-up, and of the step itself
    "constant": lambda x, step: LR,
    "linear": lambda x, step: LR * (1 - x * (1 - FLOOR)),
    "cosine": lambda x, step: LR * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * x)) / 2),
    "wsd": lambda x, step: LR if step <= 77 else LR * (1 - (step - 77) / 33 * (1 - FLOOR)),
}


@pytest.mark.parametrize("schedule", FORMULAS)
def test_each_step_is_the_formula(schedule):
    config = OptimizerSection(lr=LR, warmup_steps=WARM, min_lr_ratio=FLOOR, schedule=schedule, decay_fraction=0.3)
    rates = [learning_rate(step, STEPS, config) for step in range(1, STEPS + 1)]
    expected = [LR * step / WARM for step in range(1, WARM + 1)]
    expected += [FORMULAS[schedule]((step - WARM) / (STEPS - WARM), step) for step in range(WARM + 1, STEPS + 1)]
    assert_same(rates, expected)
    assert rates[WARM - 1] == LR
    assert_same(rates[-1], LR if schedule == "constant" else LR * FLOOR)


def test_edges_of_the_schedules():
    def rates(steps, **options):
        return [learning_rate(step, steps, OptimizerSection(lr=1.0, **options)) for step in range(1, steps + 1)]

    assert rates(3, warmup_steps=0, schedule="wsd", decay_fraction=0.0) == [1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=2, schedule="wsd", decay_fraction=1.0, min_lr_ratio=0.0) == [0.5, 1.0, 0.5, 0.0]
    assert rates(5, warmup_steps=10)[-1] == 0.5


def test_the_default_warm_up_fits_a_short_run_and_a_longer_one_is_named():
    """N8: 100 steps of warm-up were the default of a run of 50, too."""
    config = OptimizerSection(lr=1.0)
    assert [learning_rate(step, 50, config) for step in (1, 5)] == [0.2, 1.0] and warmup_notice(50, config) is None
    assert learning_rate(100, 5000, config) == 1.0 > learning_rate(99, 5000, config)
    notice = warmup_notice(5, OptimizerSection(lr=1.0, warmup_steps=50))
    assert notice is not None and "warmup_steps=50 is more than train.steps=5" in notice and "ends at 0.1" in notice


@pytest.mark.parametrize("start, full, steps", [(4, 12, 4), (2, 14, 9), (3, 30, 4), (8, 8, 5), (None, 8, 5), (1, 7, 1)])
def test_sizes_grow_at_equal_distances_and_no_sample_is_left_out(start, full, steps):
    train = TrainSection(global_batch_size=full, batch_size_start=start, batch_size_ramp_steps=steps)
    sizes = [batch_size(step, train) for step in range(1, steps + 4)]
    first, growths = start or full, full // (start or full) - 1
    assert sizes == [first * (1 + min(growths, k * growths // steps)) for k in range(steps + 3)]
    assert [samples_before(step, train) for step in range(1, steps + 5)] == [0, *itertools.accumulate(sizes)]
    assert sizes[0] == first and set(sizes[steps:]) == {full} and set(sizes) <= set(batch_sizes(train))

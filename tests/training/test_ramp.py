"""A batch that grows takes the samples that follow those of all steps before, in every layout and after a resume."""

import itertools

import pytest
from testing import assert_same

from tpformer.config import TrainSection, batch_sizes, build_config
from tpformer.training.metrics import read_metrics
from tpformer.training.schedules import batch_size, samples_before
from tpformer.training.trainer import Trainer

RAMP = {"steps": 3, "global_batch_size": 12, "batch_size_start": 4, "batch_size_ramp_steps": 2, "microbatch_size": 1}
SIZES = [4, 8, 12]


@pytest.mark.parametrize("start, full, steps", [(4, 12, 4), (2, 14, 9), (3, 30, 4), (8, 8, 5), (None, 8, 5), (1, 7, 1)])
def test_sizes_grow_at_equal_distances_and_no_sample_is_left_out(start, full, steps):
    train = TrainSection(global_batch_size=full, batch_size_start=start, batch_size_ramp_steps=steps)
    sizes = [batch_size(step, train) for step in range(1, steps + 4)]
    first, growths = start or full, full // (start or full) - 1
    assert sizes == [first * (1 + min(growths, k * growths // steps)) for k in range(steps + 3)]
    assert [samples_before(step, train) for step in range(1, steps + 5)] == [0, *itertools.accumulate(sizes)]
    assert sizes[0] == first and set(sizes[steps:]) == {full} and set(sizes) <= set(batch_sizes(train))


def run(values: dict, parallel: dict, stop: int = 0) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """Rows, and the samples that this rank took, of a run; with `stop`, of one that ends there and is resumed."""
    taken: list[tuple[int, int]] = []
    train = {**RAMP, "dtype": "float64", "validation_samples": 4}
    model = {**values["model"], "n_layers": 4, "dropout": 0.1}
    config = {**values, "train": train, "model": model, "parallel": parallel, "optimizer": {"schedule": "constant"}}
    for steps in (stop, 3) if stop else (3,):
        trainer = Trainer(build_config(config, {"train": {"steps": steps}, "run": {"resume": steps == 3 and stop > 0}}))
        take = trainer.batches.take

        def taking(step, take=take):
            batch = take(step)
            taken.append((batch.first, len(batch.rows)))
            return batch

        trainer.batches.take = taking
        trainer.run()
    rows = read_metrics(trainer.directory / "metrics.jsonl")
    keys = ("step", "loss", "grad_norm", "tokens")
    return [[row[key] for key in keys] if "loss" in row else [row["val_loss"]] for row in rows], taken


@pytest.fixture(scope="module")
def alone(ranks, tiny_values_in, tmp_path_factory):
    values = tiny_values_in(tmp_path_factory.mktemp("ramp"))
    return ranks(1).run(run, values, {})[0]


def test_the_samples_of_a_step_follow_those_of_the_steps_before(alone):
    rows, taken = alone
    assert taken == list(zip([0, 4, 12], SIZES, strict=True))
    assert [row[3] for row in rows if len(row) > 1] == [16 * total for total in itertools.accumulate(SIZES)]


TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2}
ZBV = {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2}
ZERO3 = {"data_parallel_shard": 2, "zero_stage": 3}


@pytest.mark.parametrize(
    "parallel, stop",
    [
        (ZBV, 0),
        ({}, 2),
        pytest.param(TP_PP, 0, marks=pytest.mark.proof),
        pytest.param(ZERO3, 0, marks=pytest.mark.proof),
    ],
)
def test_every_layout_and_a_resumed_run_have_the_same_losses(ranks, tiny_values, alone, parallel, stop):
    size = build_config({"parallel": parallel}).parallel.world_size
    results = ranks(size).run(run, tiny_values, parallel, stop)
    mine, expected = ({row[0]: row for row in rows if len(row) > 1} for rows in (results[0][0], alone[0]))
    assert_same(mine, expected)

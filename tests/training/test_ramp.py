"""A batch that grows takes the samples that follow those of all steps before, in every layout and after a resume."""

import itertools

import pytest

from tpformer.config import TrainSection, batch_sizes, build_config, check_config
from tpformer.training.metrics import read_metrics
from tpformer.training.schedules import batch_size, samples_before
from tpformer.training.trainer import Trainer

RAMP = {"steps": 6, "global_batch_size": 12, "batch_size_start": 4, "batch_size_ramp_steps": 4, "microbatch_size": 1}
SIZES = [4, 4, 8, 8, 12, 12]


@pytest.mark.parametrize("start, full, steps", [(4, 12, 4), (2, 14, 9), (3, 30, 4), (8, 8, 5), (None, 8, 5), (1, 7, 1)])
def test_sizes_grow_at_equal_distances_and_no_sample_is_left_out(start, full, steps):
    train = TrainSection(global_batch_size=full, batch_size_start=start, batch_size_ramp_steps=steps)
    sizes = [batch_size(step, train) for step in range(1, steps + 4)]
    first, growths = start or full, full // (start or full) - 1
    assert sizes == [first * (1 + min(growths, k * growths // steps)) for k in range(steps + 3)]
    assert [samples_before(step, train) for step in range(1, steps + 5)] == [0, *itertools.accumulate(sizes)]
    assert sizes[0] == first and set(sizes[steps:]) == {full} and set(sizes) <= set(batch_sizes(train))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"batch_size_start": 5}, "train.global_batch_size=12 is not a multiple of train.batch_size_start=5"),
        ({"batch_size_start": 24}, "train.global_batch_size=12 is not a multiple of train.batch_size_start=24"),
        (
            {"microbatch_size": 4, "batch_size_start": 6},
            "train.batch_size_start=6 is not a multiple of 1 data-parallel",
        ),
    ],
)
def test_sizes_that_the_layout_cannot_share_are_refused(tiny_values, changes, words):
    with pytest.raises(ValueError, match=words):
        check_config(build_config(tiny_values, {"train": {**RAMP, **changes}}))


def test_a_pipeline_needs_its_microbatches_in_the_first_step_too(tiny_values):
    with pytest.raises(ValueError, match="needs at least 2 microbatches for 2 stages on 2 ranks, and there are 1"):
        check_config(
            build_config(tiny_values, {"train": {**RAMP, "batch_size_start": 1}, "parallel": {"pipeline_parallel": 2}})
        )


def run(values: dict, parallel: dict, stop: int = 0) -> tuple[list[list[float]], list[tuple[int, int]]]:
    """Rows, and the samples that this rank took, of a run; with `stop`, of one resumed after its checkpoint there."""
    taken: list[tuple[int, int]] = []
    changes = {"train": {**RAMP, "dtype": "float64"}, "model": {**values["model"], "n_layers": 4, "dropout": 0.1}}
    config = {**values, **changes, "parallel": parallel, "checkpoint": {"interval": 3}}
    for steps in (stop, 6) if stop else (6,):
        trainer = Trainer(build_config(config, {"train": {"steps": steps}, "run": {"resume": steps == 6 and stop > 0}}))
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
    return ranks(1).run(run, {**values, "optimizer": {"schedule": "constant"}}, {})[0]


def test_the_samples_of_a_step_follow_those_of_the_steps_before(alone):
    rows, taken = alone
    assert taken == list(zip([0, 4, 8, 16, 24, 36], SIZES, strict=True))
    assert [row[3] for row in rows if len(row) > 1] == [16 * total for total in itertools.accumulate(SIZES)]


TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2}
ZBV = {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2}
ZERO3 = {"data_parallel_shard": 2, "zero_stage": 3}


@pytest.mark.parametrize(
    "parallel, stop",
    [
        (ZBV, 0),
        ({"tensor_parallel": 2}, 3),
        pytest.param(TP_PP, 0, marks=pytest.mark.proof),
        pytest.param(ZERO3, 0, marks=pytest.mark.proof),
    ],
)
def test_every_layout_and_a_resumed_run_have_the_same_losses(ranks, tiny_values, alone, parallel, stop):
    size = build_config({"parallel": parallel}).parallel.world_size
    values = {**tiny_values, "optimizer": {"schedule": "constant"}}
    results = ranks(size).run(run, values, parallel, stop)
    mine, expected = ({row[0]: row for row in rows if len(row) > 1} for rows in (results[0][0], alone[0]))
    assert list(mine) == list(expected) and all(mine[k] == pytest.approx(expected[k], rel=1e-11) for k in mine)

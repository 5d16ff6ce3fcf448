"""The model of time beside published runs: every gate is met, and missed as soon as a term of the model is left out."""

import dataclasses
from functools import cache

import pytest
from turns import in_turns

from tpformer.planner import published
from tpformer.planner.devices import load_device
from tpformer.planner.published import TABLES, TEETH, predict, read_table
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.step_time import StepModel, mfu

evaluate = cache(published.outcome_of)  # which takes a second or two
EVERY = [(name, term) for name, terms in TEETH.items() for term in terms]
# the table that takes a tenth of a second for a term; the others take two
SUITE = [each for each in EVERY if each[0] == "torchtitan"]


@pytest.mark.parametrize("name", TABLES)
def test_gates_are_met(name):
    found = evaluate(name)
    assert not found.failures, found.failures
    assert found.mean < found.constant, "better than the best constant, which has seen every row"
    assert len(found.errors) == len(found.table.rows) - (found.table.fit is not None)
    assert 0.7 < found.rate < 1.1


def test_plans_use_the_factors_that_are_fitted():
    """Of each GPU whose tables there are, and of another one of its kind."""
    for names, tables in {
        ("a100-40", "a100-80"): ("megatron_a100", "megatron_recompute"),
        ("h100", "h200", "b200"): ("megatron_h100", "torchtitan"),
    }.items():
        found = {load_device(name).fitted for name in names}
        assert found == {tuple(sorted(round(evaluate(table).rate, 2) for table in tables))}


@pytest.mark.parametrize("name, term", [*SUITE, *in_turns(each for each in EVERY if each not in SUITE)])
def test_gates_are_missed_without_a_term(name, term):
    assert evaluate(name, frozenset({term})).failures


def test_the_model_cannot_see_what_was_published():
    table = read_table("torchtitan")
    blind = table._replace(published=dict.fromkeys(table.published, 0.0))
    assert [predict(table, row) for row in table.rows] == [predict(blind, row) for row in table.rows]
    renamed = table.rows[0]._replace(name="")
    assert predict(table, renamed) == predict(table, table.rows[0])


def test_formulas_of_parameters_and_flops_are_the_papers():
    """Korthikanti et al.'s MFU from their times; the parameters in billions that name Megatron's rows."""
    table, a100 = read_table("megatron_recompute"), load_device("a100-80")
    shares = [100 * mfu(row.config, table.published[row.name], a100) for row in table.rows if "selective" in row.name]
    assert [round(share, 2) for share in shares] == [41.65, 51.39, 56.05, 56.27]
    for row in read_table("megatron_a100").rows:
        assert round(row.config.model.architecture.n_parameters / 1e9, 1) == float(row.name[:-1])
    assert round(read_table("megatron_a100").rows[-1].config.parallel.world_size) == 3072


def test_unpublished_microbatches_are_the_fastest_that_fit():
    """The rule that megatron_h100.toml states; another engine does not keep what it sent, as torch's does."""
    table = read_table("megatron_h100")
    device = table.device.scaled(published.fitted_rate(table))
    for row in table.rows:
        software, seconds = dataclasses.replace(row.software, keeps_sent=False), {}
        for size in (1, 2, 4):
            config = published.changed(row.config, {"train": {"microbatch_size": size}})
            ends = {0, config.parallel.pipeline_parallel - 1}
            if max(predicted_memory(config, rank, software).total for rank in ends) <= 72e9:
                seconds[size] = StepModel(config, device, row.software).step().seconds
        assert min(seconds, key=seconds.__getitem__) == row.config.microbatch_size, row.name


def test_statistics():
    pairs = ([1, 2, 3, 4], [10, 20, 30, 40]), ([1, 2, 3], [3, 2, 1]), ([1, 1, 2], [1, 1, 2])
    assert [published.spearman(*each) for each in pairs] == [1, -1, 1]
    assert published.best_constant([100, 100, 200]) == pytest.approx(50 / 3)

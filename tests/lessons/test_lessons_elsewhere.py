"""What those who know no lesson say of one: resumed runs, the planner, verification."""

import pytest

from tpformer.config import RunConfig, build_config, to_toml
from tpformer.lessons.algorithms import all_reduce_seconds
from tpformer.parallel import exchange_named
from tpformer.planner.devices import load_device
from tpformer.planner.rank_memory import predicted_memory
from tpformer.planner.step_time import StepModel
from tpformer.training.run_directory import Start, check_run_directory
from tpformer.training.verify import verify_config

MODEL = {"vocab_size": 128, "n_layers": 2, "hidden_size": 32, "n_heads": 4, "seq_length": 16}
H100 = load_device("h100")


def config_of(exchange: str, **sections: dict) -> RunConfig:
    parallel = {"data_parallel_replicate": 2, "data_parallel_shard": 2, "exchange": exchange}
    train = {"dtype": "float32", "device": "cpu"}
    return build_config({"model": MODEL, "data": {"train": ["some"]}, "parallel": parallel, "train": train}, sections)


@pytest.mark.parametrize(("before", "now", "parallel", "refused"), [
    ("library", "ring", {}, ""),
    ("ring", "tree", {}, ""),
    ("library", "int8", {}, "parallel.exchange: 'library' -> 'int8'.*--run.changes parallel.exchange"),
    ("topk share=0.1", "topk share=0.2", {}, "parallel.exchange: .*--run.changes parallel.exchange"),
    ("stale_server", "sync_server", {}, "parallel.exchange: .*--run.changes parallel.exchange"),
    ("powersgd", "powersgd", {"data_parallel_shard": 1}, "parallel.data_parallel_shard: 2 -> 1"),
])  # fmt: skip
def test_a_resumed_run_may_change_what_leaves_its_losses_alone(tmp_path, before, now, parallel, refused):
    (tmp_path / "config.toml").write_text(to_toml(config_of(before)))
    start = Start(config_of(now, run={"dir": str(tmp_path), "resume": True}, parallel=parallel), "float32", {})
    if not refused:
        said = f"changed since the run was stopped: parallel.exchange: {before!r} -> {now!r}"
        assert said in check_run_directory(start)
        return
    with pytest.raises(ValueError, match=f"its losses would change .*{refused}"):
        check_run_directory(start)


def test_the_planner_prices_an_all_reduce_and_counts_what_is_kept():
    for name in ("driver", "tree", "hierarchical"):
        found = StepModel(config_of(name), H100)
        assert found.collective(1e6, replicas=True) == all_reduce_seconds(name, 1e6, 2, 1, found.fast, found.slow)
        assert found.collective(1e6) == all_reduce_seconds("ring", 1e6, 2, 1, found.fast, found.slow)
        everywhere = StepModel(config_of("library"), H100, exchange=exchange_named(name))
        assert everywhere.collective(1e6) == found.collective(1e6, replicas=True) == everywhere.collective(1e6, True)
    totals = {text: predicted_memory(config_of(text), 0).total for text in ("library", "int8", "int8 feedback=false")}
    kept = 2 * 4 * config_of("int8").model.n_parameters / 2
    assert totals["int8"] - totals["library"] == kept and totals["int8 feedback=false"] == totals["library"]


@pytest.mark.parametrize("text", ["int8", "stale_server", "sync_server"])
def test_what_changes_a_run_is_neither_planned_nor_verified(text):
    with pytest.raises(ValueError, match=f"parallel.exchange='{text}' has no model of its time: plan without it"):
        StepModel(config_of(text), H100)
    with pytest.raises(ValueError, match=f"parallel.exchange='{text}' changes the run on purpose"):
        verify_config(config_of(text))

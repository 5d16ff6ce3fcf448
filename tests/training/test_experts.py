"""Settings, loads and biases of a run with experts."""

import pytest
import torch
from tiny_runs import write_run

from tpformer.config import RunConfig, build_config, check_config
from tpformer.layers import Policy, Router
from tpformer.training.experts import load_numbers, named_loads
from tpformer.training.metrics import read_metrics
from tpformer.training.results import Tally
from tpformer.training.summary import notices

MODEL = {
    "vocab_size": 257, "seq_length": 16, "n_layers": 3, "hidden_size": 16, "n_heads": 4, "position": "rope",
    "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_experts": 4, "expert_ffn_size": 12,
    "first_dense_layers": 1, "router_bias": True,
}  # fmt: skip
WITHOUT = {"n_experts": None, "expert_ffn_size": None, "first_dense_layers": 0, "router_bias": False}
IN_VAIN = "without experts would do nothing: set n_experts"


def config_of(model: dict, **sections: dict) -> RunConfig:
    return build_config({"model": MODEL | model, "data": {"train": ["none"]}, "train": {"device": "cpu"}}, sections)


def test_settings_that_contradict_each_other_are_refused():
    for model, sections, words in (
        ({"experts_per_token": 5}, {}, "experts_per_token=5 of n_experts=4"),
        ({"activation": "gelu"}, {}, "gated.*swiglu, geglu"),
        ({"bias": True}, {}, "experts have no biases.*qkv_bias=True"),
        ({"first_dense_layers": 3}, {}, "first_dense_layers=3 of n_layers=3"),
        ({"router_groups": 3}, {}, "router_groups=3 equal groups"),
        ({"router_groups": 2, "router_top_groups": 3}, {}, "router_top_groups=3 of router_groups=2"),
        ({"router_groups": 4, "experts_per_token": 2}, {}, "cannot be chosen from router_top_groups=1 groups of 1"),
        ({"router_score": "tanh"}, {}, "router_score='tanh'.*softmax, sigmoid"),
        ({"n_experts": None}, {}, IN_VAIN),
        (WITHOUT | {"experts_per_token": 4}, {}, f"^experts_per_token=4 {IN_VAIN}$"),
        (WITHOUT | {"router_normalised": False}, {}, f"^router_normalised=False {IN_VAIN}$"),
        (WITHOUT | {"router_top_groups": 2}, {}, f"^router_top_groups=2 {IN_VAIN}$"),
        # what depends on the layout and on training
        ({"n_heads": 3, "hidden_size": 24}, {"parallel": {"tensor_parallel": 3}},
         r"n_experts=4 cannot be divided among tensor_parallel=3.*\[1, 2, 4\]"),
        (WITHOUT, {"train": {"balance_loss": 0.1}}, "train.balance_loss=0.1 without experts"),
        ({"router_bias": False}, {"train": {"router_bias_rate": 0.01}}, "=0.01 without biases would do nothing"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"(?s){words}"):
            check_config(config_of(model, **sections))


def test_settings_that_teach_a_router_nothing_are_named():
    (sentence,) = notices(config_of({"experts_per_token": 1}))
    assert "the router gets no gradient from the loss of tokens; set router_normalised = false" in sentence
    for right in ({}, {"experts_per_token": 1, "router_normalised": False}):
        assert notices(config_of(right)) == []


def test_numbers_of_loads():
    """Two layers of four experts: one balanced, one with half of its tokens at one expert."""
    config = config_of({"experts_per_token": 2})
    loads = [0] * 4 + [32] * 4 + [64, 32, 32, 0]
    expected = {"expert_load": 64 * 4 / (4 * 16 * 2), "expert_entropy": (1 + 0.75) / 2, "expert_dropped": 0}
    assert load_numbers(config, loads, 4) == pytest.approx(expected)
    assert load_numbers(config, [0] * 4 + [31] + [32] * 3 + [64, 32, 32, 0], 4)["expert_dropped"] == 1
    numbers = {"loss": 1.0, "skipped": 0.0, "norm": 1.0, "loads": loads}
    apart = config_of({"experts_per_token": 2}, train={"global_batch_size": 8})
    found = [Tally(apart, replicas).add(1, numbers)["expert_dropped"] for replicas in (1, 2)]
    assert found == [256, 0], "two replicas have half of the batch each"
    alone = config_of({"n_experts": 1, "experts_per_token": 1})
    assert load_numbers(alone, [0, 64, 64], 4) == {"expert_load": 1, "expert_entropy": 1, "expert_dropped": 0}
    named = named_loads(config, loads)
    assert len(named) == 8 and named["load.layers.1.3"] == 32 and named["load.layers.2.0"] == 64


def test_a_bias_moves_towards_equal_loads_unless_the_step_is_skipped():
    router = Router(8, 4, Policy(2), bias=True)
    load = torch.tensor([10, 20, 30, 20])
    router.move_bias(load, 0.5, torch.tensor(1.0))
    assert not router.bias.any()
    router.move_bias(load, 0.5, torch.tensor(0.0))
    assert router.bias.tolist() == [0.5, 0.0, -0.5, 0.0]


def test_a_run_logs_loads_and_saves_biases(done, tiny_values, tmp_path):
    """The command, on two ranks: numbers of loads in metrics, each expert's in norms, biases in the checkpoint."""
    train = {"steps": 3, "balance_loss": 0.01}
    values = {**tiny_values, "model": MODEL, "parallel": {"tensor_parallel": 2}}
    toml = write_run(tmp_path, values, train=train, data={"valid": []}, log={"norm_interval": 1})
    run = tmp_path / "run"
    done("pretrain", toml)
    assert [row["expert_dropped"] for row in read_metrics(run / "metrics.jsonl")] == [0, 0, 0]
    loads = [value for name, value in read_metrics(run / "norms.jsonl")[-1].items() if name.startswith("load.layers.")]
    assert len(loads) == 8 and sum(loads) == 2 * 4 * 16 * 2
    first, second = done("generate", str(run), "--max-new-tokens", "4", "--samples", "2").split("--- ")[1:]
    assert first.partition("\n")[2] != second.partition("\n")[2], "by default texts are drawn"

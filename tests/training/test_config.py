"""A run's configuration is merged, typed and written back; each refusal gives the numbers and the remedy."""

import dataclasses
import math
import re
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpformer.cli.run import parse_run
from tpformer.config import RANGES, RunConfig, build_config, check_config, read_toml, to_toml
from tpformer.config.layout import CHOICES
from tpformer.config.refused import REFUSED
from tpformer.config.transport_table import read_transport_table
from tpformer.weights.family import read_json


def test_later_layers_win_and_the_preset_comes_first_and_the_rest_is_derived():
    file = {"model": {"preset": "gpt2-355m", "n_layers": 3}, "train": {"steps": 7}}
    config = build_config(file, {"train": {"steps": 9}})
    assert (config.model.hidden_size, config.model.n_layers, config.train.steps) == (1024, 3, 9)
    # a later preset changes every field that no layer sets by hand
    config = build_config(file, {"model": {"preset": "llama3-8b"}})
    assert (config.model.hidden_size, config.model.n_layers, config.model.norm) == (4096, 3, "rmsnorm")
    # unset fields are derived after merging
    config = build_config({"model": {"hidden_size": 96, "n_heads": 6}})
    assert config.model.ffn_hidden_size is None and config.model.ffn_size == 384
    assert build_config({"model": {"hidden_size": 96}}, {"model": {"activation": "swiglu"}}).model.ffn_size == 256


def test_sections_are_frozen_and_their_toml_is_read_as_it_was(tmp_path, tiny_values):
    for field in dataclasses.fields(RunConfig):
        assert field.default_factory.__dataclass_params__.frozen  # type: ignore[union-attr]
    path = tmp_path / "config.toml"
    infinite = build_config(tiny_values, {"optimizer": {"clip_norm": float("inf")}, "data": {"weights": [1.5]}})
    for config in (build_config(tiny_values), RunConfig(), infinite):
        path.write_text(to_toml(config))
        assert build_config(read_toml(path)) == config
        path.write_text(to_toml(config), encoding="utf-8-sig")  # as Windows writes it, after a byte order mark
        assert build_config(read_toml(path)) == config
    path.write_text("[model\n")
    with pytest.raises(ValueError, match="config.toml is not valid TOML"):
        read_toml(path)
    with pytest.raises(FileNotFoundError, match="nothing.toml"):
        read_toml(tmp_path / "nothing.toml")
    for read in (read_toml, read_json, read_transport_table):  # what is a file, and cannot be read
        with pytest.raises(ValueError, match="/proc/self/mem cannot be read: Input/output error"):
            read(Path("/proc/self/mem"))


BATCHES = st.fixed_dictionaries(
    {
        "train": st.fixed_dictionaries({
            "global_batch_size": st.sampled_from([4, 5, 6, 12, 24]),
            "batch_size_start": st.sampled_from([None, 1, 2, 3, 4, 5, 8]),
            "microbatch_size": st.sampled_from([None, 1, 2, 3]),
        }),
        "parallel": st.fixed_dictionaries({
            "data_parallel_replicate": st.integers(1, 3),
            "pipeline_parallel": st.integers(1, 2),
            "pipeline_schedule": st.sampled_from(["naive", "1F1B", "Interleaved1F1B"]),
        }),
        "log": st.fixed_dictionaries({"noise_interval": st.sampled_from([0, 1])}),
    }
)  # fmt: skip


def refusal(values: dict) -> str:
    """What is said of a run, without its numbers; empty if it is taken."""
    try:
        check_config(build_config({"model": {"n_layers": 4}}, values), trains=False)
    except ValueError as error:
        return re.sub(r"\d+", "", str(error))
    return ""


@given(BATCHES)
def test_a_batch_that_cannot_be_is_refused_by_keys_each_of_which_mends_it(values):
    """A key that is blamed has a value with which this is not said any more, whatever else may be."""
    said = refusal(values)
    for section, key in re.findall(r"(train|log)\.(\w+)", said):
        new = range(49) if section == "log" else (None, *range(1, 49))
        changed = ({**values, section: {**values[section], key: value}} for value in new)
        assert any(refusal(each) != said for each in changed), (said, key)


RAMP = {"global_batch_size": 12, "batch_size_start": 4, "batch_size_ramp_steps": 2, "microbatch_size": 1}


IMPOSSIBLE = [
    ({"modle": {}}, ["modle", "did you mean 'model'"]),
    ({"model": {"n_layer": 3}}, ["n_layer", "[model]", "did you mean 'n_layers'"]),
    ({"model": {"n_layers": "3"}}, ["model.n_layers", "'3'", "whole number"]),
    ({"model": {"n_layers": True}}, ["model.n_layers", "whole number"]),
    ({"model": {"preset": "gpt5"}}, ["gpt5", "gpt2-124m"]),
    ({"data": {"train": "path"}}, ["data.train", "list"]),
    ({"train": 3}, ["[train]"]),
    ({"parallel": {"tensor_parallel": 3}}, ["n_heads=4", "tensor_parallel=3", "[1, 2, 4]"]),
    ({"model": {"seq_length": 15}, "parallel": {"tensor_parallel": 4}, "train": {"microbatch_size": 1}},
     ["1 * 15 = 15", "tensor_parallel=4", "sequence_parallel = false"]),
    ({"train": {"global_batch_size": 4, "microbatch_size": 3}}, ["global_batch_size=4", "microbatch_size=3"]),
    ({"train": {"steps": 0}}, ["train.steps=0", "at least 1"]),
    ({"parallel": {"recompute_layers": "1"}}, ["recompute_layers='1'", "recompute is none", "mlp or full"]),
    ({"parallel": {"recompute": "mlp", "recompute_layers": "9"}}, ["recompute_layers='9'", "none of the", '"0:8"']),
    ({"parallel": {"recompute": "mlp", "recompute_interval": 4}}, ["interval=4", "recompute_interval to 1"]),
    ({"train": {"dtype": "float8"}}, ["float8", "bfloat16"]),
    ({"train": {"device": "tpu"}}, ["tpu", "cpu, cuda"]),
    ({"train": {"z_loss": -1e-4}}, ["train.z_loss=-0.0001", "at least 0 and finite"]),
    ({"log": {"profile_step": 7}}, ["log.profile_step=7", "after the last step", "at most 6"]),
    ({"log": {"timeline_step": 2}}, ["log.timeline_step=2", "pipeline_parallel=1", "log.profile_step"]),
    ({"data": {"train": []}}, ["data.train", "tpformer data build"]),
    ({"data": {"weights": [1.0, 2.0]}}, ["2 numbers", "1 datasets"]),
    ({"optimizer": {"schedule": "step"}}, ["schedule='step': choose one of cosine, linear, constant, wsd"]),
    ({"optimizer": {"name": "lion"}}, ["optimizer.name='lion': choose one of adamw, sgd"]),
    ({"optimizer": {"momentum": 0.9}}, ["optimizer.momentum=0.9 is of sgd", 'set optimizer.name = "sgd"']),
    ({"optimizer": {"muon_scale": "spectral"}}, ["muon_scale=spectral is of muon", 'optimizer.name = "muon"']),
    ({"optimizer": {"name": "muon", "nesterov": True}}, ["optimizer.nesterov=True is of sgd"]),
    ({"optimizer": {"name": "muon", "muon_dtype": "float16"}}, ["choose one of bfloat16, float32, float64"]),
    ({"optimizer": {"name": "muon", "newton_schulz": "cubic"}}, ["'cubic': choose one of quintic, polar_express"]),
    ({"optimizer": {"name": "sgd", "beta2": 0.9}}, ["optimizer.beta2=0.9 is of adamw"]),
    ({"optimizer": {"name": "sgd", "nesterov": True}}, ["optimizer.nesterov=True needs a momentum"]),
    ({"train": {**RAMP, "batch_size_start": 5}}, ["batch_size=12 is not a multiple of train.batch_size_start=5"]),
    ({"train": {**RAMP, "batch_size_start": 24}}, ["batch_size=12 is not a multiple of train.batch_size_start=24"]),
    ({"train": {**RAMP, "microbatch_size": 4, "batch_size_start": 6}}, ["size_start=6 is not a multiple of 1"]),
    ({"train": {**RAMP, "batch_size_start": 1}, "parallel": {"pipeline_parallel": 2}},
     ["needs at least 2 microbatches for 2 stages on 2 ranks, and there are 1"]),
    ({"train": {"microbatch_size": 4}, "log": {"noise_interval": 1}}, ["half a batch of 4", "a multiple of 8"]),
    *(({"parallel": {"pack_activations": True}, "train": train}, ["only bfloat16 has an exponent of 8 bits"])
      for train in ({"dtype": "float16"}, {"dtype": "float32"}, {"device": "cpu"})),
    ({"parallel": {"pack_layers": "0"}}, ["pack_layers='0' chooses layers, but pack_activations is false"]),
    ({"model": {"preset": []}}, ["unknown preset []; choose one of"]),  # it could be no key of a table
    ({"run": {"dir": " "}}, ["run.dir = ' ' names no directory"]),
    ({"train": {"batch_size_start": 1, "global_batch_size": 2**26}},  # it took for ever
     ["batch_size_start=1 ", "global_batch_size=67108864 ", "in 67108863 times", "at most 10000"]),
]  # fmt: skip


def test_impossible_runs_are_refused(tiny_values):
    for changes, words in IMPOSSIBLE:
        with pytest.raises(ValueError) as error:
            check_config(build_config(tiny_values, changes))
        assert all(word in str(error.value) for word in words), error.value


def test_a_table_of_measured_transports_is_read_before_anything_starts(tiny_values, tmp_path):
    path = tmp_path / "table.json"
    config = build_config(tiny_values, {"parallel": {"transport_table": str(path)}})
    with pytest.raises(FileNotFoundError, match="table.json"):
        check_config(config)
    path.write_text("{}")
    with pytest.raises(ValueError, match="table.json: expected a list of rows"):
        check_config(config)
    path.write_text("[]")
    check_config(config)


REFUSALS = [
    ("model", "expert_capacity", 1.25, None, "expert_capacity=1.25 is not supported: .*no token is dropped"),
    ("model", "attention_dropout", 0.1, 0.0, "attention_dropout=0.1 is not supported: .*masks; use dropout"),
    ("train", "balance_loss_over", "batch", "sequence", "balance_loss_over='batch' is not supported: .*57 % larger"),
]


@pytest.mark.parametrize("section, key, value, only, words", REFUSALS)
def test_a_key_that_is_left_out_is_refused_wherever_it_stands(section, key, value, only, words, tiny_values, tmp_path):
    whole = build_config(tiny_values)
    with pytest.raises(ValueError, match=words):
        build_config(tiny_values, {section: {key: value}})
    assert build_config(tiny_values, {section: {key: only}}) == whole, "a configuration of an older run"
    option, path = f"--{section}.{key.replace('_', '-')}", tmp_path / "run.toml"
    path.write_text(to_toml(whole))
    for options in ([option, str(value)], [f"{option}={value}"], [f"--{section}.{key}", str(value)]):
        with pytest.raises(ValueError, match=words):
            parse_run([str(path), *options])
    found = parse_run([str(path), option, str(only), "--train.seed", "5"])
    assert found == build_config(tiny_values, {"train": {"seed": 5}})
    assert {f"{section}.{key}" for section, key, *_ in REFUSALS} == REFUSED.keys()


# the keys whose values are an int, a float, or a tuple of either
NUMBERS = {
    f"{section.name}.{key}": kind[0]
    for section in dataclasses.fields(RunConfig)
    for key, hint in typing.get_type_hints(section.default_factory).items()
    if (kind := re.search(r"\b(int|float)\b", str(hint)))
}


def outside(key: str) -> list:
    """Values at and beyond the ends of a key's range that it does not have."""
    low, high = (float(end) for end in RANGES[key][1:-1].split(","))
    bad = [low - 1, low] if RANGES[key][0] == "(" else [low - 1]
    if math.isfinite(high):
        bad += [high, high + 1] if RANGES[key][-1] == ")" else [high + 1]
    return [*bad, math.nan, math.inf, -math.inf] if NUMBERS[key] == "float" else [int(each) for each in bad] + [2**63]


def test_every_number_has_a_range_and_a_value_outside_of_it_or_that_is_no_choice_is_refused(tiny_values):
    assert set(NUMBERS) == set(RANGES)
    for key, value in ((each, value) for each in NUMBERS for value in outside(each)):
        section, name = key.split(".")
        text = ""
        try:
            check_config(build_config(tiny_values, {section: {name: [value] if key == "data.weights" else value}}))
        except ValueError as error:
            text = str(error)
        assert f"{name}={value} " in text and "must be" in text, (key, value, text)
    for name, choices in CHOICES.items():
        words = f"parallel.{name}='magic': choose one of {', '.join(choices)}"
        with pytest.raises(ValueError, match=f"^{words}$"):
            check_config(build_config(tiny_values, {"parallel": {name: "magic"}}))


def test_what_is_said_to_work_and_the_ends_that_belong_to_a_range_are_taken(tiny_values):
    changes = {"optimizer": {"lr": 0, "min_lr_ratio": 1, "clip_norm": 0, "warmup_steps": 0}, "run": {"timeout": 1e9}}
    check_config(build_config(tiny_values, changes, {"checkpoint": {"interval": 0}, "log": {"timeline_step": 0}}))
    check_config(build_config(tiny_values, {"log": {"noise_interval": 1}}))
    changes = {"model": {"seq_length": 15}, "parallel": {"tensor_parallel": 4, "sequence_parallel": False}}
    check_config(build_config(tiny_values, changes, {"train": {"microbatch_size": 1}}))

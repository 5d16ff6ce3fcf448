"""Settings without effect are named, and none is that has one."""

import pytest

from tpformer.config import build_config
from tpformer.config.unused import unused_settings

IDLE = {
    "optimizer.decay_fraction": 0.5, "optimizer.min_lr_ratio": 0.0, "train.batch_size_ramp_steps": 5,
    "model.rope_base": 5e5, "model.rope_interleaved": True, "model.rope_low_frequency": 2.0,
    "model.rope_high_frequency": 8.0, "model.rope_original_length": 64, "parallel.pipeline_schedule": "GPipe",
    "parallel.pipeline_stages_per_rank": 1, "parallel.pipeline_split": "time",
}  # fmt: skip
USED = {
    "optimizer.decay_fraction": {"optimizer": {"schedule": "wsd"}},
    "optimizer.min_lr_ratio": {"optimizer": {"schedule": "linear"}},
    "train": {"train": {"batch_size_start": 4}},
    "model": {"model": {"position": "rope", "rope_scaling_factor": 8.0}},
    "parallel": {"parallel": {"pipeline_parallel": 2}},
}


@pytest.mark.parametrize("key", IDLE)
def test_a_setting_without_effect_is_named(key: str) -> None:
    section, name = key.split(".")
    config = build_config({"optimizer": {"schedule": "constant"}}, {section: {name: IDLE[key]}})
    (said,) = unused_settings(config)
    assert said.startswith(f"{key}={IDLE[key]!r} does nothing without ")
    used = build_config({section: {name: IDLE[key]}}, USED.get(key) or USED[section])
    assert unused_settings(used) == []


def test_defaults_say_nothing() -> None:
    assert unused_settings(build_config({})) == []

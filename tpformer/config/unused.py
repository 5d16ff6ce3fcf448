"""Settings that are given and do nothing, because another one is as it is, in sentences for a run's log.

Belongs here: settings that stay in a file while others are tried, so that they are named and not refused. Those that
contradict each other are refused in run_checks.py.
"""

from tpformer.words import shown

from .run import RunConfig


def unused_settings(config: RunConfig) -> list[str]:
    """A sentence for each setting that is not its default, and without effect."""
    without = {
        ("optimizer", 'optimizer.schedule = "wsd"', config.optimizer.schedule != "wsd"): "decay_fraction",
        ("optimizer", "a schedule that falls", config.optimizer.schedule == "constant"): "min_lr_ratio",
        ("train", "train.batch_size_start", config.train.batch_size_start is None): "batch_size_ramp_steps",
        ("model", 'model.position = "rope"', config.model.position != "rope"): "rope_base rope_interleaved",
        ("model", "model.rope_scaling_factor", config.model.rope_scaling_factor == 1): (
            "rope_low_frequency rope_high_frequency rope_original_length"
        ),
        ("parallel", "parallel.pipeline_parallel", config.parallel.pipeline_parallel == 1): (
            "pipeline_schedule pipeline_stages_per_rank pipeline_split"
        ),
    }
    found = []
    for (section, needed, idle), names in without.items():
        values = getattr(config, section)
        for name in names.split() if idle else ():
            if (value := getattr(values, name)) != getattr(type(values), name):
                found.append(f"{section}.{name}={shown(value)} does nothing without {needed}")
    return found

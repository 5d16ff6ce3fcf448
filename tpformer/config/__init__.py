"""The settings of a run, an architecture and a layout, and the checks of them. Re-exports only.

Nothing in this package imports torch: `tpformer --help` answers at once, and so does a mistake in a configuration.
"""

from .architecture import (
    MLP_ACTIVATIONS,
    NORM_NAMES,
    GPTConfig,
    check_dropout,
    check_heads,
    check_positive,
    default_ffn_size,
)
from .layout import RECOMPUTE, SCHEDULES, TRANSPORTS, Layout, check_interval, selected_layers
from .presets import PRESETS, preset, preset_config
from .run import (
    CheckpointSection,
    DataSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
    build_config,
    check_config,
    read_toml,
    to_toml,
)

__all__ = [
    "CheckpointSection",
    "DataSection",
    "GPTConfig",
    "LogSection",
    "Layout",
    "MLP_ACTIVATIONS",
    "ModelSection",
    "NORM_NAMES",
    "OptimizerSection",
    "PRESETS",
    "RECOMPUTE",
    "RunConfig",
    "RunSection",
    "SCHEDULES",
    "TRANSPORTS",
    "TrainSection",
    "build_config",
    "check_config",
    "check_dropout",
    "check_heads",
    "check_interval",
    "check_positive",
    "default_ffn_size",
    "preset",
    "preset_config",
    "read_toml",
    "selected_layers",
    "to_toml",
]

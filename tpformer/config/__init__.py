"""The settings of a run, an architecture and a layout, and the checks of them. Re-exports only.

Nothing in this package imports torch: `tpformer --help` answers at once, and so does a mistake in a configuration.
"""

from .architecture import (
    MLP_ACTIVATIONS,
    NORM_NAMES,
    GPTConfig,
    check_heads,
    check_rope_scaling,
    default_ffn_size,
)
from .checks import check_choice, check_context_length, check_known, check_packing, check_positive
from .experts import check_expert_ranks, check_router
from .fp8 import FP8, PRECISIONS, check_fp8_run, check_fp8_sizes, check_precision
from .keep import PLAIN, RECOMPUTE, LayerKeep, budget_bytes, keep_text, kept_layers, regions, selected_layers
from .layout import KEEP_KEYS, SCHEDULES, TRANSPORTS, Layout
from .presets import PRESETS, preset, preset_config
from .ranges import RANGES, check_range
from .run import (
    CheckpointSection,
    DataSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
    batch_sizes,
    build_config,
    read_toml,
    to_toml,
)
from .run_checks import check_config

__all__ = [
    "CheckpointSection",
    "DataSection",
    "FP8",
    "GPTConfig",
    "LogSection",
    "KEEP_KEYS",
    "LayerKeep",
    "Layout",
    "MLP_ACTIVATIONS",
    "ModelSection",
    "NORM_NAMES",
    "OptimizerSection",
    "PLAIN",
    "PRECISIONS",
    "PRESETS",
    "RANGES",
    "RECOMPUTE",
    "RunConfig",
    "RunSection",
    "SCHEDULES",
    "TRANSPORTS",
    "TrainSection",
    "batch_sizes",
    "budget_bytes",
    "build_config",
    "check_choice",
    "check_context_length",
    "check_packing",
    "check_config",
    "check_expert_ranks",
    "check_heads",
    "check_fp8_run",
    "check_fp8_sizes",
    "check_known",
    "check_positive",
    "check_precision",
    "check_range",
    "check_rope_scaling",
    "check_router",
    "default_ffn_size",
    "keep_text",
    "kept_layers",
    "preset",
    "preset_config",
    "read_toml",
    "regions",
    "selected_layers",
    "to_toml",
]

"""GPT, its configuration and named presets. Re-exports only."""

from .config import GPTConfig
from .gpt import GPT
from .presets import PRESETS, preset, preset_config

__all__ = ["GPT", "GPTConfig", "PRESETS", "preset", "preset_config"]

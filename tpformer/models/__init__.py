"""GPT, its configuration and named presets. Re-exports only."""

from tpformer.config import PRESETS, GPTConfig, preset, preset_config

from .cache import KVCache
from .gpt import GPT

__all__ = ["GPT", "GPTConfig", "KVCache", "PRESETS", "preset", "preset_config"]

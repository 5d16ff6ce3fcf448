"""The families that are known, and which one a config.json or an architecture belongs to."""

from collections.abc import Mapping
from typing import Any

from tpformer.config import GPTConfig
from tpformer.words import shown

from .family import Family
from .gpt2 import GPT2
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE

# the plainest first: an export takes the first that can say all of an architecture
FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, GPT2)}


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a config.json. ValueError, with the known ones, for another."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json has model_type = {shown(name)}: known here are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def family_for(config: GPTConfig) -> Family:
    """The plainest family that can say all of an architecture. ValueError, with what the nearest cannot, if none."""
    fitting = {name: each for name, each in FAMILIES.items() if each.has_experts == (config.n_experts is not None)}
    lost = {name: family.cannot_say(config) for name, family in fitting.items()}
    name = min(lost, key=lambda name: len(lost[name]))
    if lost[name]:
        raise ValueError(
            f"no family can say all of this architecture; the nearest is {name}, which cannot say "
            f"{', '.join(lost[name])}: export with --format tpformer"
        )
    return FAMILIES[name]

"""RoPE in a config.json: its base and its scaling, in the words of transformers 5 and in those of version 4.

Version 5 has one object, rope_parameters; version 4 had rope_theta and rope_scaling. Both are read. Both are written,
side by side, because transformers 5, transformers 4 and vLLM each read the one they know.
"""

from collections.abc import Mapping
from typing import Any

from tpformer.config import GPTConfig
from tpformer.config.ranges import NO_FLOAT
from tpformer.words import listed, shown

ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_interleaved")
DEFAULT_BASE = 10000.0
# Llama 3.1's scaling: field of theirs -> of ours
SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_frequency",
    "high_freq_factor": "rope_high_frequency",
    "original_max_position_embeddings": "rope_original_length",
}
_INNER = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *SCALING}


def read_rope(values: Mapping[str, Any], length: int, default: float = DEFAULT_BASE) -> dict[str, Any]:
    """RoPE's fields of GPTConfig from a config.json. length: tokens of its samples. default: the base if it has none.

    ValueError, with the field's name, for another kind of scaling, for a part of a head, and for two that differ.
    """
    given = {name: values[name] for name in ("rope_parameters", "rope_scaling") if values.get(name)}
    base = values.get("rope_theta")
    found = [_read(name, _object(name, value), base, length, default) for name, value in given.items()]
    for key, wanted in (("partial_rotary_factor", 1), ("rope_interleaved", False)):
        if values.get(key, wanted) not in (wanted, None):
            raise ValueError(
                f"config.json has {key} = {shown(values[key])}: RoPE here turns whole heads, half against half"
            )
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError("config.json has rope_parameters and rope_scaling, which differ: keep one of them")
    return found[0] if found else {"rope_base": _number("rope_theta", default if base is None else base)}


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
        raise ValueError(f"config.json has {name} = {shown(value)}: RoPE has to be the same in all layers")
    if unknown := sorted(value.keys() - _INNER):
        raise ValueError(f"config.json has {name}.{listed(unknown, 1)}, which nobody here has checked")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= NO_FLOAT:
        raise ValueError(f"config.json has {name} = {shown(value)}: expected a number")
    return float(value)


def _read(name: str, value: Mapping[str, Any], base: Any, length: int, default: float) -> dict[str, Any]:
    kind = value.get("rope_type", value.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json has {name}.rope_type = {shown(kind)}: it can only be 'default' or 'llama3'")
    if (part := value.get("partial_rotary_factor", 1)) != 1:
        raise ValueError(f"config.json has {name}.partial_rotary_factor = {shown(part)}: RoPE here turns whole heads")
    inner = value.get("rope_theta", base)
    if base is not None and inner != base:
        raise ValueError(
            f"config.json has rope_theta = {shown(base)} and {name}.rope_theta = {shown(inner)}: keep one of them"
        )
    ours = {"rope_base": _number("rope_theta", default if inner is None else inner)}
    if kind == "llama3":
        if missing := [key for key in SCALING if key not in value and key != "original_max_position_embeddings"]:
            raise ValueError(f"config.json has {name} without {', '.join(missing)}, which llama3 needs")
        ours |= {field: _number(f"{name}.{key}", value.get(key, length)) for key, field in SCALING.items()}
        ours["rope_original_length"] = int(ours["rope_original_length"])
    return ours


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """The fields of config.json for an architecture's RoPE."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling_factor != 1:
        scaling = {"rope_type": "llama3"} | {theirs: getattr(config, ours) for theirs, ours in SCALING.items()}
    both = {"rope_theta": config.rope_base, "rope_parameters": {**scaling, "rope_theta": config.rope_base}}
    return both | ({"rope_scaling": scaling} if config.rope_scaling_factor != 1 else {})

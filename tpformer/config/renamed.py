"""Keys of earlier versions, and what is written in their place now: files of then go on.

Belongs here: every key that a TOML file may still have, and no name that the rest of tpformer knows.
"""

from collections.abc import Mapping
from typing import Any

from .checks import check_choice

# until 2026-11-28 [parallel] had these keys, with these values where a run did not use them
_DEFAULTS: dict[str, Any] = {
    "all_reduce": "library",
    "compression": "none",
    "parameter_server": "none",
    "error_feedback": True,
    "compression_share": 0.01,
    "compression_rank": 4,
    "staleness": 16,
    "arrivals": "",
}
_VALUES = {
    "all_reduce": "driver all_pairs ring tree butterfly halving_doubling hierarchical",
    "compression": "bfloat16 int8 topk powersgd",
    "parameter_server": "sync stale",
}
_OPTIONS = {
    "error_feedback": ("feedback", "bfloat16 int8 topk powersgd"),
    "compression_share": ("share", "topk"),
    "compression_rank": ("rank", "powersgd"),
    "staleness": ("staleness", "stale_server"),
    "arrivals": ("arrivals", "stale_server"),
}


def with_exchange(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of [parallel] with `exchange` in place of earlier ones. ValueError, with what to write, for keys that
    contradict each other, or do not say whose option they are."""
    given = {key: values[key] for key in _DEFAULTS if key in values}
    if not given:
        return values
    used = {key: value for key, value in given.items() if value != _DEFAULTS[key]}
    kept = {key: value for key, value in values.items() if key not in given}
    if not used:
        return kept
    for key in _VALUES.keys() & used.keys():
        check_choice(f"parallel.{key}", used[key], (_DEFAULTS[key], *_VALUES[key].split()))
    names = [str(used[key]) for key in ("all_reduce", "compression") if key in used]
    names += [f"{used['parameter_server']}_server"] if "parameter_server" in used else []
    name = names[0] if len(names) == 1 else " or ".join(names) or "NAME"
    options = {key: _OPTIONS[key] for key in used if key in _OPTIONS}
    words = [f"{option}={str(used[key]).lower().replace(' ', '')}" for key, (option, _) in options.items()]
    text = " ".join([name, *words])
    if len(names) != 1 or "exchange" in values or any(name not in users.split() for _, users in options.values()):
        raise ValueError(
            f"parallel.{', '.join(used)} {'is one key' if len(used) == 1 else 'are one key'} now, which names one "
            f'exchange and its own options: write exchange = "{text}" under [parallel]'
        )
    return {**kept, "exchange": text}

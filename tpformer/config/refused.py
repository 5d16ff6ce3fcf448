"""REFUSED: the keys of other systems that a configuration may name only with the value that does nothing.

Belongs here: such keys and the reason for each. No section has a field for them. The config.toml of an older run names
them, with that value.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tpformer.words import shown


class Refused(NamedTuple):
    """only: the value that does nothing. why: the end of the sentence about any other one."""

    only: Any
    why: str


REFUSED = {
    "model.expert_capacity": Refused(
        None,
        "tokens beyond a capacity are dropped, and which ones those are depends on the microbatches and ranks that "
        "share a capacity, so that each layout would train another model; leave it unset, and no token is dropped",
    ),
    "model.attention_dropout": Refused(
        0.0,
        "PyTorch's attention then leaves its fused kernel and stores seq_length x seq_length masks; use dropout "
        "(residual) instead",
    ),
    "train.balance_loss_over": Refused(
        "sequence",
        "the loss of a microbatch's loads is not that of the whole batch's (cut into 16 parts it was 57 % larger in a "
        "measurement), so each layout would train another model; set it to 'sequence', or balance by "
        "model.router_bias, which counts the global batch",
    ),
}


def check_refused(key: str, value: Any) -> None:
    """ValueError unless a key of REFUSED has its only value."""
    only, why = REFUSED[key]
    if value != only:
        raise ValueError(f"{key.partition('.')[2]}={shown(value)} is not supported: {why}")


def without_refused(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's values without the keys of REFUSED. ValueError for one with another than its only value."""
    for key, value in values.items():
        if f"{section}.{key}" in REFUSED:
            check_refused(f"{section}.{key}", value)
    return {key: value for key, value in values.items() if f"{section}.{key}" not in REFUSED}


def without_refused_options(arguments: Sequence[str]) -> list[str]:
    """The same of `--section.key VALUE` and `--section.key=VALUE` on a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for key, (only, _) in REFUSED.items():
        parser.add_argument(
            f"--{key}", f"--{key.replace('_', '-')}", dest=key, type=_value, default=only, nargs="?", const=None
        )
    found, kept = parser.parse_known_args(arguments)
    for key, value in vars(found).items():
        check_refused(key, value)
    return kept


def _value(text: str) -> Any:
    """What an option's text stands for."""
    try:
        return float(text)
    except ValueError:
        return None if text == "None" else text

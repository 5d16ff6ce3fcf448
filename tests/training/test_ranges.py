"""Every number of a configuration has its range, and a value outside of it ends before anything starts (R7)."""

import dataclasses
import math
import types
import typing

from tpformer.config import RANGES, RunConfig, build_config, check_config


def numbers() -> dict[str, type]:
    """The keys whose values are an int, a float, or a tuple of either."""
    found = {}
    for section in dataclasses.fields(RunConfig):
        for key, hint in typing.get_type_hints(section.default_factory).items():
            options = [hint, *typing.get_args(hint)] if isinstance(hint, types.UnionType) else [hint]
            options += [kind for option in options for kind in typing.get_args(option)]
            kinds = [kind for kind in (int, float) if kind in options]
            if kinds:
                found[f"{section.name}.{key}"] = kinds[0]
    return found


NUMBERS = numbers()


def test_every_number_has_a_range_and_every_range_a_number():
    assert set(NUMBERS) == set(RANGES)


def outside(key: str) -> list:
    """Values at and beyond the ends of a key's range that it does not have."""
    low, high = (float(end) for end in RANGES[key][1:-1].split(","))
    bad = [low - 1, low] if RANGES[key][0] == "(" else [low - 1]
    if math.isfinite(high):
        bad += [high, high + 1] if RANGES[key][-1] == ")" else [high + 1]
    return [*bad, math.nan, math.inf, -math.inf] if NUMBERS[key] is float else [int(each) for each in bad] + [2**63]


def test_values_outside_of_the_range_are_refused(tiny_values):
    for key, value in ((each, value) for each in NUMBERS for value in outside(each)):
        section, name = key.split(".")
        text = ""
        try:
            check_config(build_config(tiny_values, {section: {name: [value] if key == "data.weights" else value}}))
        except ValueError as error:
            text = str(error)
        assert f"{name}={value} " in text and ("must be" in text or "not supported" in text), (key, value, text)


def test_the_ends_that_belong_to_a_range_are_taken(tiny_values):
    changes = {"optimizer": {"lr": 0, "min_lr_ratio": 1, "clip_norm": 0, "warmup_steps": 0}, "run": {"timeout": 1e9}}
    check_config(build_config(tiny_values, changes, {"checkpoint": {"interval": 0}, "log": {"timeline_step": 0}}))

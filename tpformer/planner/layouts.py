"""A layout as one line of text: what the planner prints, and what `--explain` reads.

Belongs here: the text and the configuration that it stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpformer.config import RECOMPUTE, SCHEDULES, Layout, RunConfig, check_choice
from tpformer.config.layout import CHOICES
from tpformer.words import shown

OFFLOADS = ("none", "activations", "states", "both")
NUMBERS = ("tp", "cp", "pp", "dp", "ep", "zero", "microbatch", "stages")
DEFAULTS: dict[str, Any] = {
    "tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": None, "zero": 0, "microbatch": 1, "stages": 1, "schedule": "1F1B",
    "recompute": "none", "offload": "none",
}  # fmt: skip
UNSET = "none"  # ep without a number: experts are on the tensor-parallel ranks
PACKS = ("none", "all")  # layers whose activations are packed
WORDS = {
    "schedule": tuple(SCHEDULES),
    "recompute": RECOMPUTE,
    "offload": OFFLOADS,
    "pack": PACKS,
    "gather": tuple(CHOICES["zero_gather"]),
}


def layout_text(config: RunConfig) -> str:
    """A layout as one line that `--explain` reads, without context and expert parallelism, recomputing, offloading and
    packing where there is none."""
    layout = config.parallel
    parts: dict[str, Any] = {"tp": layout.tensor_parallel}
    parts |= {"cp": layout.context_parallel} if layout.context_parallel > 1 else {}
    parts |= {"pp": layout.pipeline_parallel, "dp": layout.data_parallel}
    parts |= {} if layout.expert_parallel is None else {"ep": layout.expert_parallel}
    parts |= {"zero": layout.zero} | ({"gather": layout.zero_gather} if layout.zero_gather != "16" else {})
    parts |= {"microbatch": config.microbatch_size}
    if layout.pipeline_parallel > 1:
        parts |= {"schedule": layout.pipeline_schedule, "stages": layout.stages_per_rank}
    others = {"recompute": layout.recompute, "offload": offload_of(layout), "pack": pack_of(config)}
    if layout.keep:  # of each layer; it is no part of a text that is read
        others = {"offload": "states" if layout.cpu_offload else "none", "keep": layout.keep.replace(",", "/")}
    parts |= {key: value for key, value in others.items() if value != "none"}
    return ",".join(f"{key}={value}" for key, value in parts.items())


def offload_of(layout: Layout) -> str:
    """One of OFFLOADS."""
    return OFFLOADS[layout.offloads + 2 * layout.cpu_offload]


def pack_of(config: RunConfig) -> str:
    """One of PACKS."""
    return PACKS[config.parallel.packs]


def with_layout(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration in the layout of layout_text's keys. Missing ones are as in DEFAULTS.

    What is recomputed or packed is so in all layers, each by itself, because the text says nothing else. Without `pack`
    the configuration decides, and without `gather` it does where something is gathered.
    """
    stages, values = values.get("stages"), {**DEFAULTS, **values}  # unset: the schedule's own number
    dp, zero, offload, schedule = (values[key] for key in ("dp", "zero", "offload", "schedule"))
    kind = SCHEDULES[schedule]
    gathers = zero > 0 and dp * values["cp"] > 1
    layout = dataclasses.replace(
        config.parallel,
        tensor_parallel=values["tp"],
        context_parallel=values["cp"],
        expert_parallel=values["ep"],
        pipeline_parallel=values["pp"],
        pipeline_schedule=schedule,
        pipeline_stages_per_rank=stages if kind.looped or stages != kind.stages_per_rank else None,
        data_parallel_replicate=1 if zero else dp,
        data_parallel_shard=dp if zero else 1,
        zero_stage=zero,
        zero_gather=values.get("gather", config.parallel.zero_gather if gathers else "16"),
        recompute=values["recompute"],
        recompute_layers="",
        recompute_interval=1,
        pack_activations=values.get("pack", pack_of(config)) == "all",
        pack_layers="",
        keep="",
        memory_budget="",
        cpu_offload=offload in ("states", "both"),
        offload_activations=offload in ("activations", "both"),
    )
    train = dataclasses.replace(config.train, microbatch_size=values["microbatch"])
    return dataclasses.replace(config, parallel=layout, train=train)


def parse_layout(text: str) -> dict[str, Any]:
    """The values of layout_text's keys in a text such as "tp=8,pp=4,dp=2".

    ValueError for another key or value, a key that is given twice, and a schedule or stages without a pipeline.
    """
    return {key: values[0] for key, values in _values(text, several=False).items()}


def parse_kind(text: str) -> dict[str, Any]:
    """The tuple of values that each key may have in a text such as "zero=1|3,pp=1". ValueError as for parse_layout."""
    return _values(text, several=True)


def _values(text: str, several: bool) -> dict[str, Any]:
    """Keys, and the values that stand behind their equals signs. several: whether a key may have more than one."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise ValueError(f"layout {shown(text)}: {shown(part.strip())} is not KEY=VALUE, such as tp=8")
        known = [name for name in (*NUMBERS, *WORDS) if not (several and name == "gather")]  # nobody searches it
        check_choice(f"layout {shown(text)}: key", key, known)
        if key in found:
            raise ValueError(f"layout {shown(text)}: {key} is given twice")
        found[key] = tuple(_value(text, key, each.strip()) for each in (value.split("|") if several else [value]))
    if given := [key for key in ("schedule", "stages") if key in found and 1 in found.get("pp", (1,))]:
        raise ValueError(
            f"layout {shown(text)}: {given[0]} needs a pipeline: give pp=2 or more, or leave {given[0]} out"
        )
    return found


def _value(text: str, key: str, value: str) -> int | str | None:
    if (key, value) == ("ep", UNSET):
        return None
    if key in WORDS:
        check_choice(f"layout {shown(text)}: {key}", value, WORDS[key])
        return value
    if not (value.isascii() and value.isdigit()) or (int(value) == 0 and key != "zero"):
        above = "" if key == "zero" else " above 0"
        raise ValueError(f"layout {shown(text)}: {key}={value} must be a whole number{above}")
    if key == "zero" and int(value) > 3:
        raise ValueError(f"layout {shown(text)}: zero={value} must be 0, 1, 2 or 3")
    return int(value)

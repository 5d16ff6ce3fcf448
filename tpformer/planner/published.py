"""The model of time beside published measurements: what `tpformer plan --validate` prints, and its gates.

Belongs here: reading published_tables/*.toml, the fit of one rate on one named row, errors of the rows that are held
out. What was measured stands under "published" in a row, which nothing of the model reads.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tpformer.config import RunConfig, build_config

from . import devices
from .devices import Device
from .layer_time import LayerModel
from .software import Software
from .step_time import NOTHING, StepModel, mfu

DIRECTORY = Path(__file__).parent / "published_tables"
# What a table needs: without one of these terms its gates are missed.
TEETH = {
    "megatron_a100": ("attention", "scores", "recompute", "tp", "elementwise"),
    "megatron_h100": ("attention", "logits", "bubble"),
    "torchtitan_context": ("attention", "recompute", "cp"),
    "torchtitan": ("attention", "elementwise", "recompute", "bubble", "cast"),
}
TABLES = (
    *("megatron_a100", "megatron_recompute", "megatron_layer"),
    *("megatron_h100", "torchtitan_context", "torchtitan"),
)


class PublishedRun(NamedTuple):
    """One configuration as it was published, without what was measured."""

    name: str
    config: RunConfig
    software: Software


class Table(NamedTuple):
    """A table of published rows, the one number that is fitted on it, and what its errors must be below."""

    title: str
    device: Device
    unit: str
    counts: str
    """What a value is of: "seconds", a "layer" (milliseconds), "tokens" per second of a GPU, or TFLOP/s by "model" or
    "hardware" FLOPs."""
    fit: str | None
    """The row on which one number is fitted."""
    rows: list[PublishedRun]
    published: dict[str, float]
    gates: Mapping[str, Any]
    ratios: Sequence[Mapping[str, Any]]
    scaling: Mapping[str, Any]
    rate_of: str | None = None
    """The table whose rate this one has. Then what is fitted here is Software.shared_attention; unset, the rate."""


def _raw(name: str) -> dict[str, Any]:
    return tomllib.loads((DIRECTORY / f"{name}.toml").read_text(encoding="utf-8"))


def _stacks(raw: Mapping[str, Any]) -> dict[str, Software]:
    """A file's stacks, or those of the table that it names. A stack may be `like` one above it but for its own keys."""
    given = _raw(raw["stacks_of"])["stacks"] if "stacks_of" in raw else raw["stacks"]
    whole: dict[str, dict[str, Any]] = {}
    for name, own in given.items():
        values = {
            key: tuple(value) if isinstance(value, list) else value for key, value in own.items() if key != "like"
        }
        whole[name] = {**whole.get(own.get("like", ""), {}), **values}
    return {name: Software(**fields) for name, fields in whole.items()}


@functools.cache
def read_table(name: str) -> Table:
    """One of TABLES."""
    raw = _raw(name)
    stacks = _stacks(raw)
    only = next(iter(stacks))
    rows, published = [], {}
    for row in raw["row"]:
        train = {"dtype": "bfloat16", "device": "cuda", **row["train"]}
        config = build_config({"model": row["model"], "parallel": row["parallel"], "train": train})
        rows.append(PublishedRun(row["name"], config, stacks[row.get("stack", only)]))
        published[row["name"]] = row["published"]
    device = raw["device"] if raw["device"] in devices.names() else DIRECTORY / f"{raw['device']}.toml"
    return Table(
        raw["title"],
        devices.load_device(device),
        raw["unit"],
        raw.get("counts", "seconds"),
        raw.get("fit"),
        rows,
        published,
        raw["gates"],
        raw.get("ratios", []),
        raw.get("scaling", {}),
        raw.get("rate_of"),
    )


def hardware_flops(config: RunConfig) -> float:
    """FLOPs of a step by arXiv:2104.04473, which counts a full recomputation: 96 B s l h^2 (1 + s/6h + V/16lh)."""
    model, batch = config.model, config.train.global_batch_size
    s, layers, h, vocabulary = model.seq_length, model.n_layers, model.hidden_size, model.vocab_size or 0
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


def predict(table: Table, row: PublishedRun, rate: float = 1.0, without: frozenset[str] = NOTHING) -> float:
    """The model's value of a row in the table's unit. rate: the number that is fitted; the device's FLOP/s have it as a
    factor, or those of shared attention."""
    config, device, software = row.config, table.device.scaled(rate), row.software
    if table.rate_of is not None:
        device = table.device.scaled(_rate_of(table.rate_of))
        software = dataclasses.replace(software, shared_attention=rate)
    if table.counts == "layer":
        work = LayerModel(config, device, software).work(config.parallel.recompute).without(without)
        return 1e3 * sum(terms.seconds for terms in work)
    seconds = StepModel(config, device, software, without).step().seconds
    world, train = config.parallel.world_size, config.train
    if table.counts == "tokens":
        return train.global_batch_size * config.model.seq_length / world / seconds
    if table.counts == "hardware":
        return hardware_flops(config) / world / seconds / 1e12
    if table.counts == "model":
        return mfu(config, seconds, device) * device.machine.peak_flops / 1e12
    return seconds


@functools.cache
def _rate_of(name: str) -> float:
    return fitted_rate(read_table(name))


def fitted_rate(table: Table, without: frozenset[str] = NOTHING) -> float:
    """The number with which the named row's value is the published one, by bisection; 1 for a table without a fit."""
    if table.fit is None:
        return 1.0
    row = next(row for row in table.rows if row.name == table.fit)
    published = table.published[row.name]
    return devices.fitted_rate(0.3, 3.0, lambda rate: predict(table, row, rate, without) > published)


class Outcome(NamedTuple):
    """A table's predictions and errors, with the number that was fitted. Errors are in percent of published values."""

    table: Table
    rate: float
    values: dict[str, float]
    errors: dict[str, float]
    """The errors of the rows that are held out."""
    mean: float
    largest: float
    spearman: float
    constant: float
    """The mean error of the best constant, which sees all rows."""
    failures: list[str]
    """Gates that are missed; empty if all are met."""

    def ratios(self) -> Iterator[tuple[str, float, float, float]]:
        """(name, predicted, published, how far apart they may be) of the ratios of two rows that the table names."""
        for ratio in self.table.ratios:
            first, second = ratio["rows"]
            predicted, published = (values[first] / values[second] for values in (self.values, self.table.published))
            yield ratio["name"], predicted, published, ratio["within"]


def outcome_of(name: str, without: frozenset[str] = NOTHING) -> Outcome:
    """Fit a table's one rate, predict the other rows, and compare. without: terms that the model leaves out."""
    table = read_table(name)
    rate = fitted_rate(table, without)
    values = {row.name: predict(table, row, rate, without) for row in table.rows}
    errors = {row: 100 * (value / table.published[row] - 1) for row, value in values.items() if row != table.fit}
    mean = statistics.fmean(map(abs, errors.values()))
    largest = max(map(abs, errors.values()))
    published = list(table.published.values())
    found = Outcome(
        table, rate, values, errors, mean, largest, spearman(list(values.values()), published),
        best_constant(published), [],
    )  # fmt: skip
    return found._replace(failures=list(_failures(found, without)))


def _failures(found: Outcome, without: frozenset[str]) -> Iterator[str]:
    gates, table = found.table.gates, found.table
    if found.mean > gates.get("mean", float("inf")):
        yield f"mean error {found.mean:.2f} % > {gates['mean']} %"
    if found.largest > gates["largest"]:
        yield f"largest error {found.largest:.1f} % > {gates['largest']} %"
    if found.spearman < gates.get("spearman", -1):
        yield f"Spearman {found.spearman:.2f} < {gates['spearman']}"
    if gates.get("order") and found.spearman < 1:
        yield "the rows are not in order"
    for name, predicted, published, within in found.ratios():
        if abs(predicted - published) > within:
            yield f"{name} {predicted:.3f}, published {published:.3f}, further than {within}"
    if table.scaling:
        few, many = strong_scaling(table, found.rate, without)
        low, high = table.scaling["ratio"]
        if not low <= many / few <= high:
            yield f"strong scaling {many / few:.3f} is outside of [{low}, {high}]"


def strong_scaling(table: Table, rate: float, without: frozenset[str] = NOTHING) -> list[float]:
    """MFU in percent of the scaling's row with its numbers of data-parallel ranks, at the same batch."""
    row = next(row for row in table.rows if row.name == table.scaling["row"])
    found = []
    for ranks in table.scaling["data_parallel"]:
        values = {
            "parallel": {"data_parallel_shard": ranks},
            "train": {"microbatch_size": table.scaling["microbatch_size"]},
        }
        config = changed(row.config, values)
        seconds = StepModel(config, table.device.scaled(rate), row.software, without).step().seconds
        found.append(100 * mfu(config, seconds, table.device))
    return found


def changed(config: RunConfig, values: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """The configuration with some values replaced, by section and key."""
    sections = {name: dataclasses.replace(getattr(config, name), **given) for name, given in values.items()}
    return dataclasses.replace(config, **sections)


def spearman(first: Sequence[float], second: Sequence[float], same: float = 0.0) -> float:
    """Correlation of the ranks of two lists of positive values; ties share their mean rank.

    same: values are ties if they exceed the smallest of them by this share at most.
    """
    return statistics.correlation(_ranks(first, same), _ranks(second, same))


def _ranks(values: Sequence[float], same: float) -> list[float]:
    """The mean place of each value's ties in the sorted list."""
    smallest: list[float] = []  # of the ties of each sorted value
    for value in sorted(values):
        smallest.append(smallest[-1] if smallest and value <= smallest[-1] * (1 + same) else value)
    ties = dict(zip(sorted(values), smallest, strict=True))
    return [smallest.index(ties[value]) + (smallest.count(ties[value]) - 1) / 2 for value in values]


def best_constant(values: Sequence[float]) -> float:
    """The mean error, in percent, of the constant whose mean error is smallest."""
    return min(100 * statistics.fmean(abs(constant / value - 1) for value in values) for constant in values)

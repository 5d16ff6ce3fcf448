"""Rows that compare: a provider's speed beside a baseline's, their ratio, and the ratio that is required.

Belongs here: the rows, means, table, picture and verdict that all benches of ratios share.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypedDict
from xml.sax.saxutils import escape

from .plot import FASTER, LINE, REQUIRED, SLOWER, TOP, WIDTH, line, text, ticks, write_document
from .runner import Bench, Report
from .timing import Comparison, compare

SMALLEST = 0.01  # the least ratio that is drawn: one from a difference of times may be negative
CROWDED = 40  # a comparison with more rows than this is drawn in dots, not bars


class Row(TypedDict):
    """One comparison. ratio above 1: provider is better than baseline; its range is over the interleaved rounds."""

    case: str
    shape: str
    provider: str
    baseline: str
    unit: str
    value: float
    baseline_value: float
    ratio: float
    ratio_min: float
    ratio_max: float
    bar: float | None
    ok: bool


def make_row(
    case: str, shape: str, provider: str, baseline: str, found: Comparison,
    *, unit: str = "us", amount: float | None = None, bar: float | None = None,
) -> Row:  # fmt: skip
    """The row of a comparison. bar: the required ratio.

    amount: what one call does, in `unit` times seconds, so that amount / seconds is in `unit`. None: values are
    microseconds.
    """
    values = [1e6 * s if amount is None else amount / s for s in (found.seconds, found.baseline_seconds)]
    numbers = [*(round(value, 1) for value in values), *(round(ratio, 3) for ratio in found[2:])]
    cells = (case, shape, provider, baseline, unit, *numbers, bar, bar is None or found.ratio >= bar)
    return dict(zip(Row.__annotations__, cells, strict=True))  # type: ignore[return-value]


def compared(
    case: str, shape: object, seconds: Mapping[str, Sequence[float]], pairs: Iterable[tuple],
    *, unit: str = "us", amount: float | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each of the pairs (provider, baseline[, required ratio]) that were both timed."""
    return [
        make_row(
            *(case, str(shape), provider, baseline, compare(seconds[provider], seconds[baseline])),
            unit=unit,
            amount=amount,
            bar=bar[0] if bar else None,
        )
        for provider, baseline, *bar in pairs
        if provider in seconds and baseline in seconds
    ]


def mean_row(
    rows: Sequence[Row], *, case: str = "geometric mean", shape: str = "", provider: str = "", bar: float | None = None
) -> Row:
    """The geometric means of rows that share unit and baseline, with the range of their ratios."""
    values, baselines = (
        [max(row[key], 0.05) for row in rows] for key in ("value", "baseline_value")
    )  # 0.0: less than 0.05
    ratios = [row["ratio"] for row in rows]
    # as the seconds of one call, in `unit`
    mean = Comparison(
        geometric_mean(values) / 1e6, geometric_mean(baselines) / 1e6, geometric_mean(ratios), min(ratios), max(ratios)
    )
    names = (case, shape or f"{len(rows)} rows", provider or rows[0]["provider"], rows[0]["baseline"])
    return {**make_row(*names, mean, bar=bar), "unit": rows[0]["unit"]}


def means(rows: Iterable[Row], *, case: str = "geometric mean", required: Mapping[tuple, float] = {}) -> list[Row]:
    """A mean for each (provider, baseline); those with a required ratio last."""
    pairs: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        pairs.setdefault((row["provider"], row["baseline"]), []).append(row)
    ordered = sorted(pairs.items(), key=lambda item: item[0] in required)
    return [mean_row(group, case=case, bar=required.get(pair)) for pair, group in ordered]


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by what they have in common: case and baseline."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row['case']}, against {row['baseline']}", []).append(row)
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows as text of at most 120 columns, by groups."""
    names = ("", "provider", "value", "baseline", "unit", "ratio", "min", "max", "bar", "ok")
    cells = {heading: [_cells(row) for row in group] for heading, group in groups(rows).items()}
    widths = [
        max(map(len, column)) for column in zip(names, *(c for group in cells.values() for c in group), strict=True)
    ]

    def join(row: Sequence[str]) -> str:
        left = (0, 1, 4)
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  " + "  ".join(padded).rstrip()

    lines = [join(names)]
    for heading, group in cells.items():
        lines += [heading, *map(join, group)]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    ratios = (f"{ratio:.3f}" for ratio in (row["ratio"], row["ratio_min"], row["ratio_max"]))
    values = (f"{row['value']:,.1f}", f"{row['baseline_value']:,.1f}", row["unit"])
    required = ("", "") if row["bar"] is None else (f"{row['bar']:g}", "yes" if row["ok"] else "NO")
    return (row["shape"], row["provider"], *values, *ratios, *required)


def ratios(rows: Callable[[bool], list[Row]]) -> Callable[[argparse.Namespace], Report]:
    """The `run` of a bench of ratios; rows(quick) measures them. Bars apply to full-size shapes only."""

    def run(options: argparse.Namespace) -> Report:
        found = rows(options.quick)
        if options.quick:
            found = [{**row, "bar": None, "ok": True} for row in found]
        bars = [row for row in found if row["bar"] is not None]
        missed = [f"{row['case']} {row['shape']}: {row['ratio']:.3f} < {row['bar']:g}" for row in bars if not row["ok"]]
        problems = [f"{len(missed)} of {len(bars)} bars missed: {'; '.join(missed)}"] if missed else []
        outcome = "no bar applies to small sizes" if options.quick else f"all {len(bars)} bars hold"
        return Report([table(found)], {"rows": found}, problems, outcome)

    return run


def ratio_bench(
    rows: Callable[[bool], list[Row]], predictions: Callable[[], Sequence[Row]] | None = None, **described: Any
) -> Bench:
    """The bench of these rows; predictions: those that are shown where it cannot run. described: other fields."""
    predict = None if predictions is None else lambda: table(predictions())
    return Bench(run=ratios(rows), predict=predict, draw=draw_ratios, **described)


def _drawn(row: Row) -> tuple[float | None, ...]:
    return row["ratio_min"], row["ratio_max"], row["bar"]


def draw_ratios(path: Path) -> Path:
    """Each row's ratio on a logarithmic scale: a bar, or a dot where rows are many, with its own scale per group."""
    result = json.loads(path.read_text())
    parts, y = [], float(TOP)
    if max(map(len, groups(result["rows"]).values())) > CROWDED:
        parts.append(text(10, y + 8, "a dot: one shape; hollow: another provider of it, named where the mouse rests"))
        y += LINE
    for heading, rows in groups(result["rows"]).items():
        values = [1.0, *(value for row in rows for value in _drawn(row) if value is not None)]
        crowded = len(rows) > CROWDED
        scale = _Scale(max(min(values), SMALLEST) / 1.05, max(values) * 1.05, 150 if crowded else 10)
        drawn, bottom = (_dots if crowded else _bars)(rows, scale, y + 44)
        parts += [text(10, y + 14, heading, font_weight="bold"), *scale.axis(y + 34, bottom), *drawn]
        y = bottom + 16
    note = "ratio to the baseline (above 1: faster), logarithmic; median, line: range; red: required"
    return write_document(path.with_suffix(".svg"), result, note, WIDTH, y, parts)


class _Scale:
    """Ratios from low to high, from the x `left` to the right margin."""

    def __init__(self, low: float, high: float, left: float) -> None:
        self.low, self.high, self.left = low, high, left

    def x(self, ratio: float) -> float:
        share = math.log(max(ratio, SMALLEST) / self.low) / math.log(self.high / self.low)
        return self.left + (WIDTH - 20 - self.left) * share

    def axis(self, top: float, bottom: float) -> list[str]:
        """Labelled lines at round ratios, at 1 in black."""
        parts: list[str] = []
        labelled: list[float] = []
        for tick in sorted({1.0, *ticks(self.low, self.high, logarithmic=True)}, key=lambda tick: (tick != 1, tick)):
            x = self.x(tick)
            parts.append(line(x, top, x, bottom, "#333" if tick == 1 else "#ddd"))
            if all(abs(x - other) > 34 for other in labelled):
                labelled.append(x)
                inside = min(max(x, 24), WIDTH - 24)  # half of the widest label
                parts.append(text(inside, top - 3, f"{tick:g}", "middle", fill="#444"))
        return parts


def _bars(rows: Sequence[Row], scale: _Scale, y: float) -> tuple[list[str], float]:
    """A line of text and a bar for each row, and the y below them."""
    parts = []
    for row in rows:
        left, right = sorted((scale.x(1), scale.x(row["ratio"])))
        value = f"{row['ratio']:.2f} ({row['value']:,.0f} {row['unit']})"
        parts.append(text(10, y + 6, f"{row['shape']}: {row['provider']}"))
        parts.append(text(WIDTH - 10, y + 6, value, "end", font_weight="normal" if row["ok"] else "bold"))
        colour = FASTER if row["ratio"] >= 1 else SLOWER
        parts.append(f'<rect x="{left:.1f}" y="{y + 11:.1f}" width="{right - left:.1f}" height="9" fill="{colour}"/>')
        parts.append(line(scale.x(row["ratio_min"]), y + 15.5, scale.x(row["ratio_max"]), y + 15.5, "#222", 1.5))
        if row["bar"] is not None:
            parts.append(line(scale.x(row["bar"]), y + 10, scale.x(row["bar"]), y + 23, REQUIRED, 2.5))
        y += 34
    return parts, y - 6


def _dots(rows: Sequence[Row], scale: _Scale, y: float) -> tuple[list[str], float]:
    """One line for the shapes that differ in their last word only; a shape's first provider is filled."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["shape"].rpartition(" ")[0], []).append(row)
    parts, seen = [], set()
    for label, group in lines.items():
        parts += [text(10, y + 8, label), line(scale.left, y + 4, WIDTH - 20, y + 4, "#eee")]
        for row in group:
            colour = FASTER if row["ratio"] >= 1 else SLOWER
            fill, size = ("none", 2.5) if row["shape"] in seen else (colour, 4)
            seen.add(row["shape"])
            title = escape(f"{row['shape']}, {row['provider']}: {row['ratio']:.2f}")
            place = f'cx="{scale.x(row["ratio"]):.0f}" cy="{y + 4:.0f}" r="{size}"'
            parts.append(f'<circle {place} fill="{fill}" stroke="{colour}"><title>{title}</title></circle>')
        y += 22
    return parts, y

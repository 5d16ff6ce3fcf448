"""How the bench `layouts` shows its rows and curves: tables, and a drawing of what stands in the JSON.

Belongs here: tables, and drawing with the standard library only. No measuring, no comparing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from .plot import LINE, TOP, line, text, write_document

LEFT, WIDTH, RIGHT = 70, 640, 30  # pixels
HEIGHTS = {"losses": 260, "differences": 120}
COLOURS = ("#222222", "#4e79a7", "#e15759", "#59a14f", "#b07aa1")
DASHES = ("none", "8 5", "3 4", "10 3 2 3", "6 2")  # so that curves which coincide can be told apart


def result_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for name in ("ranks", "m", "float64 loss", "norm", "parameters", "float32 loss", "norm", "seconds", "ok"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        double, single = row["float64"], row["float32"]
        table.add_row(
            *(row["layout"], str(row["ranks"]), str(row["microbatches"])),
            *(f"{double[key]:.1e}" for key in ("loss", "norm", "parameters")),
            *(f"{single['loss']:.1e}", f"{single['norm']:.1e}"),
            f"{double['seconds'] + single['seconds']:.1f}",
            "yes" if row["ok"] else f"NO: {double['worst']}",
        )
    return table


def bfloat16_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("bfloat16", no_wrap=True)
    for name in ("ranks", "loss", "norm", "loss error", "of one process", "allowed", "norm error", "of one process"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("ok", justify="right", no_wrap=True)
    for row in rows:
        pairs = (row[f"{key}_{of}"] for key in ("loss", "norm") for of in ("error", "single", "allowed"))
        table.add_row(
            *(row["layout"], str(row["ranks"]), f"{row['loss']:.1e}", f"{row['norm']:.1e}"),
            *(" ".join(f"{value:.1e}" for value in pair) for pair in pairs),
            "yes" if row["ok"] else "NO",
        )
    return table


def _curve(points: Sequence[tuple[float, float]], index: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'stroke="{COLOURS[index]}" stroke-width="{2 if index else 5}" stroke-dasharray="{DASHES[index]}"'
    return f'<polyline points="{path}" fill="none" {style}/>'


def _x(step: int, steps: int) -> float:
    return LEFT + WIDTH * (step - 1) / max(1, steps - 1)


def _frame(top: float, height: float, steps: int, ticks: Mapping[float, str]) -> list[str]:
    """Axes: steps below, and lines at the heights (y -> label) of `ticks`."""
    bottom, parts = top + height, []
    for y, label in ticks.items():
        parts += [line(LEFT, y, LEFT + WIDTH, y, "#e4e4e4"), text(LEFT - 8, y + 4, label, "end", fill="#666")]
    parts.append(line(LEFT, bottom, LEFT + WIDTH, bottom, "#666"))
    for step in (1, *range(10, steps + 1, 10)):
        x = _x(step, steps)
        parts += [line(x, bottom, x, bottom + 4, "#666"), text(x, bottom + 18, str(step), "middle", fill="#666")]
    return parts


def _draw_losses(curves: Mapping[str, Sequence[float]], top: float) -> list[str]:
    values = [loss for losses in curves.values() for loss in losses]
    low, high = math.floor(min(values) * 2), math.ceil(max(values) * 2)  # in halves
    steps, height = len(next(iter(curves.values()))), HEIGHTS["losses"]

    def y(loss: float) -> float:
        return top + height * (high - 2 * loss) / (high - low)

    parts = _frame(top, height, steps, {y(half / 2): f"{half / 2:g}" for half in range(low, high + 1)})
    for index, losses in enumerate(curves.values()):
        parts.append(_curve([(_x(step, steps), y(loss)) for step, loss in enumerate(losses, 1)], index))
    return parts


def _draw_differences(curves: Mapping[str, Sequence[float]], top: float) -> list[str]:
    """|loss / the first curve's - 1| of the others, a dot for each step; those that are 0 lie on the axis."""
    expected, *others = curves.values()
    relative = [[abs(loss / one - 1) for loss, one in zip(losses, expected, strict=True)] for losses in others]
    exponents = [math.log10(value) for values in relative for value in values if value] or [-16.0]
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents) + 0.1)
    height = HEIGHTS["differences"]

    def y(value: float) -> float:
        return top + height * (high - (math.log10(value) if value else low)) / (high - low)

    ticks = {y(10.0**exponent): f"1e{exponent}" for exponent in range(low + 1, high + 1)}
    parts = _frame(top, height, len(expected), {**ticks, top + height: "0"})
    for index, values in enumerate(relative, 1):
        for step, value in enumerate(values, 1):
            x = _x(step, len(expected)) + 2 * (index - 2)  # beside one another where they coincide
            parts.append(f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="2" fill="{COLOURS[index]}"/>')
    return parts


def draw(path: Path) -> Path:
    """layouts.svg beside layouts.json: its `curves`, a loss per step by dtype and layout, one process first."""
    result = json.loads(path.read_text())
    curves = result["curves"]
    losses = next(iter(curves.values()))  # those of another dtype look the same
    parts = []
    for index, name in enumerate(losses):
        x = LEFT + 160 * index
        parts += [_curve([(x, TOP + 10), (x + 34, TOP + 10)], index), text(x + 40, TOP + 14, name)]
    top = float(TOP + 2 * LINE)
    parts += _draw_losses(losses, top)
    top += HEIGHTS["losses"]
    for dtype, of_dtype in curves.items():
        top += 3 * LINE
        parts.append(text(LEFT, top - 8, f"{dtype}: relative difference from one process", font_weight="bold"))
        parts += _draw_differences(of_dtype, top)
        top += HEIGHTS["differences"]
    note = "training loss in nats per token, by step: one run, in one process and in three layouts of four ranks"
    return write_document(path.with_suffix(".svg"), result, note, LEFT + WIDTH + RIGHT, top + 2 * LINE, parts)

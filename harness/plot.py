"""Drawings of result files, with the standard library only: their frame and marks, and curves over steps.

Belongs here: drawing what stands in the JSON. No measuring. Stacked bars: bars.py.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LINE, TOP, HEIGHT = 600, 22, 64, 300  # of a drawing, a line, the header, a panel: at least 7 px on a phone
LEFT, RIGHT = 56, 20  # of a panel of curves, what is beside it
FASTER, SLOWER, REQUIRED = "#2f7d4f", "#c0622d", "#b00020"
COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f"),
    *("#1f3a5f", "#d37295", "#a0cbe8", "#2f6b2f", "#ffbe7d", "#7f1d1d", "#79706e"),
)


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: Any) -> str:
    """Attributes: of the SVG element, with _ for -."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def ticks(low: float, high: float, *, logarithmic: bool = False) -> list[float]:
    """Round numbers between low and high: four to ten of them; logarithmic: where they span much, 1, 2, 5, 10."""
    if logarithmic and high / low > 6:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [n for n in (factor * 10.0**decade for decade in decades for factor in (1, 2, 5)) if low <= n <= high]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= max(factor for factor in (1, 2, 5) if (high - low) / (factor * step) >= 4)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def write_document(target: Path, result: dict, note: str, width: int, height: float, parts: Sequence[str]) -> Path:
    """An SVG of elements that begin at the y TOP, under the result's name, machine, date, commit and a note."""
    here = result["machine"]
    device = here["gpu"] or f"{here['cpu']}, {here['cores']} cores"
    commit = f"commit {result['commit'][:7]}" if result["commit"] else "commit unknown"
    changed = " and changes" if result.get("dirty") else ""
    subtitle = f"{device}, torch {result['versions']['torch']}, {result['date']}, {commit}{changed}"
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" font-size="12">',
        "<style>text { paint-order: stroke; stroke: white; stroke-width: 3px }</style>",  # legible across lines
        f'<rect width="{width}" height="{height:.0f}" fill="white"/>',
        text(10, 20, f"python -m bench {result['bench']}", font_weight="bold", font_size="14"),
        text(10, 38, subtitle, fill="#444"),
        text(10, 54, note, fill="#444"),
        *parts,
        "</svg>",
    ]
    target.write_text("\n".join(svg) + "\n")
    return target


def step_x(step: int, steps: int) -> float:
    """The x of a step in a panel of curves, step 1 at the left."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(1, steps - 1)


def frame(top: float, height: float, steps: int, labels: Mapping[float, str]) -> list[str]:
    """Axes of a panel of curves: steps below, and lines at the heights (y -> label) of `labels`."""
    bottom, right, parts = top + height, WIDTH - RIGHT, []
    for y, label in labels.items():
        parts += [line(LEFT, y, right, y, "#e4e4e4"), text(LEFT - 8, y + 4, label, "end", fill="#444")]
    for step in (1, *ticks(2, steps)):
        x = step_x(round(step), steps)
        parts += [line(x, bottom, x, bottom + 4, "#666"), text(x, bottom + 18, f"{step:g}", "middle", fill="#444")]
    parts.append(line(LEFT, bottom, right, bottom, "#666"))
    return [*parts, text((LEFT + right) / 2, bottom + 34, "training step", "middle", fill="#444")]


def _curve(losses: Sequence[float], top: float) -> list[str]:
    """A panel of losses by step."""
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def y(loss: float) -> float:
        return top + HEIGHT * (high - loss) / (high - low)

    points = " ".join(f"{step_x(step, len(losses)):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
    curve = f'<polyline points="{points}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>'
    return [*frame(top, HEIGHT, len(losses), {y(tick): f"{tick:g}" for tick in ticks(low, high)}), curve]


def draw_curves(path: Path) -> Path:
    """The `losses` of each row of a result file, in a panel of its own."""
    result = json.loads(path.read_text())
    parts, y = [], float(TOP)
    for row in result["rows"]:
        speed = f"{row['tokens_per_second']:,.0f} tokens/s" + (f", MFU {row['mfu']:.1%}" if row["mfu"] else "")
        parts += [text(10, y + 14, f"{row['model']}: {speed}", font_weight="bold"), *_curve(row["losses"], y + 26)]
        y += HEIGHT + 80
    note = "training loss (nats per token) by step"
    return write_document(path.with_suffix(".svg"), result, note, WIDTH, y, parts)

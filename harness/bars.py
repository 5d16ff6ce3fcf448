"""Drawings of stacked bars that can be read on a phone: what `memory`, `zero` and `bubbles` draw.

Belongs here: drawing what stands in a result file, with the standard library only. No measuring.
"""

import itertools
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .plot import COLOURS, REQUIRED, TOP, WIDTH, line, text, ticks, write_document

LINE, BAR, CHARACTER = 20, 13, 6.6  # pixels: of a line, a bar, a letter
VALUE = 64  # pixels to the right of the longest bar, for its value
FORMULA = "#bbbbbb"  # a bar that is one number without parts


class Bar(NamedTuple):
    """label: left of the bar, under the group's name. value: what is written at its end. mark: where a red line is."""

    group: str
    label: str
    parts: Mapping[str, float]
    value: str
    mark: float | None = None

    @property
    def length(self) -> float:
        return sum(self.parts.values())


def paragraph(note: str, y: float) -> tuple[list[str], float]:
    """The note in lines as wide as the drawing, and the y below them."""
    lines = textwrap.wrap(note, int((WIDTH - 20) / CHARACTER) + 3)
    parts = [text(10, y + 16 * index, each, fill="#444") for index, each in enumerate(lines)]
    return parts, y + 16 * len(lines)


def legend(colours: Mapping[str, str], y: float) -> tuple[list[str], float]:
    """Squares and names, as many in a line as fit, and the y below them."""
    parts, x = [], 10.0
    for name, colour in colours.items():
        width = 34 + CHARACTER * len(name)
        if x + width > WIDTH:
            x, y = 10.0, y + LINE
        parts.append(f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="13" height="13" fill="{colour}"/>')
        parts.append(text(x + 18, y, name))
        x += width
    return parts, y + LINE


def _scale(y: float, bottom: float, left: float, high: float, pixels: float, unit: str) -> list[str]:
    """Faint lines at round numbers from y to bottom, the numbers below them, and what they are."""
    parts = []
    for tick in ticks(0, high):
        x = left + tick * pixels
        parts += [line(x, y, x, bottom, "#e4e4e4"), text(x, bottom + 14, f"{tick:g}", "middle", fill="#666")]
    return [*parts, text(left, bottom + 32, unit, fill="#666")]


def _draw(bar: Bar, y: float, left: float, pixels: float, colours: Mapping[str, str]) -> list[str]:
    parts, x = [text(left - 8, y, bar.label, "end")], left
    for name, size in bar.parts.items():
        where = f'x="{x:.1f}" y="{y - 10:.1f}" width="{size * pixels:.1f}" height="{BAR}"'
        parts.append(f'<rect {where} fill="{colours.get(name, FORMULA)}"><title>{name}: {size:.3g}</title></rect>')
        x += size * pixels
    if bar.mark is not None:
        wanted = left + bar.mark * pixels
        parts.append(line(wanted, y - 12, wanted, y + 5, REQUIRED, 2))
        x = max(x, wanted)
    return [*parts, text(x + 6, y, bar.value)]


def write_bars(path: Path, note: str, unit: str, bars: Iterable[Bar], *, alone: Sequence[str] = ()) -> Path:
    """Draw bars, group by group, on one scale into the .svg beside the result file; the path of the drawing.

    alone: names of parts that are no items: in grey, and not in the legend.
    """
    bars = list(bars)
    names = dict.fromkeys(name for bar in bars for name in bar.parts if name not in alone)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    left = 18 + CHARACTER * max(len(bar.label) for bar in bars)
    high = max(max(bar.length, bar.mark or 0) for bar in bars)
    pixels = (WIDTH - VALUE - left) / high
    parts, y = paragraph(note, TOP - 8)
    if len(names) > 1:
        squares, y = legend(colours, y + 8)
        parts += squares
    top = y
    drawn: list[str] = []
    for group, of_group in itertools.groupby(bars, key=lambda bar: bar.group):
        y += LINE
        drawn.append(text(10, y, group, font_weight="bold"))
        for bar in of_group:
            y += LINE
            drawn += _draw(bar, y, left, pixels, colours)
    parts += [*_scale(top, y + 8, left, high, pixels, unit), *drawn]
    return write_document(path.with_suffix(".svg"), json.loads(path.read_text()), "", WIDTH, y + 52, parts)

"""One SVG from one result file: each row's ratio to its baseline on a logarithmic scale; and what every drawing is of.

Belongs here: drawing what stands in the JSON, with the standard library only. No measuring, no arithmetic on results.
Drawings of other kinds: charts.py.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LABELS, WIDTH, LINE, TOP, RIGHT = 470, 420, 22, 64, 150  # pixels
FASTER, SLOWER, REQUIRED = "#2f7d4f", "#c0622d", "#b00020"
TICKS = (0.25, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100)


def text(x: float, y: float, content: str, anchor: str = "start", **attributes: Any) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _groups(rows: list[dict]) -> list[list[dict]]:
    """Rows by case: ratios of one case are of one size, so each case has a scale of its own."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["case"], []).append(row)
    return list(groups.values())


def _draw_group(rows: list[dict], top: float) -> tuple[list[str], float]:
    """Elements of one case from the y `top` on, and the y where they end."""
    values = [1.0, *(row["ratio_min"] for row in rows), *(row["ratio_max"] for row in rows)]
    values += [row["bar"] for row in rows if row["bar"] is not None]
    low, high = math.log(min(values) / 1.1), math.log(max(values) * 1.1)

    def x(ratio: float) -> float:
        return LABELS + WIDTH * (math.log(ratio) - low) / (high - low)

    bottom = top + LINE * (len(rows) + 1)
    parts = [text(10, top + 14, rows[0]["case"], font_weight="bold")]
    for tick in (t for t in TICKS if low <= math.log(t) <= high):
        parts.append(line(x(tick), top + LINE - 2, x(tick), bottom, "#333" if tick == 1 else "#ddd"))
        parts.append(text(x(tick), top + 14, f"{tick:g}", "middle", fill="#666"))
    for index, row in enumerate(rows):
        y = top + LINE * (index + 1.5)
        colour = FASTER if row["ratio"] >= 1 else SLOWER
        left, right = sorted((x(1), x(row["ratio"])))
        label = f"{row['shape']}: {row['provider']} against {row['baseline']}"
        parts.append(text(10, y + 4, label))
        size = f'width="{right - left:.1f}" height="12" fill="{colour}" fill-opacity="0.75"'
        parts.append(f'<rect x="{left:.1f}" y="{y - 6:.1f}" {size}/>')
        parts.append(line(x(row["ratio_min"]), y, x(row["ratio_max"]), y, "#222", 1.5))
        if row["bar"] is not None:
            parts.append(line(x(row["bar"]), y - 9, x(row["bar"]), y + 9, REQUIRED, 2.5))
        value = f"{row['ratio']:.2f}  ({row['value']:,.0f} {row['unit']})"
        parts.append(text(LABELS + WIDTH + 10, y + 4, value, font_weight="normal" if row["ok"] else "bold"))
    return parts, bottom


def write_svg(path: Path) -> Path:
    """Draw the result file `path` (.json) into the .svg beside it."""
    result = json.loads(path.read_text())
    parts, y = [], float(TOP)
    for rows in _groups(result["rows"]):
        drawn, y = _draw_group(rows, y)
        parts += drawn
        y += 14
    note = "ratio to the baseline (above 1 is faster), median and range; red: the required ratio"
    return write_document(path.with_suffix(".svg"), result, note, LABELS + WIDTH + RIGHT, y, parts)


def write_document(target: Path, result: dict, note: str, width: int, height: float, parts: Sequence[str]) -> Path:
    """An SVG of elements that begin at the y TOP, under the result's name, machine and date."""
    here = result["machine"]
    gpu = f", {here['gpu']}" if here["gpu"] else ""
    subtitle = f"{here['cpu']}, {here['cores']} cores, torch {result['versions']['torch']}{gpu}, {result['date']}"
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height:.0f}" fill="white"/>',
        text(10, 20, f"python -m bench {result['bench']}", font_weight="bold", font_size="14"),
        text(10, 38, subtitle, fill="#444"),
        text(10, 54, note, fill="#444"),
        *parts,
        "</svg>",
    ]
    target.write_text("\n".join(svg) + "\n")
    return target

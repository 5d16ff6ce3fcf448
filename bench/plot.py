"""One SVG from one result file: each row's ratio to its baseline on a logarithmic scale.

Belongs here: drawing what stands in the JSON, with the standard library only. No measuring, no arithmetic on results.
"""

import json
import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LABELS, WIDTH, LINE, TOP, RIGHT = 470, 420, 22, 64, 150  # pixels
FASTER, SLOWER, REQUIRED = "#2f7d4f", "#c0622d", "#b00020"
TICKS = (0.25, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100)


def _text(x: float, y: float, content: str, anchor: str = "start", **attributes: Any) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
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
    parts = [_text(10, top + 14, rows[0]["case"], font_weight="bold")]
    for tick in (t for t in TICKS if low <= math.log(t) <= high):
        parts.append(_line(x(tick), top + LINE - 2, x(tick), bottom, "#333" if tick == 1 else "#ddd"))
        parts.append(_text(x(tick), top + 14, f"{tick:g}", "middle", fill="#666"))
    for index, row in enumerate(rows):
        y = top + LINE * (index + 1.5)
        colour = FASTER if row["ratio"] >= 1 else SLOWER
        left, right = sorted((x(1), x(row["ratio"])))
        label = f"{row['shape']}: {row['provider']} against {row['baseline']}"
        parts.append(_text(10, y + 4, label))
        size = f'width="{right - left:.1f}" height="12" fill="{colour}" fill-opacity="0.75"'
        parts.append(f'<rect x="{left:.1f}" y="{y - 6:.1f}" {size}/>')
        parts.append(_line(x(row["ratio_min"]), y, x(row["ratio_max"]), y, "#222", 1.5))
        if row["bar"] is not None:
            parts.append(_line(x(row["bar"]), y - 9, x(row["bar"]), y + 9, REQUIRED, 2.5))
        value = f"{row['ratio']:.2f}  ({row['value']:,.0f} {row['unit']})"
        parts.append(_text(LABELS + WIDTH + 10, y + 4, value, font_weight="normal" if row["ok"] else "bold"))
    return parts, bottom


def write_svg(path: Path) -> Path:
    """Draw the result file `path` (.json) into the .svg beside it."""
    result = json.loads(path.read_text())
    here, parts, y = result["machine"], [], float(TOP)
    for rows in _groups(result["rows"]):
        drawn, y = _draw_group(rows, y)
        parts += drawn
        y += 14
    gpu = f", {here['gpu']}" if here["gpu"] else ""
    subtitle = f"{here['cpu']}, {here['cores']} cores, torch {result['versions']['torch']}{gpu}, {result['date']}"
    note = "ratio to the baseline (above 1 is faster), median and range; red: the required ratio"
    width = LABELS + WIDTH + RIGHT
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y:.0f}" viewBox="0 0 {width} {y:.0f}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{y:.0f}" fill="white"/>',
        _text(10, 20, f"python -m bench {result['bench']}", font_weight="bold", font_size="14"),
        _text(10, 38, subtitle, fill="#444"),
        _text(10, 54, note, fill="#444"),
        *parts,
        "</svg>",
    ]
    target = path.with_suffix(".svg")
    target.write_text("\n".join(svg) + "\n")
    return target

"""The drawing of `python -m bench zero`: what ranks hold at each moment, stacked, beside the formula.

Belongs here: drawing what stands in the JSON. No measuring.
"""

import json
from pathlib import Path
from xml.sax.saxutils import escape

from .plot import COLOURS, LINE, REQUIRED, TOP, line, text, write_document

LEFT, WIDTH, RIGHT, DTYPE = 360, 520, 160, "bfloat16"


def draw_moments(path: Path) -> Path:
    """One bar for each moment of each layout's first pipeline rank in bfloat16; a red line where the formula has it."""
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if row["dtype"] == DTYPE and row["rank"] == 0]
    colours = dict(zip(rows[0]["bytes"], COLOURS, strict=False))
    scale = WIDTH / max(row["total"] / row["parameters"] for row in rows)
    parts, y = [], float(TOP)
    for index, (kind, colour) in enumerate(colours.items()):
        x = 10 + index * 170
        parts.append(f'<rect x="{x}" y="{y:.1f}" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, y + 11, kind))
    y += LINE
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is None or previous["case"] != row["case"]:
            y += 8
        y += LINE - 4
        label = f"{row['case']}: {row['moment']}"
        parts.append(text(LEFT - 10, y + 4, label, "end"))
        x = float(LEFT)
        for kind, size in row["bytes"].items():
            width = size / row["parameters"] * scale
            rectangle = f'x="{x:.1f}" y="{y - 6:.1f}" width="{width:.1f}" height="12" fill="{colours[kind]}"'
            parts.append(f"<rect {rectangle}><title>{escape(kind)}</title></rect>")
            x += width
        wanted = LEFT + row["expected_total"] / row["parameters"] * scale
        parts.append(line(wanted, y - 8, wanted, y + 8, REQUIRED, 2))
        parts.append(text(x + 8, y + 4, f"{row['total'] / row['parameters']:.2f}"))
    note = "bytes per parameter on one rank (bf16 compute, float32 masters), 4 microbatches; red lines: the formula"
    return write_document(path.with_suffix(".svg"), result, note, LEFT + WIDTH + RIGHT, y + LINE, parts)

"""Drawings of results that are no ratios: bars stacked of items, and curves over steps.

Belongs here: drawing what stands in the JSON, with the standard library only. No measuring.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from .plot import TOP, line, text, write_document

LABELS, WIDTH, LINE, RIGHT, HEIGHT = 240, 640, 20, 160, 300  # pixels
COLOURS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f"),
    *("#1f3a5f", "#86bcb6", "#d4a6c8", "#8cd17d", "#b6992d", "#fabfd2", "#79706e"),
)
TOTAL = "total"  # an item of this name is the sum of the others: drawn where it stands alone, as a formula's does


def _rectangle(x: float, y: float, width: float, colour: str, title: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LINE - 6}" fill="{colour}"'
    return f"<rect {size}><title>{title}</title></rect>"


def _legend(colours: dict[str, str], top: float) -> tuple[list[str], float]:
    parts, columns = [], 4
    for index, (item, colour) in enumerate(colours.items()):
        x, y = 10 + index % columns * 250, top + index // columns * LINE
        parts += [_rectangle(x, y, LINE - 6, colour, item), text(x + LINE, y + 11, item)]
    return parts, top + -(-len(colours) // columns) * LINE


def draw_bars(path: Path) -> Path:
    """One bar for each (model, tp, recompute) of a result file's rows, stacked of its items, in sbh/t."""
    result = json.loads(path.read_text())
    bars: dict[str, dict[str, dict[str, float]]] = {}
    for row in result["rows"]:
        label = f"t = {row['tp']}, recompute {row['recompute']}"
        bars.setdefault(row["model"], {}).setdefault(label, {})[row["item"]] = row["sbh_over_t"]
    items = [row["item"] for row in result["rows"] if row["item"] != TOTAL]
    colours = dict(zip(dict.fromkeys(items), COLOURS * (1 + len(items) // len(COLOURS)), strict=False))
    parts, y = _legend(colours, TOP)
    scale = WIDTH / max(row["sbh_over_t"] for row in result["rows"])
    for model, of_model in bars.items():
        y += LINE
        parts.append(text(10, y, model, font_weight="bold"))
        for label, sizes in of_model.items():
            y += LINE
            parts.append(text(LABELS - 10, y, label, "end"))
            x = float(LABELS)
            for item, size in sizes.items() if len(sizes) == 1 else [i for i in sizes.items() if i[0] != TOTAL]:
                parts.append(_rectangle(x, y - 11, size * scale, colours.get(item, "#bbb"), f"{item}: {size:g}"))
                x += size * scale
            parts.append(text(x + 8, y, f"{sizes[TOTAL]:.2f}"))
    note = "bytes of saved activations of one layer on one rank, in s b h / t; grey: a formula, not measured"
    return write_document(path.with_suffix(".svg"), result, note, LABELS + WIDTH + RIGHT, y + LINE, parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between low and high: four to ten of them."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= max(factor for factor in (1, 2, 5) if (high - low) / (factor * step) >= 4)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _draw_curve(losses: Sequence[float], title: str, top: float) -> tuple[list[str], float]:
    """One panel: losses by step, step 1 at the left."""
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    left, bottom = 60, top + LINE + HEIGHT

    def x(step: float) -> float:
        return left + WIDTH * (step - 1) / max(1, len(losses) - 1)

    def y(loss: float) -> float:
        return bottom - HEIGHT * (loss - low) / (high - low)

    parts = [text(10, top + 12, title, font_weight="bold")]
    for tick in _ticks(low, high):
        parts += [line(left, y(tick), left + WIDTH, y(tick), "#ddd")]
        parts += [text(left - 8, y(tick) + 4, f"{tick:g}", "end", fill="#666")]
    for tick in _ticks(1, len(losses)):
        parts += [line(x(tick), bottom, x(tick), bottom + 4, "#666")]
        parts += [text(x(tick), bottom + 18, f"{tick:g}", "middle", fill="#666")]
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
    parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[0]}" stroke-width="1.5"/>')
    return parts, bottom + 2 * LINE


def draw_curves(path: Path) -> Path:
    """The `losses` of each row of a result file, in a panel of its own."""
    result = json.loads(path.read_text())
    parts, y = [], float(TOP)
    for row in result["rows"]:
        title = f"{row['model']}: {row['tokens_per_second']:,.0f} tokens/s"
        drawn, y = _draw_curve(row["losses"], title + (f", MFU {row['mfu']:.1%}" if row["mfu"] else ""), y)
        parts += drawn
    note = "training loss in nats per token, by step"
    return write_document(path.with_suffix(".svg"), result, note, 60 + WIDTH + RIGHT, y, parts)

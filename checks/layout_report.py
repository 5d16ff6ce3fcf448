"""How the bench `layouts` shows its rows and curves: tables, and a drawing of what stands in the JSON.

Belongs here: tables, and drawing with the standard library only. No measuring, no comparing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.bars import legend, paragraph
from harness.plot import LINE, TOP, WIDTH, frame, step_x, text, write_document
from harness.runner import columns

HEIGHTS = {"losses": 260, "differences": 130}  # pixels
COLOURS = ("#222222", "#4e79a7", "#e15759", "#59a14f", "#b07aa1")
DASHES = ("none", "8 5", "3 4", "10 3 2 3", "6 2")  # so that curves which coincide can be told apart
NOTE = (
    "Training loss in nats per token of one run, in one process and in three layouts of four ranks, whose curves "
    "coincide, and how far they are from one process. TP4: tensor parallel; PP4: pipeline; DP4: data parallel."
)


def result_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout."""
    names = ("ranks", "m", "float64 loss", "norm", "parameters", "float32 loss", "norm", "seconds", "ok")
    table = columns(["layout"], names)
    for row in rows:
        double, single = row["float64"], row.get("float32")
        of_single = ["-", "-"] if single is None else [f"{single[key]:.1e}" for key in ("loss", "norm")]
        table.add_row(
            *(row["layout"], str(row["ranks"]), str(row["microbatches"])),
            *(f"{double[key]:.1e}" for key in ("loss", "norm", "parameters")),
            *of_single,
            f"{double['seconds'] + (single['seconds'] if single else 0.0):.1f}",
            "yes" if row["ok"] else f"NO: {double['worst']}",
        )
    return table


def routing_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout of a model with experts: the hash of every (step, layer, token) -> experts in float64, and
    the tokens that float32 sent to other experts, with the gap between their scores."""
    table = columns(["experts of every token", "hash", "one process"], ("tokens", "float32 flips"))
    table.add_column("largest gap", justify="right")
    for row in rows:
        found = row["routing"]
        gaps = [flip[-1] for flip in found["flips"]]
        most = f"{max(gaps):.1e}" if gaps else "-"
        table.add_row(row["layout"], found["hash"], found["one"], str(found["tokens"]), str(len(gaps)), most)
    return table


def quantized_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout in FP8: the hash of all blocks in float64, and the share of the first step's blocks that
    float32 makes otherwise than one process, which nothing judges."""
    table = columns(["blocks of every matrix", "hash", "one process"], ("blocks", "others in float32, step 1"))
    for row in rows:
        found = row["quantized"]
        share = f"{found['float32']:.1e}" if "float32" in found else "-"
        table.add_row(row["layout"], found["hash"], found["one"], str(found["blocks"]), share)
    return table


def sent_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout by Muon: the elements that all ranks together send of matrices in a step, within replicas
    and from one to others, and what they should be; - where no formula says it."""
    table = columns(["elements of matrices sent in a step"], ("within", "formula", "over dp_replicate", "formula"))
    for row in rows:
        sent, wanted = row["muon"]["sent"], row["muon"]["formula"]
        cells = [[f"{sent[key]:,}", "-" if wanted is None else f"{wanted[key]:,}"] for key in sent]
        table.add_row(row["layout"], *cells[0], *cells[1])
    return table


def bfloat16_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each layout in bfloat16; errors as maximum and RMS."""
    names = ("ranks", "loss", "norm", "loss error", "of one process", "allowed", "norm error", "of one process")
    table = columns(["bfloat16"], (*names, "allowed", "ok"))
    for row in rows:
        pairs = (row[f"{key}_{of}"] for key in ("loss", "norm") for of in ("error", "single", "allowed"))
        table.add_row(
            *(row["layout"], str(row["ranks"]), f"{row['loss']:.1e}", f"{row['norm']:.1e}"),
            *(" ".join(f"{value:.1e}" for value in pair) for pair in pairs),
            "yes" if row["ok"] else "NO",
        )
    return table


def _draw_losses(curves: Sequence[Sequence[float]], top: float) -> list[str]:
    """The first curve broad, the others dashed on it."""
    values = [loss for losses in curves for loss in losses]
    low, high = math.floor(min(values) * 2), math.ceil(max(values) * 2)  # in halves
    steps, height = len(curves[0]), HEIGHTS["losses"]

    def y(loss: float) -> float:
        return top + height * (high - 2 * loss) / (high - low)

    parts = frame(top, height, steps, {y(half / 2): f"{half / 2:g}" for half in range(low, high + 1)})
    for index, losses in enumerate(curves):
        points = " ".join(f"{step_x(step, steps):.1f},{y(loss):.1f}" for step, loss in enumerate(losses, 1))
        style = f'stroke="{COLOURS[index]}" stroke-width="{2 if index else 5}" stroke-dasharray="{DASHES[index]}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
    return parts


def _draw_differences(curves: Sequence[Sequence[float]], top: float) -> list[str]:
    """Their size, a dot for each step; those that are 0 lie on the axis."""
    exponents = [math.log10(abs(value)) for values in curves for value in values if value] or [-16.0]
    low, high = math.floor(min(exponents)) - 1, math.ceil(max(exponents) + 0.1)
    steps, height = len(curves[0]), HEIGHTS["differences"]

    def y(value: float) -> float:
        return top + height * (high - (math.log10(abs(value)) if value else low)) / (high - low)

    ticks = {y(10.0**exponent): f"1e{exponent}" for exponent in range(low + 1, high + 1)}
    parts = frame(top, height, steps, {**ticks, top + height: "0"})
    for index, values in enumerate(curves, 1):
        for step, value in enumerate(values, 1):
            x = step_x(step, steps) + 2 * (index - 2)  # beside one another where they coincide
            parts.append(f'<circle cx="{x:.1f}" cy="{y(value):.1f}" r="2.5" fill="{COLOURS[index]}"/>')
    return parts


def draw(path: Path) -> Path | None:
    """layouts.svg beside layouts.json: its `curves`, losses of one process and layouts' differences by dtype. None for
    a part of the layouts, which has no curves."""
    result = json.loads(path.read_text())
    if "curves" not in result:
        return None
    one, differences = result["curves"]["losses"], result["curves"]["differences"]
    first = next(iter(differences.values()))  # losses of another dtype look the same
    parts, top = paragraph(NOTE, TOP - 8)
    squares, top = legend(dict(zip(["one process", *first], COLOURS, strict=False)), top + 8)
    others = [[loss * (1 + each) for loss, each in zip(one, of_layout, strict=True)] for of_layout in first.values()]
    parts += [*squares, *_draw_losses([one, *others], top)]
    top += HEIGHTS["losses"]
    for dtype, of_dtype in differences.items():
        top += 3.5 * LINE
        parts.append(text(10, top - 8, f"{dtype}: relative difference from one process", font_weight="bold"))
        parts += _draw_differences(list(of_dtype.values()), top)
        top += HEIGHTS["differences"]
    return write_document(path.with_suffix(".svg"), result, "", WIDTH, top + 2 * LINE, parts)

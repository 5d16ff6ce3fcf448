"""Drawings of what stands in data_parallel.json: messages step by step, turns of workers and stages, and curves.

Belongs here: drawing with the standard library only. No measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bars import legend, paragraph
from harness.plot import COLOURS, LEFT, LINE, RIGHT, TOP, WIDTH, line, text, ticks, write_document

from . import pipedream, servers, strategies

STEP, NODE = 44, 11  # pixels between the rounds of an all-reduce, and of a rank's circle
BAR = 20  # pixels of a worker's row
HEIGHT = 240  # of a panel of curves
Row = dict[str, Any]


def document(
    target: Path, result: Mapping[str, Any], note: str, body: Callable[[float], tuple[list[str], float]]
) -> Path:
    """A drawing: the note, and below it what `body` gives for the y where it may begin."""
    parts, top = paragraph(note, TOP - 8)
    drawn, bottom = body(top + 16)
    return write_document(target, dict(result), "", WIDTH, bottom + 12, [*parts, *drawn])


def _arrow(x1: float, y1: float, x2: float, y2: float, label: str) -> list[str]:
    """From one circle to another, with the number of values beside its beginning."""
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    x1, y1, x2, y2 = x1 + NODE * dx, y1 + NODE * dy, x2 - NODE * dx, y2 - NODE * dy
    head = " ".join(f"{x2 - 8 * dx + 4 * s * dy:.1f},{y2 - 8 * dy - 4 * s * dx:.1f}" for s in (1, -1))
    shaft = line(x1, y1, x2 - 6 * dx, y2 - 6 * dy, COLOURS[0], 1.5)
    shape = f'<polygon points="{x2:.1f},{y2:.1f} {head}" fill="{COLOURS[0]}"/>'
    return [shaft, shape, text(x1 + 0.3 * (x2 - x1) + 4, y1 + 0.3 * (y2 - y1) + 4, label, fill="#444")]


def draw_messages(name: str, messages: Sequence[Sequence[int]], result: Mapping[str, Any], target: Path) -> Path:
    """Ranks from left to right, rounds from top to bottom, an arrow for each message."""
    ranks, steps = 4, 1 + max(step for step, *_ in messages)

    def x(rank: int) -> float:
        return 110 + rank * (WIDTH - 200) / (ranks - 1)

    def body(top: float) -> tuple[list[str], float]:
        y = [top + NODE + STEP * step for step in range(steps + 1)]
        parts = [text(10, y[step] + STEP / 2 + 4, f"round {step + 1}", fill="#444") for step in range(steps)]
        for step, sender, receiver, values in messages:
            parts += _arrow(x(sender), y[step], x(receiver), y[step + 1], str(values))
        for at in y:
            for rank in range(ranks):
                parts.append(f'<circle cx="{x(rank):.1f}" cy="{at:.1f}" r="{NODE}" fill="white" stroke="#666"/>')
                parts.append(text(x(rank), at + 4, str(rank), "middle"))
        return parts, y[-1] + NODE

    total = sum(values for *_, values in messages)
    note = (
        f"{name.replace('_', ' ')}: 4 ranks with 4 values each; numbers are values of a message. {total} values in all."
    )
    return document(target, result, note, body)


def draw_server(result: Mapping[str, Any], target: Path) -> Path:
    """Pushes to the servers of all parameters, then pulls, on 4 ranks with 4 values each."""
    messages = [[0, sender, to, 1] for sender in range(4) for to in range(4) if to != sender]
    return draw_messages("parameter server", messages + [[1, *each[1:]] for each in messages], result, target)


def _rows(
    bars: Sequence[tuple[int, float, float, str, str]], labels: Sequence[str], top: float, unit: float
) -> list[str]:
    """Boxes (row, begin, end, colour, label) in rows with a name each; unit: pixels of one unit of time."""
    parts = [text(LEFT + 24, top + BAR * (row + 0.7), name, "end") for row, name in enumerate(labels)]
    for row, begin, end, colour, label in bars:
        x, width = LEFT + 32 + unit * begin, unit * (end - begin)
        parts.append(f'<rect x="{x:.1f}" y="{top + BAR * row:.1f}" width="{width:.1f}" height="{BAR - 3}" '
                     f'fill="{colour}" stroke="white" stroke-width="0.7"/>')  # fmt: skip
        parts.append(text(x + width / 2, top + BAR * (row + 0.65), label, "middle", font_size="9"))
    return parts


def draw_turns(result: Mapping[str, Any], target: Path) -> Path:
    """A step of both servers with a slow worker."""

    def body(top: float) -> tuple[list[str], float]:
        parts = []
        for server in ("sync", "stale"):
            turns = servers.turns(server)
            bars = [(worker, begin, end, COLOURS[worker % 4], "") for worker, begin, end in turns]
            end = max(end for *_, end in turns)
            parts.append(
                text(10, top + 10, f"{server}_server: {len(turns)} microbatches in {end:g} turns", font_weight="bold")
            )
            parts += _rows(
                bars, [f"worker {worker}" for worker in range(4)], top + 18, (WIDTH - LEFT - RIGHT - 40) / 24
            )
            top += 18 + 4 * BAR + 16
        return parts, top

    note = (
        "A step of 24 microbatches on 4 workers, if only computing takes time. The last worker is 4 times slower. "
        "With sync_server all wait for it; with stale_server the others compute what it does not."
    )
    return document(target, result, note, body)


def draw_pipedream(result: Mapping[str, Any], target: Path) -> Path:
    """The beginning of a pipeline without flush."""
    stages, shown = 4, 36

    def body(top: float) -> tuple[list[str], float]:
        bars = []
        for action in pipedream.schedule((1,) * stages, 24):
            if action.end <= shown:
                colour = COLOURS[10] if action.kind == "F" else COLOURS[12]
                bars.append((action.stage, action.start, action.end, colour, str(action.minibatch)))
        names = [f"stage {stage}" for stage in range(stages)]
        parts = _rows(bars, names, top, (WIDTH - LEFT - RIGHT - 40) / shown)
        squares, bottom = legend(
            {"forward": COLOURS[10], "backward, then an update": COLOURS[12]}, top + stages * BAR + 18
        )
        return [*parts, *squares], bottom

    note = "PipeDream on 4 stages: numbers are minibatches, and nothing waits for the end of a batch."
    return document(target, result, note, body)


def _panel(rows: Sequence[Row], x_of: Callable[[Row, int], float], unit: str, top: float) -> list[str]:
    """Curves of the strategies over what x_of says of a point."""
    losses = [loss for row in rows for loss in row["curve"]]
    low, high = min(losses) - 0.05, min(max(losses), min(losses) + 2.2)
    right = max(x_of(row, len(row["curve"])) for row in rows)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / right

    def y(loss: float) -> float:
        return top + HEIGHT * (high - min(loss, high)) / (high - low)

    bottom, parts = top + HEIGHT, []
    for tick in ticks(low, high):
        parts += [
            line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#e4e4e4"),
            text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"),
        ]
    for tick in ticks(0, right):
        parts += [line(x(tick), bottom, x(tick), bottom + 4, "#666"), text(x(tick), bottom + 18, f"{tick:g}", "middle")]
    for row, colour in zip(rows, COLOURS, strict=False):
        points = " ".join(f"{x(x_of(row, i)):.1f},{y(loss):.1f}" for i, loss in enumerate(row["curve"], 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return [*parts, text((LEFT + WIDTH) / 2, bottom + 36, unit, "middle", fill="#444")]


def draw_depths(result: Mapping[str, Any], target: Path) -> Path:
    """Losses of PipeDream beside a pipeline with a flush."""
    rows = result["depths"]

    def body(top: float) -> tuple[list[str], float]:
        squares, top = legend({row["strategy"]: colour for row, colour in zip(rows, COLOURS, strict=False)}, top)
        parts = _panel(rows, lambda row, point: point * strategies.WINDOW, "minibatch", top)
        return [*squares, *parts], top + HEIGHT + 2 * LINE

    note = "Training loss of a byte GPT of 8 layers, nats/byte: the mean of each ten minibatches and of all seeds."
    return document(target, result, note, body)


def draw_curves(result: Mapping[str, Any], target: Path) -> Path:
    """Losses over samples, and over bytes."""
    rows, per = result["strategies"], strategies.WINDOW
    longest = sorted(row["bytes"] for row in rows)[-2]  # the bytes of all strategies but the one that sends most

    def body(top: float) -> tuple[list[str], float]:
        squares, top = legend({row["strategy"]: colour for row, colour in zip(rows, COLOURS, strict=False)}, top)
        parts = [*squares, text(10, top + 8, "at as many samples", font_weight="bold")]
        parts += _panel(rows, lambda row, point: point * per, "step", top + 20)
        top += HEIGHT + 84
        parts.append(text(10, top - 10, "at as many bytes", font_weight="bold"))
        cut = []
        for row in rows:
            points = max(2, int(min(1.0, longest / row["bytes"]) * len(row["curve"])))
            cut.append({**row, "curve": row["curve"][:points]})
        parts += _panel(cut, lambda row, point: point * per * row["bytes"] / 1e6, "MB that all ranks have sent", top)
        return parts, top + HEIGHT + 2 * LINE

    note = (
        "Training loss, nats/byte: the mean of each ten steps and of all seeds. 4 ranks, 8 samples of 64 bytes a step."
    )
    return document(target, result, note, body)

"""The executed pipeline schedule as a picture: recorded actions to SVG and to Chrome/Perfetto JSON, and its bubble.

Belongs here: everything that is made of recorded actions. bubbles.py says what the bubble should be.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tpformer.parallel import SCHEDULES, Action
from tpformer.processes.files import make_folder, replace_file

from .bubbles import RATIOS, Step, bubble_ratio, schedule_order, simulate

KINDS = {  # kind -> what it is, colour
    "F": ("forward", "#4e79a7"),
    "B": ("backward", "#59a14f"),
    "I": ("input gradients", "#e08a3c"),
    "W": ("weight gradients", "#b07aa1"),
    "R": ("gradient reduction", "#79706e"),
}
COMPUTE = "FBIW"
BUBBLE = "url(#bubble)"
PATTERN = (
    '<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#fdeceb"/><rect width="2" height="6" fill="#f3a6a3"/></pattern></defs>'
)
STYLE = """<style>
.timeline .page { fill: #ffffff } .timeline text { fill: #1f2328 } .timeline .soft { fill: #57606a }
@media (prefers-color-scheme: dark) {
.timeline .page { fill: #0d1117 } .timeline text { fill: #e6edf3 } .timeline .soft { fill: #9da7b3 } }
.timeline .on { fill: #1f2328 } .timeline .in { fill: #ffffff }
</style>"""
LEFT, RIGHT, LANE, GAP = 58, 18, 30, 6  # pixels
WIDTH, BANDS = 560, 10  # pixels of a lane, which a phone scrolls; the most bands of a step
LEGEND = 350  # pixels of a line of the legend
LETTERS, TITLE = 64, 52  # letters in a line of text, and of the title: a phone shows these without scrolling
SHORT = 17  # pixels: bands are added until three quarters of the boxes are at least this wide
MARGIN, DIGIT = 2, 7  # pixels that a number in a box needs: around it, and for each digit
PALER = 0.55  # how far a rank's last stage is faded from the first one's colour to white


def bubble_share(actions: Iterable[Action], ranks: int) -> float:
    """Idle share of the pipeline: 1 - busy / (ranks * span), in [0, 1).

    busy: the seconds of F, B, I and W, added up over all ranks. span: from the first start to the last end of these on
    any rank, so a rank is idle before its first and after its last action, too. Gradient reductions (R) count as idle.
    The usual (p-1)/m is another ratio, idle time to busy time, which is share / (1 - share).
    """
    computed = [action for action in actions if action.kind in COMPUTE]
    span = max(action.end for action in computed) - min(action.start for action in computed)
    return 1 - sum(action.end - action.start for action in computed) / (ranks * span)


def write_trace(actions: Sequence[Action], path: Path) -> None:
    """Write Chrome's trace format, for https://ui.perfetto.dev. Ranks are its processes, stages its threads."""
    origin = min(action.start for action in actions)
    events: list[dict] = []
    for rank, stage in sorted({(action.rank, action.stage) for action in actions}):
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "tid": stage, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": stage, "args": {"name": f"stage {stage}"}},
        ]
    for action in sorted(actions, key=lambda action: action.start):
        events.append(
            {
                "ph": "X",
                "name": _label(action),
                "cat": KINDS[action.kind][0],
                "pid": action.rank,
                "tid": action.stage,
                "ts": round((action.start - origin) * 1e6, 3),
                "dur": round((action.end - action.start) * 1e6, 3),
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
        )
    replace_file(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def write_svg(actions: Sequence[Action], path: Path, title: str, formula: str) -> None:
    """Write timeline_svg of measured actions to a file."""
    replace_file(path, timeline_svg(actions, title, formula))


def timeline_svg(
    actions: Sequence[Action], title: str, formula: str, word: str = "measured", most_bands: int = BANDS
) -> str:
    """A picture with a lane for each rank, and a box for each action, which shows its microbatch. Boxes of later stages
    are paler.

    A step of many actions is drawn in several bands, each of which continues the one above it.
    title: the first line. formula: what the bubble should be, shown below what it was. It may have several lines.
    word: how the actions' times were found, measured or predicted. most_bands: beyond them boxes get narrower.
    """
    ranks = sorted({action.rank for action in actions})
    origin, end = min(action.start for action in actions), max(action.end for action in actions)
    short = statistics.quantiles((action.end - action.start for action in actions if action.kind in COMPUTE), n=4)[0]
    bands = min(
        most_bands, max(1, math.ceil(SHORT * (end - origin) / short / WIDTH - 0.25))
    )  # up to a quarter of a band is squeezed in
    span = (end - origin) / bands
    share = bubble_share(actions, len(ranks))
    lines = [f"bubble {word}: {share:.1%} of ranks' time, {share / (1 - share):.3f} of computing time"]
    lines = [part for line in (*lines, *formula.split("\n")) for part in textwrap.wrap(line, LETTERS) or [""]]
    titles = textwrap.wrap(title, TITLE) or [""]
    parts = [svg_text(10, 24 + 19 * index, line, font_size=13, font_weight="bold") for index, line in enumerate(titles)]
    top = 25 + 19 * len(titles)
    parts += [svg_text(10, top + 17 * index, line) for index, line in enumerate(lines)]
    visible = [action.kind for action in actions if (action.end - action.start) * WIDTH > span]
    legend, y = _legend(visible, top + 17 * len(lines))
    parts += legend
    for start in (origin + span * band for band in range(bands)):
        for rank in ranks:
            parts.append(svg_text(LEFT - 8, y + LANE / 2 + 4, f"rank {rank}", "end"))
            parts += _lane([action for action in actions if action.rank == rank], y, origin, start, span)
            y += LANE + GAP
        parts += _axis(y, start - origin, span)
        y += 36
    size = f'width="{LEFT + WIDTH + RIGHT}" height="{y:.0f}"'
    box = f'viewBox="0 0 {LEFT + WIDTH + RIGHT} {y:.0f}"'
    font = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="timeline" {size} {box} {font}>'
    return "\n".join([head, STYLE, PATTERN, f'<rect class="page" {size}/>', *parts, "</svg>"]) + "\n"


def svg_text(x: float, y: float, content: str, anchor: str = "start", **attributes: object) -> str:
    """A line of text in SVG. attributes: others of the element, with _ for -."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(content)}</text>'


def _box(x: float, y: float, width: float, colour: str, title: str, **attributes: object) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    size = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{LANE}" fill="{colour}"'
    return f"<rect {size}{more}><title>{escape(title)}</title></rect>"


def _paler(colour: str, share: float) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02x}" for channel in channels)


def _light(colour: str) -> bool:
    """Whether dark text on this colour is easier to read than white text."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 120


def _label(action: Action) -> str:
    return f"{action.kind}{action.microbatch}" if action.kind in COMPUTE else action.kind


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _legend(kinds: Sequence[str], y: float) -> tuple[list[str], float]:
    """(the legend of colours and numbers, the y below it)."""
    entries = [(name, colour) for kind, (name, colour) in KINDS.items() if kind in kinds] + [("bubble", BUBBLE)]
    parts, x = [], 10.0
    for name, colour in entries:
        if x + 25 + 6.5 * len(name) > LEGEND:
            x, y = 10.0, y + 20
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="14" height="14" fill="{colour}"/>')
        parts.append(svg_text(x + 19, y + 2, name))
        x += 38 + 6.5 * len(name)
    note = "numbers: microbatches; paler boxes: a rank's later stages"
    return [*parts, svg_text(10, y + 22, note, **{"class": "soft"})], y + 36


def _lane(actions: list[Action], y: float, origin: float, start: float, span: float) -> list[str]:
    """A rank's boxes in the `span` seconds from `start` on, drawn over a bubble as long as the lane."""

    def x(time: float) -> float:
        return LEFT + min(max(time - start, 0.0), span) * WIDTH / span

    parts = [_box(LEFT, y, WIDTH, BUBBLE, "bubble")]
    stages = sorted({action.stage for action in actions})
    for action in (each for each in actions if each.end > start and each.start < start + span):
        paler = PALER * stages.index(action.stage) / max(1, len(stages) - 1)
        what = f"{KINDS[action.kind][0]}, stage {action.stage}"
        if action.kind in COMPUTE:
            what += f", microbatch {action.microbatch}"
        what += f": {_milliseconds(action.end - action.start)} from {_milliseconds(action.start - origin)} on"
        left, right = x(action.start), x(action.end)
        colour = _paler(KINDS[action.kind][1], paler)
        parts.append(
            _box(
                left, y, right - left, colour, what, stroke="white", stroke_width=round(min(0.7, (right - left) / 8), 2)
            )
        )
        number = str(action.microbatch)
        if action.kind in COMPUTE and right - left >= MARGIN + DIGIT * len(number):
            kind = {"class": "on" if _light(colour) else "in"}
            parts.append(svg_text((left + right) / 2, y + LANE / 2 + 4, number, "middle", font_size=11, **kind))
    return parts


def _axis(y: float, start: float, span: float) -> list[str]:
    """Times below the lanes, at least 70 pixels apart. start: seconds from the step's first start to this band."""
    least = span * 70 / WIDTH
    power = 10 ** math.floor(math.log10(least))
    tick = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    unit, name = (1.0, "s") if tick >= 0.1 else (1e-3, "ms")
    parts = []
    for index in range(math.ceil(start / tick - 1e-9), int((start + span) / tick + 1e-9) + 1):
        x = LEFT + (index * tick - start) * WIDTH / span
        parts.append(f'<path d="M{x:.1f} {y:.0f}v5" stroke="#666"/>')
        label = f"{index * tick / unit:g} {name}"
        parts.append(svg_text(x, y + 19, label, "middle", font_size=11, **{"class": "soft"}))
    return parts


def bubble_lines(actions: Sequence[Action], schedule: str, n_microbatches: int) -> str:
    """Two lines on what a recorded step's bubble should be: by the closed form, and if communication took no time.

    actions: those of all ranks of one pipeline in one step. ValueError if they are not exactly this schedule's.
    """
    ranks = 1 + max(action.rank for action in actions)
    per_rank = len({action.stage for action in actions}) // ranks
    ratio = bubble_ratio(schedule, ranks, n_microbatches, per_rank)
    equal = "equal stages and F = I = W" if SCHEDULES[schedule].splits_backward else "equal stages"
    first = f"formula for {equal}: {RATIOS[schedule]}"
    sizes = f"p = {ranks} ranks, m = {n_microbatches} microbatches"
    sizes += f", v = {per_rank} stages on a rank" if per_rank > 1 else ""
    if ratio is None:
        first += f" does not hold for {sizes}"
    else:
        first += f" = {ratio:.3f} of the computing time, {ratio / (1 + ratio):.1%} of the whole ({sizes})"
    order = schedule_order(schedule, ranks, n_microbatches, per_rank)
    seconds = {Step(a.stage, a.kind, a.microbatch): a.end - a.start for a in actions if a.kind in COMPUTE}
    steps = {step for rank in order for together in rank for step in together}
    recorded = sum(action.kind in COMPUTE for action in actions)
    if steps != seconds.keys() or recorded != len(steps):
        raise ValueError(
            f"{schedule} on {ranks} ranks with {n_microbatches} microbatches has {len(steps)} actions. The record has "
            f"{recorded}, {len(steps & seconds.keys())} of them the schedule's: record one whole step on every rank"
        )
    share = bubble_share(simulate(order, seconds.__getitem__), ranks)
    return f"{first}\nthese actions in this order, if communication took no time: {share:.1%}"


def draw_timeline(actions: Sequence[Action], directory: Path, schedule: str, n_microbatches: int) -> None:
    """Write pipeline.svg and pipeline.json of one recorded step into `directory`, which is made if it is missing.

    actions: those of all ranks of one pipeline on one clock (tpformer.parallel.gather_actions). Errors: describe's.
    """
    make_folder(directory)
    ranks = 1 + max(action.rank for action in actions)
    title = f"{schedule}: {ranks} pipeline ranks, {n_microbatches} microbatches"
    write_svg(actions, directory / "pipeline.svg", title, bubble_lines(actions, schedule, n_microbatches))
    write_trace(actions, directory / "pipeline.json")

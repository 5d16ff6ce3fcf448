"""The planner's report as one HTML page: tables, memory bars, the best layout's timeline, frontier and sensitivity.

Belongs here: the page and its pictures, which are SVG within it. It needs no network, and no script.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from .layouts import layout_text
from .plan_report import ITEMS, cost_of, shares, why
from .report import size
from .search import Choice, Question, model_of, search
from .timeline import svg_text, timeline_svg

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#bab0ac", "#79706e")
WIDTH, ROW = 560, 34  # of a picture, in units that the page scales to its width
SHOWN_ROUNDS = 2  # microbatches of a timeline, in rounds of as many as pipeline ranks
SHOWN_RANKS = 16  # the most pipeline ranks of which a timeline is drawn
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto; max-width: 60rem;
  padding: 0 1rem 3rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 0.85rem }
td, th { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
td:first-child, th:first-child { text-align: left; white-space: normal; min-width: 13rem; overflow-wrap: anywhere }
svg { width: 100%; height: auto; max-width: 44rem; display: block } .note { color: #555; font-size: 0.85rem }
"""


def page(question: Question, choices: Sequence[Choice], tokens: float) -> str:
    """The whole page. choices: fastest first. tokens: of the training."""
    title = f"Layouts for {question.gpus} x {question.device.name}"
    sections = [
        ("The fastest layouts", _choices_table(question, choices, tokens)),
        (
            "Where a step's time goes",
            bars([(_short(c), list(shares(c.step).values())) for c in choices], [*ITEMS.values()]),
        ),
        ("Memory of the fullest rank", _memory(question, choices)),
        ("The best layout's pipeline", _timeline(question, choices[0])),
        ("Frontier: speed and memory", frontier(choices)),
        ("If the link, the network or the GPU were slower or faster", _sensitivity(question)),
    ]
    body = "".join(f"<h2>{escape(name)}</h2>\n{content}\n" for name, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n<p>{escape(why(choices))}</p>\n"
        f'<p class="note">All figures are predictions of models of time and memory.</p>\n{body}</body></html>\n'
    )


def _short(choice: Choice) -> str:
    return layout_text(choice.config).replace(",offload=none", "").replace(",recompute=none", "")


def _choices_table(question: Question, choices: Sequence[Choice], tokens: float) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("layout", "tokens/s", "MFU", "step", "memory", "days"))
    rows = ""
    for choice in choices:
        cells = (
            layout_text(choice.config), f"{choice.tokens:,.0f}", f"{choice.mfu:.1%}", f"{choice.step.seconds:.2f} s",
            size(choice.memory.total), f"{cost_of(choice, question, tokens).days:,.1f}",
        )  # fmt: skip
        rows += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>\n"
    return f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>'


def _svg(height: float, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
    )


def _legend(names: Sequence[str], y: float) -> tuple[list[str], float]:
    parts, x = [], 0.0
    for name, colour in zip(names, COLOURS, strict=False):
        if x + 30 + 6.5 * len(name) > WIDTH:
            x, y = 0.0, y + 18
        parts.append(f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>')
        parts.append(svg_text(x + 16, y, name))
        x += 32 + 6.5 * len(name)
    return parts, y + 16


def bars(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], limit: float | None = None) -> str:
    """A bar for each row, of one part for each name. limit: where a line is drawn."""
    most = max([sum(values) for _, values in rows] + [limit or 0.0])
    parts, y = _legend(names, 12)
    for label, values in rows:
        parts.append(svg_text(0, y + 8, label))
        x = 0.0
        for value, name, colour in zip(values, names, COLOURS, strict=False):
            width = WIDTH * value / most
            title = f"<title>{escape(name)}: {value:.3g}</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 12:.0f}" width="{width:.1f}" height="12" fill="{colour}">{title}</rect>'
            )
            x += width
        y += ROW
    if limit is not None:
        x = WIDTH * limit / most
        parts.append(f'<path d="M{x:.1f} 20V{y:.0f}" stroke="#222" stroke-dasharray="4 3"/>')
    return _svg(y + 4, parts)


def _memory(question: Question, choices: Sequence[Choice]) -> str:
    names = list(dict.fromkeys(name for choice in choices for name, _ in choice.memory.parts))
    rows = []
    for choice in choices:
        held = dict(choice.memory.parts)
        values = [held.get(name, 0.0) / 1e9 for name in names]
        rows.append((f"{_short(choice)}: {size(choice.memory.total)}", values))
    note = (
        f"GB. The dashed line: {size(question.room)}, what context and margin leave of {size(question.device.memory)}."
    )
    return bars(rows, [name.strip(" *") for name in names], question.room / 1e9) + f'<p class="note">{note}</p>'


def _timeline(question: Question, choice: Choice) -> str:
    layout = choice.config.parallel
    if layout.pipeline_parallel == 1:
        return "<p>It has no pipeline.</p>"
    if layout.pipeline_parallel > SHOWN_RANKS:
        return f"<p>It has {layout.pipeline_parallel} pipeline ranks, too many to draw.</p>"
    n = min(choice.config.n_microbatches, SHOWN_ROUNDS * layout.pipeline_parallel)
    actions = model_of(question, choice.config).timeline(n)
    note = f"predicted; {n} of a step's {choice.config.n_microbatches} microbatches"
    return timeline_svg(actions, layout.pipeline_schedule, note, word="predicted")


def frontier(choices: Sequence[Choice]) -> str:
    """A point for each layout by its memory and speed; the line joins those that nobody beats in both."""
    x_of = [choice.memory.total / 1e9 for choice in choices]
    y_of = [choice.tokens for choice in choices]
    left, right, low, high = 0.95 * min(x_of), 1.05 * max(x_of), 0.98 * min(y_of), 1.01 * max(y_of)
    height = 260

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + (WIDTH - 80) * (x - left) / (right - left), 20 + (height - 60) * (high - y) / (high - low)

    parts, line, fastest = [], [], 0.0
    for x, y, choice in sorted(zip(x_of, y_of, choices, strict=True), key=lambda each: each[:2]):
        px, py = place(x, y)
        if y > fastest:
            fastest = y
            line.append(f"{px:.1f} {py:.1f}")
        title = f"<title>{escape(layout_text(choice.config))}</title>"
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="5" fill="#4e79a7">{title}</circle>')
    parts.insert(0, f'<path d="M{" L".join(line)}" fill="none" stroke="#f28e2b" stroke-width="2"/>')
    parts += [
        svg_text(60, height - 20, f"{min(x_of):.1f} GB"),
        svg_text(WIDTH - 10, height - 20, f"{max(x_of):.1f} GB", "end"),
    ]
    parts += [svg_text(0, 24, f"{max(y_of):,.0f}"), svg_text(0, height - 40, f"{min(y_of):,.0f}")]
    parts.append(svg_text(WIDTH / 2, height - 4, "memory of the fullest rank; up: tokens/s", "middle"))
    return _svg(height, parts)


def _sensitivity(question: Question) -> str:
    device, machine = question.device, question.device.machine
    rows = ""
    for name, change in (
        ("links within a node", lambda f: dataclasses.replace(device, machine=machine._replace(link=f * machine.link))),
        ("network", lambda f: dataclasses.replace(device, network=f * device.network)),
        ("FLOP/s", device.scaled),
    ):
        cells = ""
        for factor in FACTORS:
            found = search(question._replace(device=change(factor)), 1).choices
            text = f"{found[0].tokens:,.0f}<br>{escape(_short(found[0]))}" if found else "nothing fits"
            cells += f"<td>{text}</td>"
        rows += f"<tr><td>{name}</td>{cells}</tr>"
    head = "".join(f"<th>x {factor:g}</th>" for factor in FACTORS)
    note = '<p class="note">Tokens/s of the layout that is then the best.</p>'
    return f'<div class="wide"><table><tr><th>times the rate of</th>{head}</tr>{rows}</table></div>{note}'

"""The planner's report as one HTML page: tables, bars, the best layout's timeline, frontier and sensitivity.

Belongs here: the page and its pictures. Text is as large on a phone as elsewhere, because bars are boxes and the
frontier's places are percentages; the timeline scrolls. The page needs no network, and no script.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise

from .candidates import Question
from .layouts import layout_text
from .plan_report import ITEMS, assumed, count_text, mfu_name, parts, why
from .report import size
from .search import Choice, model_of, search
from .timeline import timeline_svg

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#bab0ac", "#79706e")
SHOWN_ROUNDS = 3  # microbatches of a timeline, in rounds of as many as pipeline ranks
SHOWN_RANKS = 8  # the most pipeline ranks of which a timeline is drawn
SHOWN_BANDS = 4  # in which a timeline goes on below
LEAST_SHOWN = 4  # microbatches, where there are so many
VISIBLE = 1e-4  # of a bar's width: smaller parts are not drawn
FACTORS = (0.5, 0.75, 1.5, 2.0)
STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #57606a; --line: #d0d7de; --page: #ffffff; --track: #eaeef2;
  --point: #2f6fb3; --best: #b35900 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9da7b3; --line: #30363d; --page: #0d1117;
  --track: #21262d; --point: #4f93dd; --best: #f0a860 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto;
  max-width: 64rem; padding: 0 1rem 3rem }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem }
.note { color: var(--soft); font-size: 0.85rem; margin: 0.5rem 0 } ul { padding-left: 1.2rem }
p, li { overflow-wrap: anywhere } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.85rem; width: 100%; font-variant-numeric: tabular-nums }
td, th { padding: 0.25rem 0 0.25rem 0.5rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top }
td:first-child, th:first-child { text-align: left; white-space: normal; padding-left: 0; min-width: 5rem }
small { color: var(--soft) }
@media (max-width: 40rem) { .layouts tr { display: grid; grid-template-columns: repeat(4, 1fr) }
  .layouts td:first-child, .layouts th:first-child { grid-column: 1 / -1; border: 0; padding-top: 0.5rem } }
.bar { display: flex; justify-content: space-between; gap: 1rem; font-size: 0.85rem; margin-top: 0.55rem;
  line-height: 1.3 } .bar :last-child { white-space: nowrap }
.track { display: flex; background: var(--track); height: 0.9rem; margin-top: 0.15rem }
.track i { box-sizing: border-box; border-right: 1px solid var(--page) }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1.1rem; font-size: 0.85rem; margin: 0.4rem 0 }
.legend i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em }
.plot { padding: 1.6rem 1.2rem 2.6rem 4.4rem; font-size: 0.8rem } .plot svg { width: 100%; height: 17rem;
  overflow: visible; display: block } .plot text { fill: var(--soft) } .plot .grid { stroke: var(--line) }
.plot .edge { stroke: var(--best); stroke-width: 2 } .plot circle { fill: var(--point); stroke: var(--page) }
.plot .best { fill: var(--best) } .plot .number { fill: var(--page); font-weight: 600; font-size: 0.7rem }
.timeline { display: block; width: 100%; min-width: 636px; max-width: 46rem; height: auto }
"""


def page(question: Question, choices: Sequence[Choice], tokens: float, price: float | None = None) -> str:
    """The whole page. choices: fastest first. tokens: of the training. price: of one GPU for an hour."""
    model, device = question.config.model, question.device
    parameters = f"{count_text(model.n_parameters)} parameters"
    if model.n_experts is not None:
        parameters += f" ({count_text(model.n_active_parameters)} active)"
    title = f"Layouts of {model.preset or parameters} on {question.gpus} x {device.name}: predicted"
    asked = (
        f"All figures are predictions of models of time and memory, for {parameters}, "
        f"{assumed(question)}, and nodes of {device.gpus_per_node} GPUs with {size(device.memory)} each."
    )
    sections = {
        "Layouts, fastest first": _choices_table(question, choices),
        "Where a step's time goes": _step(choices),
        "Memory of the fullest rank": _memory(question, choices),
        "Timeline of the first layout's step": _timeline(question, choices[0]),
        "Frontier: speed and memory": frontier(choices),
        "If the links, the network or the GPU were slower or faster": _sensitivity(question, choices),
    }
    for heading, lines in parts(choices[0], question, tokens, price).items():
        sections[heading] = "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><h1>{escape(title)}</h1>\n<p>{_breakable(why(choices))}</p>\n{_note(asked)}\n{body}</body></html>\n"
    )


def _breakable(text: str) -> str:
    """HTML in which a line may end after each comma of a layout."""
    return escape(text).replace(",", ",<wbr>")


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _choices_table(question: Question, choices: Sequence[Choice]) -> str:
    names = "layout", "tokens/s", mfu_name(question), "step", "memory"
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = ""
    for number, choice in enumerate(choices, 1):
        cells = f"{choice.tokens:,.0f}", f"{choice.mfu:.1%}", f"{choice.step.seconds:.2f} s", size(choice.memory.total)
        rows += f"<tr><td>{number}. {_breakable(layout_text(choice.config))}</td>"
        rows += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    return f'<div class="wide"><table class="layouts"><tr>{head}</tr>\n{rows}</table></div>'


def bars(
    choices: Sequence[Choice], rows: Sequence[Mapping[str, float]], whole: float, text: Callable[[float], str]
) -> str:
    """A bar for each layout, of {part: value}, and a legend with the first one's values. whole: of the bars' width."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value > VISIBLE * whole))
    colour = dict(zip(names, COLOURS, strict=False))
    legend = "".join(
        f'<span><i style="background:{colour[name]}"></i>{escape(name)} {text(rows[0].get(name, 0.0))}</span>'
        for name in names
    )
    found = [f'<div class="legend">{legend}</div>{_note("The legend has the values of layout 1.")}']
    for number, (choice, row) in enumerate(zip(choices, rows, strict=True), 1):
        label = f"<span>{number}. {_breakable(layout_text(choice.config))}</span><span>{text(sum(row.values()))}</span>"
        held = "".join(
            f'<i style="width:{100 * row[name] / whole:.2f}%;background:{colour[name]}"'
            f' title="{escape(name)}: {text(row[name])}"></i>'
            for name in names
            if row.get(name)
        )
        found.append(f'<div class="bar">{label}</div><div class="track">{held}</div>')
    return "\n".join(found)


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _step(choices: Sequence[Choice]) -> str:
    rows = [{name: getattr(choice.step, item) for item, name in ITEMS.items()} for choice in choices]
    return bars(choices, rows, max(choice.step.seconds for choice in choices), _seconds)


def _memory(question: Question, choices: Sequence[Choice]) -> str:
    rows = [{name.strip(" *"): nbytes for name, nbytes in choice.memory.parts} for choice in choices]
    note = f"The whole width is {size(question.room)}, what context and margin leave of {size(question.device.memory)}."
    return bars(choices, rows, question.room, size) + _note(note)


def _timeline(question: Question, choice: Choice) -> str:
    layout, m = choice.config.parallel, choice.config.n_microbatches
    p = layout.pipeline_parallel
    n = min(m, max(LEAST_SHOWN, SHOWN_ROUNDS * p))
    actions = model_of(question, choice.config).timeline(n)
    note = "all microbatches of a step" if n == m else f"{n} of a step's {m} microbatches"
    note += ": the whole has less bubble" if p > 1 and n < m else ""
    if p > SHOWN_RANKS:
        shown = {round(index * (p - 1) / (SHOWN_RANKS - 1)) for index in range(SHOWN_RANKS)}
        actions = [action for action in actions if action.rank in shown]
        note += f"\n{len(shown)} of {p} pipeline ranks"
    after = ", ".join(f"{ITEMS[name]} {_seconds(getattr(choice.step, name))}" for name in ("dp", "optimizer"))
    note += f"\nnot drawn at the end: {after}"
    title = layout.pipeline_schedule if p > 1 else "one pipeline rank"
    return f'<div class="wide">{timeline_svg(actions, title, note, "predicted", SHOWN_BANDS)}</div>'


def _ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers between low and high."""
    power = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(factor * power for factor in (5, 2, 1) if factor * power <= (high - low) / 3)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def frontier(choices: Sequence[Choice]) -> str:
    """A point for each layout by its memory and speed; the line joins those that nobody beats in both."""
    x_of = [choice.memory.total / 1e9 for choice in choices]
    y_of = [choice.tokens for choice in choices]
    left, right, low, high = 0.95 * min(x_of), 1.05 * max(x_of), 0.998 * min(y_of), 1.002 * max(y_of)

    def place(x: float, y: float) -> tuple[str, str]:
        return f"{100 * (x - left) / (right - left):.2f}%", f"{100 * (high - y) / (high - low):.2f}%"

    drawn = []
    for x in _ticks(left, right):
        at = place(x, low)[0]
        drawn.append(f'<line class="grid" x1="{at}" y1="0" x2="{at}" y2="100%"/>')
        drawn.append(f'<text x="{at}" y="100%" dy="1.4em" text-anchor="middle">{x:g}</text>')
    for y in _ticks(low, high):
        at = place(left, y)[1]
        drawn.append(f'<line class="grid" x1="0" y1="{at}" x2="100%" y2="{at}"/>')
        drawn.append(f'<text x="0" y="{at}" dx="-0.5em" dy="0.35em" text-anchor="end">{y:,.0f}</text>')
    drawn.append('<text x="50%" y="100%" dy="2.8em" text-anchor="middle">GB of the fullest rank</text>')
    drawn.append('<text x="0" y="0" dx="-0.5em" dy="-0.8em" text-anchor="end">tokens/s</text>')
    edge: list[int] = []
    for index in sorted(range(len(choices)), key=lambda i: (x_of[i], -y_of[i])):
        if not edge or y_of[index] > y_of[edge[-1]]:
            edge.append(index)
    for one, other in pairwise(edge):
        (x1, y1), (x2, y2) = place(x_of[one], y_of[one]), place(x_of[other], y_of[other])
        drawn.append(f'<line class="edge" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
    for index in reversed(range(len(choices))):
        cx, cy = place(x_of[index], y_of[index])
        title = f"<title>{escape(layout_text(choices[index].config))}</title>"
        kind = ' class="best"' if index in edge else ""
        drawn.append(f'<circle{kind} cx="{cx}" cy="{cy}" r="9">{title}</circle>')
        drawn.append(f'<text class="number" x="{cx}" y="{cy}" dy="0.35em" text-anchor="middle">{index + 1}</text>')
    note = "Numbers are layouts; none of them is both faster and smaller than an orange one."
    return f'<div class="plot"><svg role="img" aria-label="speed and memory">{"".join(drawn)}</svg></div>{_note(note)}'


def _sensitivity(question: Question, choices: Sequence[Choice]) -> str:
    device, machine = question.device, question.device.machine
    numbers = {choice.key[1]: str(number) for number, choice in enumerate(choices, 1)}
    rows, others = "", dict[str, str]()
    for name, change in (
        ("links in a node", lambda f: dataclasses.replace(device, machine=machine._replace(link=f * machine.link))),
        ("network", lambda f: dataclasses.replace(device, network=f * device.network)),
        ("GPU's FLOP/s", device.scaled),
    ):
        cells = ""
        for factor in FACTORS:
            for best in search(question._replace(device=change(factor)), 1).choices:
                text = best.key[1]
                if text not in numbers:
                    others[text] = numbers[text] = "ABCDEFGHIJKL"[len(others)]
                change_of = round(best.tokens / choices[0].tokens - 1, 3) + 0.0  # no -0.0
                cells += f"<td>{change_of:+.1%}<br><small>layout {numbers[text]}</small></td>"
        rows += f"<tr><td>{name}</td>{cells}</tr>"
    head = "".join(f"<th>x {factor:g}</th>" for factor in FACTORS)
    notes = ["Tokens/s against layout 1 as it is, and the layout that is then the best."]
    notes += [f"{letter}: {text}" for text, letter in others.items()]
    table = f'<div class="wide"><table><tr><th>rate of</th>{head}</tr>{rows}</table></div>'
    return table + "".join(f'<p class="note">{_breakable(note)}</p>' for note in notes)

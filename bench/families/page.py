"""docs/families.md and the picture, made from the results file.

Belongs here: the columns of the matrix, and what a reader is shown of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.bars import legend, paragraph
from harness.plot import LINE, TOP, WIDTH, text, write_document
from harness.provenance import ROOT

from .cells import PLAIN, RIGHT, SEQUENCE, THEIRS, VERDICTS

PAGE = ROOT / "docs" / "families.md"
# column -> (a way of cells.WAYS, ranks)
COLUMNS = {
    "tp 2": (PLAIN, 2),
    "tp 2, sequence parallel": (SEQUENCE, 2),
    "tp 4": (PLAIN, 4),
    "tp 4, sequence parallel": (SEQUENCE, 4),
    "transformers, tp 2": (THEIRS, 2),
    "transformers, tp 4": (THEIRS, 4),
}
NOTE = (
    "Each cell: forward, every gradient, three steps of AdamW, save_pretrained and loading in one process, of a tiny "
    "random model in float64 on CPU processes. right: all within 1e-9 of the largest value of each tensor of one "
    "process. divided: share of the parameters that a rank has only a part of."
)
COLOURS = dict(zip(VERDICTS, ("#59a14f", "#bab0ac", "#edc948", "#e15759", "#b07aa1"), strict=True))
INTRODUCTION = """# Families of transformers, parallelized in place

`tpformer.parallelize(model, mesh)` on tiny random models of transformers {version}, beside transformers' own tensor
parallelism, which is `from_pretrained(..., distributed_config=DistributedConfig(tp_size=N, tp_plan="auto"))`.

- `right` means that four things are those of the model in one process, within 1e-9 of the largest value of each
  tensor: the forward, every gradient, the parameters after three steps of AdamW, and what `save_pretrained` wrote and
  one process loaded again. All is float64, also where transformers' models ask for float32.
- `refused` means that an error says before any step why this cannot be done, in the sentence of the note.
- `wrong` means a result that is not that of one process, and nobody said so. `error` means that it ended with an
  exception. `no plan` means that transformers has no plan for this family.
- The percentage is the share of the parameters that the ranks divide; the others are whole on every rank. With sequence
  parallelism it is the share of the row-parallel linears whose result is a shard of the sequence on each rank. A
  share of 0 is left out.

`python -m bench families` runs all of it, and writes this page.
"""


def cell_text(cell: Mapping[str, Any], notes: dict[str, int]) -> str:
    """A verdict, its share, and the number of its note, which is added to `notes` if it is new."""
    number = f" [{notes.setdefault(cell['reason'], len(notes) + 1)}]" if cell["reason"] else ""
    share = f" {cell['share']:.0%}" if cell["share"] else ""
    return f"{cell['verdict'].lower()}{share if cell['verdict'] == RIGHT else ''}{number}"


def page(path: Path) -> str:
    """The text of docs/families.md, from a results file."""
    result = json.loads(path.read_text())
    notes: dict[str, int] = {}
    lines = [INTRODUCTION.format(version=result["transformers"])]
    lines += ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    group = None
    for row in result["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines.append(f"| **{group}** " + "| " * len(COLUMNS) + "|")
        cells = (cell_text(row["cells"][column], notes) for column in COLUMNS)
        lines.append(f"| {row['family']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- [{number}] {reason}" for reason, number in notes.items()), ""])


def draw(path: Path) -> Path:
    """A square for each cell."""
    result = json.loads(path.read_text())
    parts, y = paragraph(NOTE, TOP - 8)
    squares, y = legend(COLOURS, y + 8)
    parts += squares
    x = {column: 130 + 78 * index for index, column in enumerate(COLUMNS)}
    for column, left in x.items():
        for index, word in enumerate(column.split(", ")):
            parts.append(text(left, y + 14 * index, word, fill="#444"))
    y += 2 * LINE
    for row in result["rows"]:
        parts.append(text(10, y, row["family"]))
        for column, left in x.items():
            colour = COLOURS[row["cells"][column]["verdict"]]
            parts.append(f'<rect x="{left}" y="{y - 12:.0f}" width="70" height="15" fill="{colour}"/>')
        y += LINE
    return write_document(path.with_suffix(".svg"), result, "", WIDTH, y, parts)

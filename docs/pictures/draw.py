"""Draws the two pictures of README.md: block.svg, where the tensors of a block live, and memory.svg, what it keeps.

`python docs/pictures/draw.py` writes both; tests/test_docs.py compares the committed pictures with what it draws.
They are drawn for a phone: their 400 units are about 360 pixels there, and text of 13 units is over 11 pixels high.
"""

import json
from html import escape
from pathlib import Path

MEMORY = Path(__file__).parents[2] / "bench/results/cpu/memory.json"
WIDTH, MARGIN = 400, 12
RANKS = 4
COLUMN = (WIDTH - 2 * MARGIN) / RANKS
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 }
  .name { font-weight: 600 }
  .soft { fill: #57606a }
  .middle { text-anchor: middle }
  .right { text-anchor: end }
  .kernel { fill: #f1f4f8; stroke: #b6c0cc }
  .whole { fill: #ffffff; stroke: #8c959f }
  .held { stroke: none }
  .both { fill: #8c959f }
  .r0 { fill: #2f6fb3 } .r1 { fill: #d9822b } .r2 { fill: #2e9b6b } .r3 { fill: #b0529b }
  .line { stroke: #8c959f; stroke-width: 1.5; fill: none }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #30363d }
    text { fill: #e6edf3 }
    .soft { fill: #9da7b3 }
    .kernel { fill: #1b222c; stroke: #465160 }
    .whole { fill: #0d1117; stroke: #7d8590 }
    .both { fill: #8b949e }
    .r0 { fill: #4f93dd } .r1 { fill: #e99b4a } .r2 { fill: #3fb37f } .r3 { fill: #cb74b8 }
  }
"""


class Drawing:
    """SVG elements, and the height down to which they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0.0

    def rect(self, kind: str, x: float, y: float, width: float, height: float, radius: float = 0) -> None:
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect class="{kind}" {size} rx="{radius:g}"/>')

    def text(self, kind: str, x: float, y: float, words: str) -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def arrow(self, x: float, y: float, length: float) -> None:
        self.parts.append(f'<path class="line" d="M{x:g} {y:g}v{length:g}m-4 -4l4 4l4 -4"/>')

    def tensor(self, rank: int, cut: str, x: float, y: float, width: float, height: float) -> None:
        """A matrix's outline and in it what a rank holds: its rows, its columns, or the rows of all ranks."""
        self.rect("whole", x, y, width, height)
        for owner in range(RANKS) if cut == "all" else [rank]:
            if cut == "columns":
                self.rect(f"held r{owner}", x + owner * width / RANKS, y, width / RANKS, height)
            else:
                self.rect(f"held r{owner}", x, y + owner * height / RANKS, width, height / RANKS)

    def row(self, name: str, layout: str, cut: str, *, kept: int = 0, last: bool = False) -> None:
        """A tensor on the four ranks, between two kernels. kept: bytes that wait for the backward."""
        y = self.y
        self.text("name", MARGIN, y + 16, name)
        self.text("soft right", WIDTH - MARGIN, y + 16, layout + (f" · kept: {kept}" if kept else ""))
        for rank in range(RANKS):
            x = MARGIN + rank * COLUMN
            self.tensor(rank, cut, x + 16, y + 24, COLUMN - 32, 30)
            if not last:
                self.arrow(x + COLUMN / 2, y + 57, 13)
        self.y = y + 72

    def kernel(self, name: str, lines: list[str], operands: str = "") -> None:
        """A kernel's name, what it does, and if it is a GEMM what each rank multiplies: "gather" or "scatter"."""
        top = self.y
        height = 12 + 18 * (1 + len(lines)) + (44 if operands else 0)
        self.rect("kernel", MARGIN, top, WIDTH - 2 * MARGIN, height, 7)
        self.text("name", MARGIN + 10, top + 20, name)
        for number, line in enumerate(lines, start=1):
            self.text("", MARGIN + 10, top + 20 + 18 * number, line)
        y = top + height - 42
        for rank in range(RANKS) if operands else []:
            x = MARGIN + rank * COLUMN + COLUMN / 2
            first, second = ("all", "columns") if operands == "gather" else ("columns", "rows")
            self.tensor(rank, first, x - 36, y, 34, 32)
            self.text("middle", x + 4, y + 21, "×")
            self.tensor(rank, second, x + 12, y, 24, 32)
        self.y = top + height
        for rank in range(RANKS):
            self.arrow(MARGIN + rank * COLUMN + COLUMN / 2, self.y + 2, 12)
        self.y += 16

    def legend(self) -> None:
        """Ranks by colour, and how a matrix is drawn."""
        self.text("title", MARGIN, 28, "A transformer block on four ranks")
        for rank in range(RANKS):
            x = MARGIN + rank * COLUMN
            self.rect(f"held r{rank}", x + 20, 42, 13, 13, 2)
            self.text("", x + 38, 53, f"rank {rank}")
        self.text("soft", MARGIN, 78, "A box is a whole matrix, with a token in every line.")
        self.text("soft", MARGIN, 96, "The coloured part of it is what the rank holds.")
        self.y = 110

    def notes(self, lines: list[str]) -> None:
        """Plain lines below what has been drawn."""
        self.y -= 8
        for line in lines:
            self.y += 18
            self.text("soft", MARGIN, self.y, line)

    def svg(self, title: str) -> str:
        """The whole file, with a background of its own, so that it reads on a light and on a dark page."""
        height = self.y + 14
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="440" role="img">'
        card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
        body = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", card, *self.parts]
        return "\n".join([head, *body, "</svg>", ""])


def block() -> str:
    """The forward of one block with sequence parallelism, from the residual stream to the residual stream."""
    drawing = Drawing()
    drawing.legend()
    gather = ["The norm takes own tokens. The product starts on", "own rows while the others' rows arrive."]
    scatter = [
        "A tile goes to its owner as soon as it is computed.",
        "The owner adds up; then bias, dropout, residual.",
    ]
    drawing.row("x, the residual stream", "own tokens", "rows", kept=2)
    drawing.kernel("norm, all-gather + GEMM", gather, "gather")
    drawing.row("q, k, v", "all tokens, own heads", "columns", kept=6)
    drawing.kernel("attention", ["Own heads only: nothing is sent."])
    drawing.row("attention output", "own heads", "columns", kept=2)
    drawing.kernel("GEMM + reduce-scatter", scatter, "scatter")
    drawing.row("x", "own tokens", "rows", kept=2)
    drawing.kernel("norm, all-gather + GEMM", ["As above; the weight is fc1's."])
    drawing.row("MLP hidden", "own features", "columns", kept=8)
    drawing.kernel("activation, GEMM + reduce-scatter", ["As above; the weight is fc2's."])
    drawing.row("x", "own tokens", "rows", last=True)
    drawing.notes(
        [
            "Right of × is the part of the weight that a rank has.",
            "Norm weights and the biases of o_proj and fc2 are",
            "whole on every rank.",
            "kept: bytes that wait for the backward, by token and",
            "hidden unit, shared by the ranks. 20 in all (16 bits).",
            "The backward runs both kernels the other way round.",
        ]
    )
    return drawing.svg("A transformer block on four ranks: where tensors live and what each kernel does")


BARS = [
    ("tpformer", "tpformer, no GEMM done twice", "none"),
    ("tpformer", 'recompute = "mlp": one GEMM more', "mlp"),
    ("tpformer", 'recompute = "full": the forward again', "full"),
    ("others", "PyTorch parallelize_module, TP + SP", "none"),
    ("others", "Megatron's sequence parallelism (formula)", "attention"),
]
MODELS = {"tpformer": "GPT layer", "none": "GPT layer, PyTorch TP+SP", "attention": "GPT layer, Megatron (formula)"}


def memory() -> str:
    """The sums of bench/results/cpu/memory.json for a GPT layer on four tensor-parallel ranks."""
    measured = json.loads(MEMORY.read_text())
    # the formula is the same for any number of ranks, and its rows say 1
    rows = [row for row in measured["rows"] if row["tp"] == RANKS or row["model"] == MODELS["attention"]]
    sums = {(row["model"], row["recompute"]): sum(row["items"].values()) / row["unit"] for row in rows}
    drawing = Drawing()
    drawing.text("title", MARGIN, 28, "Kept for the backward, one GPT layer")
    drawing.text("soft", MARGIN, 48, "Bytes by token and hidden unit, before the division by")
    drawing.text("soft", MARGIN, 66, f"4 tensor-parallel ranks; 16 bits; {measured['date']}")
    drawing.y = 80
    for whose, label, recompute in BARS:
        model = MODELS[whose if whose == "tpformer" else recompute]
        kept = sums[model, recompute]
        drawing.text("", MARGIN, drawing.y + 14, label)
        length = kept / 53 * (WIDTH - 2 * MARGIN)
        drawing.rect("held r0" if whose == "tpformer" else "held both", MARGIN, drawing.y + 20, length, 16, 2)
        drawing.text("name", MARGIN + length + 6, drawing.y + 33, f"{kept:.1f}")
        drawing.y += 44
    drawing.y -= 4
    return drawing.svg("Bytes that a GPT layer keeps for its backward, tpformer beside PyTorch and Megatron")


PICTURES = {"block.svg": block, "memory.svg": memory}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture())

"""Draws the pictures of README.md, docs/layouts.md, docs/moe.md, docs/context.md and docs/planner.md. They show where
the tensors of a block and of a layer of experts live, what these keep, and how ranks share weights and data.

`python docs/pictures/draw.py` writes them; tests/test_docs.py compares the committed pictures with what it draws.
"""

import json
from pathlib import Path

from tpformer.config import RunConfig, build_config
from tpformer.planner.drawing import MARGIN, WIDTH, Drawing
from tpformer.planner.dry_run import plan_config
from tpformer.planner.placement_pictures import placement_svg, splits_svg

MEMORY = Path(__file__).parents[2] / "bench/results/cpu/memory.json"
RANKS = 4
COLUMN = (WIDTH - 2 * MARGIN) / RANKS
LOADS = (5, 3, 7, 4, 2, 4, 3, 4)  # rows of eight experts in their picture: 16 tokens, two experts each


class BlockDrawing(Drawing):
    """A drawing with tensors on four ranks, and the kernels between them."""

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

    def row(self, name: str, layout: str, cut: str, *, kept: int | str = 0, last: bool = False) -> None:
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

    def dispatched(self, name: str, layout: str, kept: str) -> None:
        """The rows of each rank's two experts, as long as their loads."""
        y = self.y
        self.text("name", MARGIN, y + 16, name)
        self.text("soft right", WIDTH - MARGIN, y + 16, layout + (f" · kept: {kept}" if kept else ""))
        for expert, load in enumerate(LOADS):
            rank, second = divmod(expert, len(LOADS) // RANKS)
            x = MARGIN + rank * COLUMN + 16 + second * (COLUMN / 2 - 14)
            for row in range(load):
                self.rect(f"held r{rank}", x, y + 24 + 5 * row, COLUMN / 2 - 18, 4)
            self.text("middle soft", x + COLUMN / 4 - 9, y + 74, str(expert))
        for rank in range(RANKS):
            self.arrow(MARGIN + rank * COLUMN + COLUMN / 2, y + 79, 13)
        self.y = y + 94

    def ranks(self, title: str) -> None:
        """A title, and ranks by colour."""
        self.text("title", MARGIN, 28, title)
        for rank in range(RANKS):
            x = MARGIN + rank * COLUMN
            self.rect(f"held r{rank}", x + 20, 42, 13, 13, 2)
            self.text("", x + 38, 53, f"rank {rank}")
        self.y = 70

    def legend(self, title: str) -> None:
        """The same, and how a matrix is drawn."""
        self.ranks(title)
        self.text("soft", MARGIN, 78, "A box is a whole matrix, with a token in every line.")
        self.text("soft", MARGIN, 96, "The coloured part of it is what the rank holds.")
        self.y = 110


# between three tensors, each with its layout: the kernels' widths and words
HALF: tuple[tuple[str, str, list[tuple[int, list[str]]]], ...] = (
    ("x", "rows", [(84, ["norm", "all-gather", "+ GEMM"])]),
    ("q, k, v", "columns", [(66, ["attention"]), (62, ["GEMM +", "reduce-", "scatter"])]),
    ("x", "rows", []),
)


def ways() -> str:
    """The attention half of a block, from left to right, wide and low."""
    drawing = BlockDrawing()
    top, pitch, box, gap, x = 34, 31, (40, 25), 9, float(MARGIN)
    for name, cut, kernels in HALF:
        drawing.text("name middle", x + box[0] / 2, top - 10, name)
        for rank in range(RANKS):
            drawing.tensor(rank, cut, x, top + rank * pitch, *box)
        x += box[0]
        for width, words in kernels:
            drawing.rect("kernel", x + gap, top, width, 3 * pitch + box[1], 7)
            for rank in range(RANKS):
                y = top + rank * pitch + box[1] / 2
                for start in (x, x + gap + width):
                    drawing.parts.append(f'<path class="line" d="M{start + 1:g} {y:g}h{gap - 3}m-3 -3l3 3l-3 3"/>')
            middle = top + (3 * pitch + box[1]) / 2 + 5 - 9 * (len(words) - 1)
            for number, word in enumerate(words):
                drawing.text("middle", x + gap + width / 2, middle + 18 * number, word)
            x += gap + width
        x += gap
    drawing.y = top + 3 * pitch + box[1] + 4
    drawing.lines("soft", ["Lines are tokens. A colour is one of four ranks."])
    drawing.y -= 4
    return drawing.svg("Attention on four ranks: one GEMM gathers its tokens, another scatters its sums", 880)


def block() -> str:
    """The forward of one block with sequence parallelism, from the residual stream to the residual stream."""
    drawing = BlockDrawing()
    drawing.legend("A transformer block on four ranks")
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
    drawing.y -= 8
    drawing.lines(
        "soft",
        [
            "Right of × is the part of the weight that a rank has.",
            "Norm weights and the biases of o_proj and fc2 are",
            "whole on every rank.",
            "kept: bytes that wait for the backward, by token and",
            "hidden unit, shared by the ranks. 20 in all (16 bits).",
            "The backward runs both kernels the other way round.",
        ],
    )
    return drawing.svg("A transformer block on four ranks: where tensors live and what each kernel does")


def experts() -> str:
    """The forward of a layer of eight experts with sequence parallelism; a token goes to two of them."""
    drawing = BlockDrawing()
    drawing.legend("Eight experts on four ranks")
    drawing.row("x, the residual stream", "own tokens", "rows", kept=2)
    drawing.kernel(
        "norm, router, all-gather of the routing",
        [
            "A rank chooses K = 2 experts for each of its own",
            "tokens. All ranks get numbers and weights: 8 K bytes",
            "a token.",
        ],
    )
    drawing.row("routing", "all tokens", "all", kept="12 K + 4 E a token")
    drawing.kernel("all-gather of norm(x)", ["The rows of all tokens, as for a dense MLP."])
    drawing.row("norm(x)", "all tokens", "all")
    drawing.kernel(
        "grouped GEMM, weights of gate and up",
        [
            "A rank has two whole experts. It takes the rows that",
            "are routed to them, sorted by expert, then by token.",
        ],
    )
    drawing.dispatched("gate, up", "rows of own experts", "4 K f / h")
    drawing.kernel(
        "activation, grouped GEMM, weights of down", ["act(gate) * up, times the token's weight for the expert."]
    )
    drawing.dispatched("the experts' results", "rows of own experts", "")
    drawing.kernel(
        "combine, reduce-scatter",
        [
            "A token's rows are added up in the order of experts,",
            "then over ranks. The residual is added at its owner.",
        ],
    )
    drawing.row("x", "own tokens", "rows", last=True)
    drawing.y -= 8
    drawing.lines(
        "soft",
        [
            "Lines above a number: the rows of that expert. No",
            "row is dropped, so loads differ, and messages do not.",
            "kept: bytes that wait for the backward, by token and",
            "hidden unit, shared by the ranks (16 bits). f is the",
            "width of an expert, h the hidden size.",
        ],
    )
    return drawing.svg("Eight experts on four ranks: what is gathered, computed by each rank, and reduced")


def context() -> str:
    """The tokens of a sample on four context-parallel ranks, and which keys their queries see."""
    drawing, chunks = BlockDrawing(), 2 * RANKS
    drawing.ranks("A sample on four context-parallel ranks")
    left, top = MARGIN + 60, drawing.y + 20
    cell = (WIDTH - MARGIN - left) / chunks
    drawing.text("soft", left, drawing.y + 12, "keys and values of all chunks, gathered")
    for query in range(chunks):
        owner, y = min(query, chunks - 1 - query), top + query * 26
        drawing.text("", MARGIN, y + 18, f"chunk {query}")
        for key in range(query + 1):
            x = left + key * cell
            if key < query:
                drawing.rect(f"held r{owner}", x, y, cell - 3, 23, 3)
            else:  # of its own chunk a query sees the keys before itself
                drawing.parts.append(f'<path class="held r{owner}" d="M{x:g} {y:g}v23h{cell - 3:g}z"/>')
    drawing.y = top + chunks * 26 + 8
    drawing.lines(
        "soft",
        [
            "A row is a chunk of queries, in its rank's colour; a",
            "cell is a chunk of keys that they see. Rank r has the",
            "chunks r and 7 - r of 8, so all four compute as much:",
            "7 whole cells and 2 halves. Chunks in order would give",
            "the last rank 7 times as much as the first.",
        ],
    )
    return drawing.svg("Eight chunks of a sample on four ranks, and the keys that each chunk's queries see")


def expert_axes() -> str:
    """Where tokens and weights of a layer of eight experts are, on four ranks that exchange tokens, in two layouts."""
    drawing = BlockDrawing()
    drawing.ranks("Experts over the data axes")
    for title, keys, tp in (
        ("Expert and data parallelism", ["data_parallel_shard = 4, expert_parallel = 4"], 1),
        (
            "Expert, model and data parallelism",
            ["tensor_parallel = 2, data_parallel_shard = 2,", "expert_parallel = 4"],
            2,
        ),
    ):
        drawing.lines("name", [title])
        drawing.lines("soft", keys)
        drawing.y += 8
        top, inner = drawing.y, COLUMN - 24
        for rank in range(RANKS):
            x = MARGIN + rank * COLUMN + 12
            shard, part = divmod(rank, tp)
            drawing.rect("whole", x, top, inner, 30)  # the sample of the rank's tensor-parallel group
            drawing.rect(f"held r{rank}", x, top + part * 30 / tp, inner, 30 / tp)
            drawing.text("middle soft", x + inner / 2, top + 44, f"sample {shard}")
            drawing.rect("whole", x, top + 54, inner, 30)
            drawing.rect("held both", x + part * inner / tp, top + 54, inner / tp, 30)
            for second in range(2):
                left = x + second * (inner / 2 + 2)
                drawing.rect(f"held r{rank}", left, top + 108, inner / 2 - 2, 30, 3)
                drawing.text("middle on", left + inner / 4 - 1, top + 128, str(2 * rank + second))
            drawing.arrow(x + inner / 2, top + 88, 15)
        line = MARGIN + COLUMN / 2
        drawing.parts.append(f'<path class="line" d="M{line:g} {top + 92:g}h{3 * COLUMN:g}"/>')
        drawing.y = top + 142
    drawing.lines(
        "soft",
        [
            "Above: a sample, and in colour the tokens that the",
            "rank has. Middle, grey: its part of attention, norms,",
            "shared expert; equal parts are copies, which ZeRO may",
            "cut. Below: its two whole experts of eight. Between",
            "them an all-to-all takes each token to the ranks of",
            "its experts, and brings the results back.",
        ],
    )
    return drawing.svg("Tokens and weights of a layer of experts on four ranks, in two layouts")


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


# the layout of the courses, two nodes of eight, with a model of arXiv:2104.04473 and a batch that fills the pipeline
TWO_NODES: dict = {
    "model": {"preset": "megatron-7.5b"},
    "parallel": {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel_replicate": 2},
    "train": {"global_batch_size": 64, "device": "cuda", "dtype": "bfloat16"},
}


def two_nodes() -> RunConfig:
    """The configuration of TWO_NODES."""
    return plan_config(build_config(TWO_NODES))


PICTURES = {
    "block.svg": block,
    "ways.svg": ways,
    "experts.svg": experts,
    "expert_axes.svg": expert_axes,
    "context.svg": context,
    "memory.svg": memory,
    "placement.svg": lambda: placement_svg(two_nodes()),
    "splits.svg": splits_svg,
}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture())

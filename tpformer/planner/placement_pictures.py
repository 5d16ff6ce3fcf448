"""Pictures of a placement: ranks in their nodes, what each axis sends, and how 16 cores share weights and data.

Belongs here: drawing what placement.py says. The elements are in drawing.py.
"""

from __future__ import annotations

from tpformer.config import RunConfig
from tpformer.parallel import Layout

from .drawing import MARGIN, WIDTH, Drawing, tint
from .placement import SPLITS, Split, placement, rank_grid
from .report import size

IN_ROW, CELL, GAP = 4, 58, 8  # devices in a row of a node; height of a device, and the space around it
SHOWN = 4  # nodes; the others are like these
GRID = 4  # cores in a row of a panel
INNER = WIDTH - 2 * MARGIN


def placement_svg(config: RunConfig, devices_of_node: int = 8) -> str:
    """Ranks in their nodes, and below them each axis with its groups and the bytes that a rank sends in a step.

    train.dtype must be set. Colours are pipeline stages; a frame is around tensor-parallel neighbours. At most SHOWN
    nodes are drawn. The bytes are those of a rank in the middle of the pipeline. Errors: those of placement.
    """
    layout, drawing = config.parallel, Drawing()
    axes = placement(config, devices_of_node, layout.pipeline_parallel // 2)
    nodes = -(-layout.world_size // devices_of_node)
    drawing.y = 10
    drawing.lines(
        "title", [f"{layout.world_size} ranks on {nodes} node{'s' if nodes > 1 else ''} of {devices_of_node}"]
    )
    drawing.lines("soft", ["Colour: pipeline stage. Frame: tensor-parallel group."])
    for node in range(min(nodes, SHOWN)):
        _node(drawing, layout, node, devices_of_node)
    if nodes > SHOWN:
        drawing.lines("soft", [f"{nodes - SHOWN} more nodes, filled in the same order"])
    drawing.y += 10
    drawing.lines("name", ["Bytes that a rank sends in a step (formula)"])
    most = max([axis.sent for axis in axes], default=0.0)
    for axis in axes:
        where = "one node" if axis.nodes == 1 else f"{axis.nodes} nodes"
        members = ", ".join(map(str, axis.groups[0][:4])) + (", ..." if len(axis.groups[0]) > 4 else "")
        drawing.lines("", [f"{axis.axis}, {len(axis.groups[0])} ranks in {where}: {members}"])
        length = max(2.0, axis.sent / most * (INNER - 80))
        drawing.rect("held r0", MARGIN, drawing.y + 7, length, 14, 2)
        drawing.text("name", MARGIN + length + 6, drawing.y + 19, size(axis.sent))
        drawing.y += 24
    return drawing.svg(f"{layout.world_size} ranks in their nodes, and what each axis of the mesh sends")


def _node(drawing: Drawing, layout: Layout, node: int, devices: int) -> None:
    """A node's devices, row by row."""
    drawing.y += 10
    rows = -(-devices // IN_ROW)
    drawing.rect("kernel", MARGIN, drawing.y, INNER, 26 + rows * (CELL + GAP), 7)
    drawing.text("name", MARGIN + GAP, drawing.y + 18, f"node {node}")
    top, width = drawing.y + 26, (INNER - GAP) / IN_ROW
    grid = rank_grid(layout)
    run: list[tuple[float, float, int]] = []  # cells of one row and one tensor-parallel group
    for place, rank in enumerate(range(node * devices, min((node + 1) * devices, layout.world_size))):
        x, y = MARGIN + GAP + place % IN_ROW * width, top + place // IN_ROW * (CELL + GAP)
        pp, replica, shard, cp, tp = (grid == rank).nonzero()[0].tolist()
        drawing.rect("held", x, y, width - GAP, CELL, 4, fill=tint(pp, layout.pipeline_parallel))
        dp = replica * layout.data_parallel_shard + shard
        said = (f"pp {pp}", f"dp {dp}, tp {tp}")
        if layout.context_parallel > 1:
            said = (f"pp {pp}, dp {dp}", f"cp {cp}, tp {tp}")
        for line, words in enumerate((f"rank {rank}", *said)):
            kind = "on middle name" if line == 0 else "on middle"
            drawing.text(kind, x + (width - GAP) / 2, y + 18 + 16 * line, words)
        run.append((x, y, rank // layout.tensor_parallel))
    for y, group in dict.fromkeys((y, group) for _, y, group in run):
        left = [x for x, other, of in run if (other, of) == (y, group)]
        if layout.tensor_parallel > 1:
            length = left[-1] - left[0] + width - GAP
            drawing.rect("line", left[0] - 3, y - 3, length + 6, CELL + 6, 6)
    drawing.y = top + rows * (CELL + GAP)


def splits_svg() -> str:
    """How 16 cores share weights and data in each of SPLITS. Equal numbers and colours are equal pieces."""
    drawing = Drawing()
    drawing.y = 10
    drawing.lines("title", ["How 16 cores share weights and data"])
    drawing.lines("soft", ["A square is a core. Cores with the same number", "in a panel hold the same piece."])
    for split in SPLITS:
        _panel(drawing, split)
    return drawing.svg("How 16 cores share weights and data under data, model and expert parallelism")


def _panel(drawing: Drawing, split: Split) -> None:
    drawing.y += 12
    drawing.lines("name", [split.name])
    width = (INNER - 2 * GAP) / 2
    for column, (what, axes) in enumerate((("weights", split.weights), ("data", split.data))):
        x, pieces = MARGIN + column * (width + 2 * GAP), split.pieces(axes)
        count = 1 + max(pieces)
        note = "whole on each" if count == 1 else f"{count} pieces"
        if what == "weights" and "data" in axes:
            note = f"{split.sizes['data']} experts" + (f" in {split.sizes['tensor']} parts" if len(axes) > 1 else "")
        drawing.text("soft", x, drawing.y + 20, f"{what}: {note}")
        for core, piece in enumerate(pieces):
            left, top = x + core % GRID * width / GRID, drawing.y + 28 + core // GRID * 34
            drawing.rect("held", left, top, width / GRID - 4, 30, 4, fill=tint(piece, count))
            drawing.text("on middle", left + width / GRID / 2 - 2, top + 20, str(piece))
    drawing.y += 28 + 4 * 34

"""What an execution reports: conflicts by the Python lines and the programs of both sides.

Belongs here: the numbers that stand for instructions and warps in memory's history, and the texts made of them.
"""

from .ptx import Instruction


class Log:
    """The instructions and warps of an execution, and what was wrong."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        """Each kind of conflict of two instructions once."""
        self.lines: list[Instruction] = []
        self.warps: list[str] = ["the host"]
        self.first_lines: dict[int, int] = {}
        self.first_warps: dict[tuple, int] = {}
        self.known: set[tuple] = set()

    def number_lines(self, instructions: list[Instruction]) -> int:
        """The number of the first of a kernel's instructions; the others follow."""
        first = self.first_lines.setdefault(id(instructions), len(self.lines))
        if first == len(self.lines):
            self.lines += instructions
        return first

    def number_warps(self, rank: int, stream: int, column: int, program: int, warps: int) -> int:
        """The number of the first warp of a program; the others follow. Later launches of the stream have the same."""
        key = (rank, stream, column, program, warps)
        first = self.first_warps.setdefault(key, len(self.warps))
        if first == len(self.warps):
            place = f"program {program, column} of rank {rank}" + f" in stream {stream}" * (stream > 0)
            self.warps += [f"warp {i} of {place}" for i in range(warps)]
        return first

    def describe(self, line: int, warp: int) -> str:
        """An instruction and a warp."""
        return f"{self.lines[line]} by {self.warps[warp]}"

    def report(self, kind: str, line: int, warp: int, other: int, other_line: int) -> None:
        """Add a report, unless there is one of these instructions. other: -1 if there is no other side."""
        key = (kind, line, other_line)
        if key not in self.known:
            self.known.add(key)
            against = "" if other < 0 else f"; the other side is {self.describe(other_line, other)}"
            self.reports.append(f"{kind}: {self.describe(line, warp)}{against}")

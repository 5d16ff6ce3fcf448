"""What an execution reports: conflicts by the Python lines and the programs of both sides.

Belongs here: the numbers that stand for instructions and warps in memory's history, and the texts made of them.
"""

from collections import Counter
from typing import Any

from checks.compile.statements import Instruction


class Log:
    """The instructions and warps of an execution, and what was wrong."""

    def __init__(self) -> None:
        self.reports: list[str] = []
        """Each kind of conflict of two instructions once."""
        self.counts: dict[tuple[str, int, int], Counter[str]] = {}
        """What a kernel's program did on a rank in all its launches: FLOPs on tensor cores; bytes read and written, in
        shared memory and in each rank's memory; barriers; atomics of system scope by their order; fences of system
        scope. chain: the most atomics and fences that came one after another, in any program, before one of its own.
        Relaxed exchanges are left out, as nobody waits until they are done. in flight: as in compile/ptx.py."""
        self.executed = 0
        """How many instructions warps have executed."""
        self.lines: list[Instruction] = []
        self.warps = ["the host"]
        self.firsts: dict[Any, int] = {}
        self.known: set[tuple] = set()

    def number(self, known: list, key: Any, more: list) -> int:
        """The number of the first of more lines or warps among the known; the others follow. One key, one number."""
        first = self.firsts.setdefault(key, len(known))
        known += more if first == len(known) else []
        return first

    def describe(self, line: int, warp: int) -> str:
        """An instruction and a warp."""
        return f"{self.lines[line]} by {self.warps[warp]}"

    def report(self, kind: str, line: int, warp: int, other: int, other_line: int) -> None:
        """Add a report, unless there is one of these instructions. other: -1 if there is no other side."""
        if (kind, line, other_line) not in self.known:
            self.known.add((kind, line, other_line))
            against = "" if other < 0 else f"; the other side is {self.describe(other_line, other)}"
            self.reports.append(f"{kind}: {self.describe(line, warp)}{against}")

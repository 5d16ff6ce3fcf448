"""Every way to break a compiled kernel by one edit of its PTX: a barrier, a wait, an order or a scope less.

Belongs here: the edits, made from the code, and where each stands in the Python source. Edits of the source are in
source_mutants.py; mutant_trials.py executes both.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutations import KERNELS, Edit

WEAKER = {"acquire": ("relaxed",), "release": ("relaxed",), "acq_rel": ("relaxed", "acquire", "release")}
SHORT = 60  # letters of a Python line in a mutant's name
BLOCK = re.compile(r"(\$L__BB\w+):|// (%bb\.\d+):")
NARROWER = {"sys": "gpu", "gpu": "cta"}
ORDERED = re.compile(r"(?:atom|red|ld|st)\.[\w.]*\.(?:acquire|release|acq_rel)\b[\w.]*")

FENCE = "fence.acq_rel.sys;"
BARRIER = re.compile(r"\s*bar\.sync\s")
# instructions by which two barriers differ, if one stands between them
TELLING = {"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "fence", "bra", "ret"}


class Mutant(NamedTuple):
    """One edit of one kernel."""

    kind: str
    where: str  # the Python line, as file.py:12, and of inlined code the line that calls it
    # what it is known by when lines have moved: the Python line's own text, and of PTX the text of the kernel's line
    # that calls it, and in how many loops it stands
    place: str
    number: int  # which of the mutants of this kind and place it is, from 1 on
    edit: Edit  # of the kernel's PTX, or of the source of `function`
    function: str = ""  # the jitted function whose source is edited; empty if it is the PTX

    @property
    def name(self) -> str:
        """A text that no other mutant of the same kernel has, which stays the same when lines move."""
        return f"{self.kind}, {self.place} #{self.number}"


class Loop(NamedTuple):
    """The innermost loop that a block of code stands in, as LLVM's comments give it."""

    header: str = ""  # the label of its first block; empty if there is no loop
    depth: int = 0
    innermost: bool = False  # whether it has no loop within. Only its header says so


class Place(NamedTuple):
    """A line of PTX, and the Python line that it comes from."""

    index: int
    line: str
    where: str
    text: str
    caller: str  # the kernel's own line, where the code is of a function that it calls
    block: str  # the label of its block, or what LLVM's comment has in place of one

    def name(self, depth: int) -> str:
        """As Mutant.place."""
        called = f" for `{self.caller[:SHORT]}`" if self.caller else ""
        return f"`{self.text[:SHORT]}`{called}" + (f" in {depth} loop{'s' * (depth > 1)}" if depth else "")


def places(ptx: str) -> Iterator[Place]:
    """The lines of the kernel's body, before its debugging information. The file number 1 is the kernel's own."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    where, text, caller, block = "?", "?", "", ""
    for index, line in enumerate(ptx.split("\t.section\t.debug")[0].splitlines()):
        if location := re.match(r"\s*\.loc\s+(\d+)\s+([1-9]\d*) \d+\s*(?:.*@\[ (\S+):(\d+):\d+ )?", line):
            path = Path(files[location[1]])
            where, text, caller = f"{path.name}:{location[2]}", python_line(str(path), int(location[2])), ""
            if location[3]:
                assert Path(files["1"]).name == location[3], f"the kernel is in {files['1']}, which {line} is not"
                where += f" in {location[3]}:{location[4]}"
                caller = python_line(files["1"], int(location[4])).partition(": ")[2]
        elif begun := BLOCK.match(line):
            block = begun[1] or begun[2]
        yield Place(index, line, where, text, caller, block)


def loops_of(every: list[Place]) -> dict[str, Loop]:
    """The innermost loop of each block, in their order."""
    found = dict[str, Loop]()
    for block, line in ((place.block, place.line) for place in every):
        found.setdefault(block, Loop())
        if within := re.search(r"//.* in Loop: Header=(\w+) Depth=(\d+)", line):
            found[block] = Loop(f"$L__{within[1]}", int(within[2]))
        elif head := re.search(r"//.*=>\s*This (Inner )?Loop Header: Depth=(\d+)", line):
            found[block] = Loop(block, int(head[2]), bool(head[1]))
    return found


@functools.cache
def python_line(path: str, number: int) -> str:
    """A line of a kernel's source, behind the name of its function; the file's name for a line of Triton's own."""
    folder, kernels, rest = path.rpartition("/kernels/")
    if not kernels:
        return Path(path).name
    source = (KERNELS / rest).read_text()
    around = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
              if node.lineno <= number <= (node.end_lineno or 0)]  # fmt: skip
    return f"{around[-1].name}: {source.splitlines()[number - 1].strip()}"


def change(index: int, new: str, *deleted: int) -> Edit:
    """Replace a line; the empty string deletes it. deleted: the indices of lines that go with it."""

    def edit(ptx: str) -> str:
        lines = ptx.splitlines()
        for at in (index, *deleted):
            lines[at] = new if at == index else ""
        return "\n".join(lines) + "\n"

    return edit


def ptx_mutants(ptx: str) -> list[Mutant]:
    """All of a kernel."""
    found, seen, every = [], Counter[tuple[str, str]](), list(places(ptx))
    loops = loops_of(every)
    exits, twins = exits_of_polls(every, loops), repeated_barriers(every)
    for place in every:
        if any(place.index in several for several in twins.values()):
            continue
        name = place.name(loops[place.block].depth) if place.block else ""
        for kind, new in edits(place, exits):
            seen[kind, name] += 1
            edit = change(place.index, new, *twins.get(place.index, []))
            found.append(Mutant(kind, place.where, name, seen[kind, name], edit))
    return found


def edits(place: Place, exits: dict[int, str]) -> Iterator[tuple[str, str]]:
    """(kind, the new line) for each edit of one line."""
    line = place.line.split("//")[0]
    if BARRIER.match(line):
        yield "barrier deleted", ""
    elif group := re.match(r"\s*cp\.async\.wait_group\s+(\d+);", line):
        yield "wait for copies deleted", ""
        yield "wait for one copy fewer", f"\tcp.async.wait_group \t{int(group[1]) + 1};"
    elif FENCE in line:
        yield "fence deleted", line.replace(FENCE, "")
        yield "scope sys to gpu", line.replace(FENCE, FENCE.replace("sys", "gpu"))
    elif opcode := ORDERED.search(line):
        parts = opcode[0].split(".")
        for order in WEAKER.keys() & parts:
            for weaker in WEAKER[order]:
                yield f"{order} to {weaker}", line.replace(f".{order}", f".{weaker}")
        for scope in NARROWER.keys() & parts:
            yield f"scope {scope} to {NARROWER[scope]}", line.replace(f".{scope}.", f".{NARROWER[scope]}.")
    elif place.index in exits:
        yield "wait falls through", exits[place.index]


def repeated_barriers(every: list[Place]) -> dict[int, list[int]]:
    """By the line of a barrier: those of others behind it with no memory access or branch between. They are deleted
    together, because one of them does what all do."""
    found, first, block = dict[int, list[int]](), -1, ""
    for place in every:
        line = place.line.split("//")[0]
        if place.block != block or TELLING & {word.partition(".")[0] for word in line.split()}:
            first, block = -1, place.block
        if BARRIER.match(line) and first >= 0:
            found.setdefault(first, []).append(place.index)
        elif BARRIER.match(line):
            first = place.index
    return found


def exits_of_polls(every: list[Place], loops: dict[str, Loop]) -> dict[int, str]:
    """The lines of the branches by which loops that poll may end, and with what in their place they end at once. A loop
    polls if it acquires, and has no loop within.

    AssertionError if a wait acquires, and no loop of its polls.
    """
    acquires = [place for place in every if ORDERED.search(place.line) and ".acquire" in place.line]
    polling = [place for place in acquires if loops[loops[place.block].header or place.block].innermost]
    headers = {loops[place.block].header for place in polling}
    blocks = list(loops)
    exits, waits = dict[int, str](), set[str]()
    for number, place in enumerate(every):
        header = loops.get(place.block, Loop()).header
        branch = re.match(r"\s*@\S+ bra\s+(\$\w+);", place.line)
        if not branch or header not in headers:
            continue
        other = re.match(r"\s*bra(?:\.uni)?\s+(\$\w+);", every[number + 1].line)
        behind = other[1] if other else blocks[blocks.index(place.block) + 1]
        leaves = [loops[block].header != header for block in (branch[1], behind)]
        if any(leaves):
            assert not all(leaves), place
            exits[place.index] = f"\tbra.uni \t{branch[1]};" if leaves[0] else ""
            waits.add(header)
    assert headers == waits, f"loops that poll have no end: {headers - waits}"
    missing = {place.caller for place in acquires} - {place.caller for place in polling}
    assert not missing, f"no loop polls in {missing}"
    return exits

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

from mutations import Edit

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
WEAKER = {"acquire": ("relaxed",), "release": ("relaxed",), "acq_rel": ("relaxed", "acquire", "release")}
SHORT = 60  # letters of a Python line in a mutant's name
NARROWER = {"sys": "gpu", "gpu": "cta"}
ORDERED = re.compile(r"(?:atom|red|ld|st)\.[\w.]*\.(?:acquire|release|acq_rel)\b[\w.]*")

FENCE = "fence.acq_rel.sys;"


class Mutant(NamedTuple):
    """One edit of one kernel."""

    kind: str
    where: str
    """The Python line, as file.py:12, and of inlined code the line that calls it."""
    text: str
    """The Python line's own text, by which the mutant is known when lines have moved."""
    number: int
    """Which of the mutants of this kind, and of a text that begins like this, it is, from 1 on."""
    edit: Edit
    """Of the kernel's PTX, or of the source of `function`."""
    function: str = ""
    """The jitted function whose source is edited; empty if it is the PTX."""

    @property
    def name(self) -> str:
        """A text that no other mutant of the same kernel has, which stays the same when lines move."""
        return f"{self.kind}, `{self.text[:SHORT]}` #{self.number}"


class Place(NamedTuple):
    """A line of PTX and the Python line that it comes from."""

    index: int
    line: str
    where: str
    text: str


def places(ptx: str) -> Iterator[Place]:
    """The lines of the kernel's body."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    where, text = "?", "?"
    for index, line in enumerate(ptx.split("\t.section\t.debug")[0].splitlines()):
        if location := re.match(r"\s*\.loc\s+(\d+)\s+([1-9]\d*) \d+\s*(?:.*@\[ (\S+):\d+ )?", line):
            path = Path(files[location[1]])
            where = f"{path.name}:{location[2]}" + (f" in {location[3]}" if location[3] else "")
            text = python_line(str(path), int(location[2]))
        yield Place(index, line, where, text)


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


def change(index: int, new: str) -> Edit:
    """Replace a line; the empty string deletes it."""

    def edit(ptx: str) -> str:
        lines = ptx.splitlines()
        lines[index] = new
        return "\n".join(lines) + "\n"

    return edit


def ptx_mutants(ptx: str) -> list[Mutant]:
    """All of a kernel."""
    found, seen = [], Counter[tuple[str, str]]()
    every = list(places(ptx))
    polls = polling_branches(every)
    for place in every:
        for kind, new in edits(place, polls):
            seen[kind, place.text[:SHORT]] += 1
            found.append(
                Mutant(kind, place.where, place.text, seen[kind, place.text[:SHORT]], change(place.index, new))
            )
    return found


def edits(place: Place, polls: set[int]) -> Iterator[tuple[str, str]]:
    """(kind, the new line) for each edit of one line."""
    line = place.line.split("//")[0]
    if re.match(r"\s*bar\.sync\s", line):
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
    elif place.index in polls:
        yield "wait falls through", ""


def polling_branches(every: list[Place]) -> set[int]:
    """The lines of branches that end a loop which polls: one that acquires and has no loop within. Not of a loop whose
    last branch is unconditional, as a wait for several flags may have it.

    AssertionError if no wait, which acquires before its loop and in it, has such a branch.
    """
    labels = {place.line.split(":")[0]: place.index for place in every if place.line.startswith("$L__BB")}
    acquires = [place for place in every if ORDERED.search(place.line) and ".acquire" in place.line]
    loops = [
        (labels[branch[1]], place.index)
        for place in every
        if (branch := re.match(r"\s*@\S+ bra\s+(\$\w+);", place.line)) and labels[branch[1]] < place.index
    ]
    polling = {
        last
        for first, last in loops
        if any(first < place.index < last for place in acquires)
        and not any(first <= other and end < last for other, end in loops)
    }
    assert len(acquires) >= 2 * len(polling) >= 2 * bool(acquires), (
        f"{len(polling)} loops poll, and {len(acquires)} instructions acquire"
    )
    return polling

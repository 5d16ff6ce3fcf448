"""Ways to break the protocol in a kernel's Python source: flags, parities, epochs and counts are shifted, waits and
publications are missing, and what is awaited is not what is read.

Belongs here: the edits, made from the calls that stand in the source. Edits of PTX are in ptx_mutants.py.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import triton
from mask_mutants import extent
from mutations import Edit, replace
from ptx_mutants import SHORT, Mutant
from triton.runtime.jit import JITFunction

from tpformer.kernels.protocol import Served

# what a wait for another chunk, row block or tile waits for: each of them once, but not when it is read
OTHERS = {
    "all_gather_matmul_kernel": {"chunk": "((me.rank + WORLD - step) % WORLD)"},
    "await_gathered_kernel": {"chunk": "((me.rank + 1) % WORLD)"},
    "matmul_reduce_scatter_kernel": {"row_block": "(tiles_m - 1 - row_block)"},
    "matmul_all_reduce_kernel": {"tile": "(tiles - 1 - tile)", "summed": "(units - 1 - summed)"},
}
COUNT = "count shifted by one"


def counted(last: str) -> list[tuple[str, str, str]]:
    """Edits of what the last one to count does."""
    return [(COUNT, f"== {last} - 1", f"== {last} - 2"), (COUNT, f"== {last} - 1", f"== {last}"),
            (COUNT, "tl.store(counter, 0)", "tl.store(counter, 1)")]  # fmt: skip


# by function: (kind, old, new)
OF_ONE_FUNCTION = {
    "bump_kernel": [
        ("epoch shifted by +1", "+ 1)", "+ 2)"),
        ("epoch shifted by -1", "+ 1)", "+ 0)"),
        ("flag shifted by one", "tl.store(epoch + rank,", "tl.store(epoch + rank + 1,"),
    ],
    "push_rows": counted("pushers"),
    "push_tile": counted("tiles_n"),
    "matmul_all_reduce_kernel": [(COUNT, "copier < copiers", "copier < copiers + 1")],
}
# by function that is called: kind -> what stands in place of the call. Its arguments are {0}, {1} and so on; {rest} are
# those behind the first one, {end} those behind the second.
OF_CALLS = {
    "publish": {
        "publish deleted": "pass",
        "flag shifted by one": "publish({0} + 1, {1})",
        "flag shifted by one writer": "publish({0} + me.writer_flags, {1})",
        "epoch shifted by +1": "publish({0}, {1} + 1)",
        "epoch shifted by -1": "publish({0}, {1} - 1)",
    },
    "announce": {
        "announce deleted": "pass",
        "flag shifted by one": "announce({0}, {1} + 1, {2})",
        "announced to one rank fewer": "announce({0}, {1}, {2} - 1)",
        "epoch shifted by +1": "announce(later({0}), {rest})",
        "epoch shifted by -1": "announce(earlier({0}), {rest})",
    },
    "wait": {
        "wait deleted": "{3}",
        "flag shifted by one": "wait({0}, {1} + 1, {end})",
        "flag shifted by one writer": "wait({0}, {1} + me.writer_flags, {end})",
        "epoch shifted by +1": "wait(later({0}), {rest})",
        "epoch shifted by -1": "wait(earlier({0}), {rest})",
        "one rank not awaited": "wait({0}, {1}, {2}, {3}, {4} - 1)",  # of a wait for several ranks
    },
    "slot_of": {"parity shifted": "slot_of(later({0}), {rest})"},
    "slots_of": {"parity shifted": "slots_of(later({0}), {rest})"},
}


@triton.jit
def later(me):
    """The channel at the next epoch."""


@triton.jit
def earlier(me):
    """The channel at the epoch before."""


for helper, shifted in ((later, "me.epoch + 1"), (earlier, "me.epoch - 1")):
    members = (shifted if member == "epoch" else f"me.{member}" for member in Served._fields)
    helper._unsafe_update_src(f"def {helper.__name__}(me):\n    return Served({', '.join(members)})\n")

HELPERS = {"later": later, "earlier": earlier}  # names that edited sources use


def source_mutants(functions: Sequence[JITFunction]) -> list[Mutant]:
    """All of some jitted functions."""
    found, seen = [], Counter[tuple[str, str]]()
    for function in functions:
        name, lines = function.__name__, function.src.splitlines()
        file = function.fn.__code__.co_filename.rpartition("/")[2]
        above = first_line(function) - 1
        for kind, line, edit in edits(function):
            place = f"`{f'{name}: {lines[line - 1].strip()}'[:SHORT]}`"
            seen[kind, place] += 1
            found.append(Mutant(kind, f"{file}:{above + line}", place, seen[kind, place], edit, name))
    return found


def first_line(function: JITFunction) -> int:
    """The number of the line with `def`."""
    return function.starting_line_number + next(n for n, line in enumerate(function.raw_src) if line.startswith("def "))


def edits(function: JITFunction) -> Iterator[tuple[str, int, Edit]]:
    """(kind, line of the function, edit)."""
    source, name = function.src, function.__name__
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = [str(ast.get_source_segment(source, argument)) for argument in node.args]
            for kind, new in edits_of_call(name, node.func.id, given):
                yield kind, node.lineno, substitute(node, new)
        elif isinstance(node, ast.Compare) and (text := ast.unparse(node)).endswith("& 1 == 1"):
            yield "parity shifted", node.lineno, substitute(node, text.removesuffix("1") + "0")
    for kind, old, new in OF_ONE_FUNCTION.get(name, []):
        yield kind, source[: source.index(old)].count("\n") + 1, replace(old, new)


def edits_of_call(caller: str, called: str, given: list[str]) -> Iterator[tuple[str, str]]:
    """(kind, what stands in place of the call)."""
    rest, end = ", ".join(given[1:]), ", ".join(given[2:])
    for kind, template in OF_CALLS.get(called, {}).items():
        if "{4}" not in template or len(given) > 4:
            yield kind, template.format(*given, rest=rest, end=end)
    for read, other in OTHERS[caller].items() if called == "wait" else ():
        shifted = re.sub(rf"\b{read}\b", other, rest)
        if shifted != rest:
            yield "wait for chunk i, read chunk j", f"wait({given[0]}, {shifted})"


def substitute(node: ast.expr, new: str) -> Edit:
    """Replace an expression. It is known by its place, so the source must be the one that it was found in."""

    def edit(source: str) -> str:
        first, end = extent(source, node)
        return source[:first] + new + source[end:]

    return edit

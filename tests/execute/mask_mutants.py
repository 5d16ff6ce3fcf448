"""Edits of kernels' sources that take a mask away or move a bound by one.

Belongs here: which edits there are. Whether one is caught is in execute_masks.py; that needs the cases of masks.py.
"""

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from mutations import KERNELS

# of TMA descriptors, whose shape is their mask: one more row or column
HOST_FILE, HOST_FUNCTION, HOST_SHAPE = "launch.py", "operand", "list(x.shape)"
HOST_SHAPES = ("[x.shape[0] + 1, x.shape[1]]", "[x.shape[0], x.shape[1] + 1]")
# The parameters of device functions that end a mask, and are nothing else there. Not the rows of packed blocks: memory
# has room for whole tiles, so one row more is only sent in vain.
ENDS = {
    "tile_mask": ("m", "n"), "load_row": ("n",), "finished_tile": ("m", "n"), "load_normalised": ("m",),
    "load_block": ("row_end", "column_end"), "store_block": ("row_end", "column_end"),
    "store_activated": ("row_end", "column_end"), "store_derivative": ("row_end",), "add_bias": ("column_end",),
    "finish_tile": ("row_end",), "drop_tile": ("row_end",), "multiply_step": ("m_end", "n_end", "k"),
    "multiply_inputs": ("m_end", "n_end"), "multiply_blocks": ("m_end",), "load_rows": ("column_end",),
    "numbers": ("end",),
}  # fmt: skip
# comparisons that are no bounds: roles of programs, polls, dropout's threshold, signs
NO_BOUNDS = {
    "program", "place", "step", "polls", "limit", "drop.threshold", "0.0", "lane", "turn", "unit", "copy", "copier",
    "begun", "bits", "order", "largest", "magnitude",
}  # fmt: skip


class Mutant(NamedTuple):
    """One edit of one function of a file."""

    file: str
    function: str
    kind: str  # "mask", "wider" or "tighter"
    before: str
    after: str
    place: list[int]  # where in the function's source the edited text begins and ends
    copy: int = 1  # 1 for the first of the function's edits that read the same, then 2

    @property
    def name(self) -> str:
        """What is edited, without line numbers, which change."""
        where = f"{self.file} {self.function}" + (f" ({self.copy})" if self.copy > 1 else "")
        return f"{where}: {self.before} -> {self.after}"

    def edit(self, source: str) -> str:
        """The function's source with the edit."""
        first, end = self.place
        return source[:first] + self.after + source[end:]


Change = tuple[str, ast.AST, ast.AST]
"""A kind of edit, a node, and what stands in its place."""


def moved(node: ast.expr, by: int) -> ast.expr:
    """The expression plus a constant."""
    return ast.BinOp(node, ast.Add() if by > 0 else ast.Sub(), ast.Constant(abs(by)))


def changes_of_call(call: ast.Call, parameters: dict[str, list[str]]) -> Iterator[Change]:
    """Masks of loads and stores are left out; ends that are passed to device functions are moved by one."""
    name = ast.unparse(call.func)
    if name in ("tl.load", "tl.store") and any(keyword.arg == "mask" for keyword in call.keywords):
        kept = [keyword for keyword in call.keywords if keyword.arg not in ("mask", "other")]
        yield "mask", call, ast.Call(call.func, call.args, kept)
    if name == "tl.minimum" and len(call.args) == 2:
        for clamped, other in (call.args, call.args[::-1]):  # a clamp to the one or to the other alone
            if not isinstance(clamped, ast.Constant):
                yield "wider", call, ast.Call(call.func, [other, other], call.keywords)
    for end in ENDS.get(name, ()):
        at = parameters[name].index(end)
        if at >= len(call.args):  # it has a default
            continue
        for kind, by in (("wider", 1), ("tighter", -1)):
            arguments = [moved(x, by) if i == at else x for i, x in enumerate(call.args)]
            yield kind, call, ast.Call(call.func, arguments, call.keywords)
    if ast.unparse(call) == HOST_SHAPE:
        yield from (("wider", call, ast.parse(shape, mode="eval").body) for shape in HOST_SHAPES)


def changes_of_comparison(node: ast.Compare) -> Iterator[Change]:
    """Each bound is moved by one, in both directions."""
    (right,) = node.comparators
    if {ast.unparse(node.left), ast.unparse(right)} & NO_BOUNDS:
        return
    sign = {ast.Lt: 1, ast.LtE: 1, ast.GtE: -1}.get(type(node.ops[0]))
    if sign is not None:
        for kind, by in (("wider", sign), ("tighter", -sign)):
            yield kind, node, ast.Compare(node.left, node.ops, [moved(right, by)])


def changes(function: ast.FunctionDef, parameters: dict[str, list[str]]) -> Iterator[Change]:
    """All of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield from changes_of_call(node, parameters)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from changes_of_comparison(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "whole":
            if ast.unparse(node.value).endswith("BLOCK"):  # what is taken in whole blocks, without a mask
                more = ast.BinOp(node.value, ast.Add(), ast.Name("BLOCK"))
                yield "wider", node, ast.Assign(node.targets, more, lineno=node.lineno)


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """The functions that Triton compiles, and the one of launch.py that makes descriptors."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [node for node in found if any("triton.jit" in ast.unparse(each) for each in node.decorator_list)]
    return jitted + [node for node in found if node.name == HOST_FUNCTION]


@functools.cache
def all_mutants() -> list[Mutant]:
    """Those of all files with device code that has masks. In protocol.py comparisons are those of epochs."""
    texts = {str(path.relative_to(KERNELS)): path.read_text() for path in sorted(KERNELS.rglob("*.py"))}
    trees = {
        file: functions(ast.parse(text))
        for file, text in texts.items()
        if file == HOST_FILE or ("@triton.jit" in text and not file.endswith("protocol.py"))
    }
    parameters = {f.name: [a.arg for a in f.args.args] for tree in trees.values() for f in tree}
    found, copies = [], Counter[str]()
    for file, tree in trees.items():
        for function in tree:
            text = "".join(texts[file].splitlines(keepends=True)[function.lineno - 1 :])
            for kind, node, new in changes(function, parameters):
                where = extent(text, node, function.lineno)
                mutant = Mutant(file, function.name, kind, ast.unparse(node), ast.unparse(new), where)
                copies[mutant.name] += 1
                found.append(mutant._replace(copy=copies[mutant.name]))
    return found


def extent(text: str, node: Any, first: int = 1) -> list[int]:
    """Where a node begins and ends in a text whose first line has this number."""
    lines = text.splitlines(keepends=True)
    ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return [sum(map(len, lines[: line - first])) + column for line, column in ends]

"""Edits of kernels' sources that take a mask away or move a bound by one.

Belongs here: which edits there are, and the copy of all kernels that has one. Whether one is caught is in
execute_masks.py; that needs the cases of masks.py.
"""

import ast
import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from execution import ROOT

KERNELS = ROOT / "kernels"
HOST_EDITS = {  # of TMA descriptors, whose shape is their mask
    "one more row": ("list(x.shape)", "[x.shape[0] + 1, x.shape[1]]"),
    "one more column": ("list(x.shape)", "[x.shape[0], x.shape[1] + 1]"),
}
# The parameters of device functions that end a mask, and are nothing else there. Not the rows of packed blocks: memory
# has room for whole tiles, so one row more is only sent in vain.
ENDS = {
    "tile_mask": ("m", "n"), "load_row": ("n",), "finished_tile": ("m", "n"), "load_normalised": ("m",),
    "load_block": ("row_end", "column_end"), "store_block": ("row_end", "column_end"),
    "store_activated": ("row_end", "column_end"), "store_derivative": ("row_end",), "add_bias": ("column_end",),
    "finish_tile": ("row_end",), "drop_tile": ("row_end",), "multiply_step": ("m_end", "n_end", "k"),
    "multiply_inputs": ("m_end", "n_end"), "load_rows": ("column_end",), "numbers": ("end",),
}  # fmt: skip
# comparisons that are no bounds: roles of programs, polls, dropout's threshold, signs
NO_BOUNDS = {
    "program", "place", "step", "polls", "limit", "drop.threshold", "0.0", "lane", "turn", "unit", "copy", "copier",
    "begun", "bits", "order",
}  # fmt: skip


class Mutant(NamedTuple):
    """One edit of one function of a file."""

    file: str
    function: str
    number: int
    """Of the edit, among those of its file."""
    kind: str
    """"mask", "wider" or "tighter"."""
    before: str
    after: str
    copy: int = 1
    """1 for the first of the function's edits that read the same, then 2."""

    @property
    def name(self) -> str:
        """What is edited, without line numbers, which change."""
        where = f"{self.file} {self.function}" + (f" ({self.copy})" if self.copy > 1 else "")
        return f"{where}: {self.before} -> {self.after}"


class Edit(NamedTuple):
    """A change of a syntax tree, which `apply` makes and `undo` takes back."""

    kind: str
    before: str
    after: str
    apply: Callable[[], None]
    undo: Callable[[], None]


def swap(kind: str, owner: ast.AST, field: str, new: object, shown: ast.AST) -> Edit:
    """The edit that sets a field, a node or a list of nodes, and is shown as a change of the node `shown`."""
    old, before = getattr(owner, field), ast.unparse(shown)
    setattr(owner, field, new)
    after = ast.unparse(shown)
    setattr(owner, field, old)
    return Edit(kind, before, after, lambda: setattr(owner, field, new), lambda: setattr(owner, field, old))


def moved(node: ast.expr, by: int) -> ast.expr:
    """The expression plus a constant."""
    operator = ast.Add() if by > 0 else ast.Sub()
    return ast.fix_missing_locations(ast.BinOp(node, operator, ast.Constant(abs(by))))


def edits_of_call(call: ast.Call, parameters: dict[str, list[str]]) -> Iterator[Edit]:
    """Masks of loads and stores are left out; ends that are passed to device functions are moved by one."""
    name = ast.unparse(call.func)
    if name in ("tl.load", "tl.store") and any(keyword.arg == "mask" for keyword in call.keywords):
        kept = [keyword for keyword in call.keywords if keyword.arg not in ("mask", "other")]
        yield swap("mask", call, "keywords", kept, call)
    if name == "tl.minimum" and len(call.args) == 2:
        for number in (0, 1):  # a clamp to the one or to the other alone
            other = call.args[1 - number]
            if not isinstance(call.args[number], ast.Constant):
                yield swap("wider", call, "args", [other, other], call)
    for end in ENDS.get(name, ()):
        at = parameters[name].index(end)
        if at >= len(call.args):  # it has a default
            continue
        for kind, by in (("wider", 1), ("tighter", -1)):
            arguments = [moved(x, by) if i == at else x for i, x in enumerate(call.args)]
            yield swap(kind, call, "args", arguments, call)


def edits_of_comparison(node: ast.Compare) -> Iterator[Edit]:
    """Each bound is moved by one, in both directions."""
    (right,) = node.comparators
    if {ast.unparse(node.left), ast.unparse(right)} & NO_BOUNDS:
        return
    signs = {ast.Lt: 1, ast.LtE: 1, ast.GtE: -1}
    sign = signs.get(type(node.ops[0]))
    if sign is not None:
        yield swap("wider", node, "comparators", [moved(right, sign)], node)
        yield swap("tighter", node, "comparators", [moved(right, -sign)], node)


def edits_of_assignment(node: ast.Assign) -> Iterator[Edit]:
    """What is taken in whole blocks, without a mask, is a block more."""
    if ast.unparse(node.targets[0]) == "whole" and ast.unparse(node.value).endswith("BLOCK"):
        more = ast.fix_missing_locations(ast.BinOp(node.value, ast.Add(), ast.Name("BLOCK", ast.Load())))
        yield swap("wider", node, "value", more, node)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions that Triton compiles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


@functools.cache
def sources() -> tuple[dict[str, ast.Module], dict[str, list[str]]]:
    """The trees of the files with device code that has masks, and the parameters of their functions. In protocol.py
    comparisons are those of epochs."""
    files = [path for path in sorted(KERNELS.rglob("*.py")) if "@triton.jit" in path.read_text()]
    trees = {str(p.relative_to(KERNELS)): ast.parse(p.read_text()) for p in files if p.name != "protocol.py"}
    return trees, {f.name: [a.arg for a in f.args.args] for tree in trees.values() for f in functions(tree)}


def edits_of_file(tree: ast.Module, parameters: dict[str, list[str]]) -> Iterator[tuple[str, Edit]]:
    """Yield (function, edit)."""
    for function in functions(tree):
        for node in ast.walk(function):
            found: Iterator[Edit] = iter(())
            if isinstance(node, ast.Call):
                found = edits_of_call(node, parameters)
            elif isinstance(node, ast.Compare) and len(node.ops) == 1:
                found = edits_of_comparison(node)
            elif isinstance(node, ast.Assign):
                found = edits_of_assignment(node)
            for edit in found:
                yield function.name, edit


def all_mutants() -> list[Mutant]:
    trees, parameters = sources()
    found, copies = [], Counter[str]()
    for file, tree in trees.items():
        for number, (function, edit) in enumerate(edits_of_file(tree, parameters)):
            mutant = Mutant(file, function, number, edit.kind, edit.before, edit.after)
            copies[mutant.name] += 1
            found.append(mutant._replace(copy=copies[mutant.name]))
    return found + [Mutant("launch.py", "operand", 0, "wider", name, after) for name, (_, after) in HOST_EDITS.items()]


def write(mutant: Mutant | None, folder: Path) -> None:
    """Make a copy of all kernels that has this mutant."""
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is None:
        return
    path = folder / mutant.file
    if mutant.file == "launch.py":
        old, new = HOST_EDITS[mutant.before]
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return
    trees, parameters = sources()
    tree = trees[mutant.file]
    for number, (function, edit) in enumerate(edits_of_file(tree, parameters)):
        if number == mutant.number:
            assert (function, edit.before, edit.after) == (mutant.function, mutant.before, mutant.after)
            edit.apply()
            path.write_text(ast.unparse(tree))
            edit.undo()

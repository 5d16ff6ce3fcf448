"""What Triton would compile for a case: the jitted functions' text, and what a launch specialises them for.

Belongs here: what decides whether a row, or the committed page, is still of the present source. Launchers may change
what they check, or how they come to their numbers, as long as they ask for the same code.
"""

import ast
import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from harness.sources import imported, reached

from .cases import Case
from .compiler import Driver, intercepted


class Asked:
    """By case, a hash of all that its code follows from, but for the compilers. Nothing is compiled for it."""

    def __init__(self, kernels: Path) -> None:
        root = kernels.parent
        self._texts = {path: path.read_text() for path in sorted(kernels.rglob("*.py"))}
        self._imports = {path: imported(path, root) for path in self._texts}

    @functools.cache  # noqa: B019 - there is one
    def of(self, case: Case) -> str:
        """The hash of a case, whose launches are made once."""
        return digest([self.jitted(case.kernel), *launched(case)])

    def of_all(self, cases: Mapping[str, Case]) -> str:
        """One hash of many cases by key."""
        return digest(f"{key} {self.of(case)}" for key, case in cases.items())

    @functools.cache  # noqa: B019 - there are few
    def jitted(self, kernel: str) -> str:
        """Jitted functions of the kernel's file and of all that this imports, and the constants that they name, without
        comments."""
        defining = [path for path, text in self._texts.items() if f"def {kernel}(" in text]
        files = reached(defining, self._imports.__getitem__)
        return "\n".join(
            map(ast.unparse, named([node for path in sorted(files) for node in compiled(self._texts[path])]))
        )


def compiled(text: str) -> list[ast.stmt]:
    """The statements of a module that compiled code follows from: jitted functions, and values that they may name."""
    return [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        or (isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list))
    ]


def named(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """The functions among these statements, and the values that they name, or that values name that they name."""
    kept: set[ast.stmt] = {node for node in nodes if isinstance(node, ast.FunctionDef)}
    while True:
        names = {name for node in kept for name in names_in(node)}
        more = {node for node in nodes if node not in kept and names & set(names_in(node, ast.Store))}
        if not more:
            return [node for node in nodes if node in kept]
        kept |= more


def names_in(node: ast.stmt, context: type[ast.expr_context] = ast.Load) -> Iterator[str]:
    """Names of variables, and of attributes, that a statement loads, or stores."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, context):
            yield each.id if isinstance(each, ast.Name) else each.attr


def launched(case: Case) -> list[str]:
    """What the case's launches ask of Triton: types, constants, alignment and options, each specialisation once."""
    import triton

    found: list[str] = []

    def stop(source, target, options):
        own = {name: value for name, value in options.items() if name != "extern_libs"}  # paths on this machine
        found.append(repr((source.name, source.signature, source.constants, source.attrs, target, own)))
        raise NotCompiled

    def launch(function, compiles, arguments, grid, options):
        if function.__name__ == case.kernel:
            with contextlib.suppress(NotCompiled):
                compiles()

    with mock.patch.object(triton.compiler, "compile", stop), intercepted(Driver(case.capability), launch):
        try:
            case.launch()
        except Exception as error:  # the case's row will say it
            found.append(repr(error))
    return sorted(set(found))


class NotCompiled(Exception):
    """In place of a compilation."""


def digest(texts: Iterable[str]) -> str:
    """The first digits of a SHA-256."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()[:16]

"""Edits of source text that break a function, for tests that expect a check to notice.

Belongs here: the edits, each a function of the text, and Triton's compiling of an edited one. What is edited, and which
check must notice, is in the tests.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from triton.runtime.jit import JITCallable

Edit = Callable[[str], str]
KERNELS = Path(__file__).resolve().parents[1] / "kernels"


def replace(old: str, new: str) -> Edit:
    """Replace every occurrence of a text. There must be one, because an edit that changes nothing proves nothing."""

    def edit(source: str) -> str:
        assert old in source, f"{old!r} is not in\n{source}"
        return source.replace(old, new)

    return edit


def move(statement: str, behind: str) -> Edit:
    """Move the one statement that begins with a text behind the one that begins with `behind`, with its indentation."""

    def edit(source: str) -> str:
        lines = source.splitlines()
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]

        def find(beginning: str) -> ast.stmt:
            found = [node for node in nodes if ast.get_source_segment(source, node).startswith(beginning)]
            assert len(found) == 1, f"{len(found)} statements begin with {beginning!r} in\n{source}"
            return found[0]

        moved, target = find(statement), find(behind)
        block = textwrap.dedent("\n".join(lines[moved.lineno - 1 : moved.end_lineno]))
        placed = textwrap.indent(block, " " * target.col_offset).splitlines()
        removal = (moved.lineno - 1, moved.end_lineno, [" " * moved.col_offset + "pass"])
        for first, last, new in sorted([removal, (target.end_lineno, target.end_lineno, placed)], reverse=True):
            lines[first:last] = new
        return "\n".join(lines) + "\n"

    return edit


def chain(*edits: Edit) -> Edit:
    """Apply one edit after another."""
    return lambda source: functools.reduce(lambda text, edit: edit(text), edits, source)


@contextlib.contextmanager
def mutated(function: JITCallable, edit: Edit) -> Iterator[None]:
    """Within, Triton compiles the function's edited source, in whatever calls it."""
    source = function.src
    try:
        function._unsafe_update_src(edit(source))
        forget_hashes()
        yield
    finally:
        function._unsafe_update_src(source)
        forget_hashes()


def forget_hashes() -> None:
    """A function's hash covers those that it calls; Triton finds a compiled kernel by it."""
    from triton.runtime.jit import JITCallable

    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("tpformer.kernels.") else ():
            if isinstance(value, JITCallable):
                value.hash = None


def mutated_packages(name: str, mutations: Mapping[str, Mapping[str, list[Edit]]]) -> object:
    """A fixture for a test module, to be assigned there to the name that its tests ask for: mutation -> the importable
    name of a copy of all kernels, whose files the mutation's edits change.

    name: what no other module's packages begin with, because processes keep what they have imported.
    """

    @pytest.fixture(scope="module")
    def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
        folder = tmp_path_factory.mktemp(name)
        names = {mutation: f"{folder.name}_{index}" for index, mutation in enumerate(mutations)}
        for mutation, edits in mutations.items():
            copy = folder / names[mutation]
            shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for file, changes in edits.items():
                (copy / file).write_text(chain(*changes)((copy / file).read_text()))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            yield names

    return packages


def edited(function: Callable, edit: Edit) -> Callable:
    """The function with an edit of its source, in whose code the file is named without its folder."""
    source = edit(textwrap.dedent(inspect.getsource(function)))
    scope = dict(function.__globals__)
    exec(compile(source, Path(inspect.getfile(function)).name, "exec"), scope)
    return scope[function.__name__]


def function_of(file: str, name: str) -> Any:
    """A function of a file of kernels/."""
    return getattr(importlib.import_module(f"tpformer.kernels.{file.removesuffix('.py').replace('/', '.')}"), name)


@contextlib.contextmanager
def interpreting(file: str, name: str, edit: Edit) -> Iterator[None]:
    """Within, Triton's interpreter runs a function of kernels/ with an edit of its source, whatever calls it."""
    from triton.runtime import interpreter

    function = function_of(file, name)
    if isinstance(function, interpreter.InterpretedFunction):
        rewriter = interpreter.FunctionRewriter(function.fn)
        prepare = rewriter._prepare_source
        rewriter._prepare_source = lambda lines: edit(prepare(lines))
        function, new = function.rewrite(), rewriter.rewrite_ast()
    else:
        new = edited(function, edit)
    usual, function.__code__ = function.__code__, new.__code__
    try:
        yield
    finally:
        function.__code__ = usual

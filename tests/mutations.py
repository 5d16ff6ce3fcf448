"""Edits of source text that break a function, for tests that expect a check to notice.

Belongs here: the edits, each a function of the text. What is edited, and which check must notice, is in the tests.
"""

import ast
import shutil
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

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
        for first, last, new in sorted(
            [
                (moved.lineno - 1, moved.end_lineno, [" " * moved.col_offset + "pass"]),
                (target.end_lineno, target.end_lineno, placed),
            ],
            reverse=True,
        ):
            lines[first:last] = new
        return "\n".join(lines) + "\n"

    return edit


def chain(*edits: Edit) -> Edit:
    """Apply one edit after another."""

    def edit(source: str) -> str:
        for each in edits:
            source = each(source)
        return source

    return edit


def mutated_kernels(folder: Path, mutations: Mapping[str, Mapping[str, list[Edit]]]) -> dict[str, str]:
    """mutation -> the importable name of a copy of all kernels in the folder, whose files the mutation's edits change.

    Give each folder another name, which the packages' names begin with: processes keep what they have imported.
    """
    names = {}
    for index, (mutation, edits) in enumerate(mutations.items()):
        names[mutation] = f"{folder.name}_{index}"
        copy = folder / names[mutation]
        shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, changes in edits.items():
            (copy / file).write_text(chain(*changes)((copy / file).read_text()))
    return names

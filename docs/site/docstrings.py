"""Lays docstrings out for the site: in the source they are columns of monospaced text, on a page they are Markdown."""

import re
from pathlib import Path
from typing import Any

import griffe

INTERNAL = set((Path(__file__).parent / "internal.txt").read_text().splitlines())

LABEL = re.compile(r"(?P<name>[A-Z]\w+(?:,[^:]*)?):(?:\s+(?P<rest>.*))?$")  # "Shapes:  x (tokens, K)", "Errors:  ..."
ENTRY = re.compile(r"[a-z][\w ]{2,20}:\s")  # within a labelled part: "transport: how ..."
COLUMNS = re.compile(r"\S {2,}\S")  # a formula or a table


def laid_out(text: str) -> str:
    """Markdown of a docstring: each labelled part is a paragraph, several lines set in columns are code."""
    lines = text.splitlines()
    columns = [not LABEL.match(line) and bool(COLUMNS.search(line.strip())) for line in lines]
    examples = False  # lines that are indented after an empty one
    result: list[str] = []
    before = ""
    for number, line in enumerate(lines):
        bare = line.strip()
        examples = line.startswith("    ") and (examples or (number > 0 and not lines[number - 1].strip()))
        code = columns[number] and any(columns[max(0, number - 1) : number] + columns[number + 1 : number + 2])
        if code or examples:
            bare = line.rstrip() if examples else "    " + line.rstrip()
            result += [""] * (not before.startswith("    "))
        elif before.startswith("    ") or (before and not line.startswith(" ") and lines[number - 1].startswith(" ")):
            result.append("")
        if label := LABEL.match(line):
            result.append("")
            bare = f"**{label['name']}:** {label['rest'] or ''}"
        elif not (code or examples) and ENTRY.match(bare) and result:
            result[-1] += "  "  # a line break
        result.append(bare)
        before = bare
    return "\n".join(result)


class Sources(griffe.Extension):
    """Lays every docstring out, leaves internal methods out, as what has no docstring is, and finds tpformer.kernels,
    which is a link to the folder kernels/, there."""

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        if alias.target_path.startswith("tpformer.kernels."):
            alias.target_path = alias.target_path.removeprefix("tpformer.")

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.parent is not None and f"{obj.parent.name}.{obj.name}" in INTERNAL:
            obj.docstring = None
        if obj.docstring is not None:
            obj.docstring.value = laid_out(obj.docstring.value)

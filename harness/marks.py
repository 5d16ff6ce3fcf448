"""Tables that are the same on a page and on the console, and pages whose tables are made again.

Belongs here: the marks of tables, and how cells become a table. Which numbers are in them is said by each bench's own
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from .runner import columns


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table. cells: the header first."""
    header, *rows = ("| " + " | ".join(row) + " |" for row in cells)
    return "\n".join([header, "|" + "---|" * len(cells[0]), *rows])


def table_of(cells: Sequence[Sequence[str]]) -> Table:
    """What a page has as a table, for the console. cells: the header first."""
    table = columns(cells[0][:1], cells[0][1:])
    for row in cells[1:]:
        table.add_row(*row)
    return table


def filled(text: str, tables: Mapping[str, str], page: str) -> str:
    """A page's text with its tables made again, each between `<!-- table: NAME -->` and `<!-- end -->`.

    tables: by the name in their mark. page: its path, for the ValueError if a mark is missing.
    """
    for name, table in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(begin)
        if not mark:
            raise ValueError(f"{page} has no mark {begin.strip()!r}")
        text = f"{before}{begin}\n{table}\n\n{rest[rest.index(end) :]}"
    return text

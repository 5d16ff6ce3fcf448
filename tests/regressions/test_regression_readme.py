"""README.md has a row for each of the 47 items, which names tests that exist; every test here is in its items' rows and
says when it fails."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def functions(path: Path) -> dict[str, str]:
    """The docstrings of a file's functions by name; tests that a helper makes have none."""
    body = ast.parse(path.read_text()).body
    made = {each.id: "" for node in body for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)}
    return made | {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}


def test_every_item_has_a_row_and_every_test_in_it_exists():
    rows = dict(re.findall(r"^\| (\d+) \|(.*)\|$", (HERE / "README.md").read_text(), re.M))
    assert list(rows) == [str(number) for number in range(1, 49)]
    found = [pair for path in HERE.glob("test_*.py") for pair in functions(path).items()]
    ours = {name: text for name, text in found if name.startswith(("test_item_", "test_items_"))}
    for number, row in rows.items():
        named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", row)
        assert named, f"item {number} names no test"
        for file, name in named:
            assert name in (functions(ROOT / file) if file else ours), f"item {number}: {file or HERE.name}::{name}"
    for name, text in ours.items():
        assert "Fails " in text, f"{name} does not say when it fails"
        for number in re.findall(r"_(\d\d)(?=_)", name):
            assert f"`{name}`" in rows[str(int(number))], f"{name} is missing from the row of item {int(number)}"

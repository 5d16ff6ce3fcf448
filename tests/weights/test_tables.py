"""The tables in docs/weights.md name what the families read: every field with its default, and every tensor."""

import json
import re
from pathlib import Path

from tpformer.weights.families import FAMILIES
from tpformer.weights.family import Family, Field
from tpformer.weights.llama import LLAMA

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


def rows(family: Family) -> set[tuple[str, ...]]:
    """Fields of theirs and of ours, and the default; tensors of theirs and of ours; buffers of old files."""
    found = {(one.theirs, *one.ours) for one in family.tensors} | {(name,) for name in family.buffers}
    for name, known in family.fields.items():
        if isinstance(known, Field):
            names = (name, known.also, known.ours) if known.also else (name, known.ours)
            found.add((*names, json.dumps(known.default).strip('"')))
        else:
            found.add((name, ""))
    return found


def test_the_page_has_every_field_and_tensor_of_every_family():
    """Families of Llama's kind have only the rows that Llama has not."""
    sections = re.findall(r"^### (\w+)$(.*?)(?=^### |\Z)", PAGE.read_text(), re.M | re.S)
    assert [name for name, _ in sections] == [family.architecture for family in FAMILIES.values()]
    for family, (name, section) in zip(FAMILIES.values(), sections, strict=True):
        lines = [line for line in section.splitlines() if line.startswith("| `")]
        named = {(*re.findall("`(.+?)`", line), *(cell.strip() for cell in line.split("|")[3:-1])) for line in lines}
        base = rows(LLAMA) if family is not LLAMA and family.has_rope else set()
        assert named == rows(family) - base, name

"""The tables in docs/weights.md are those of the families. `python tests/weights/test_tables.py` prints them."""

import re
from pathlib import Path

from tpformer.weights.families import FAMILIES
from tpformer.weights.family import Family, Field, Must
from tpformer.weights.llama import LLAMA

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"


def code(*names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def value(one) -> str:
    return {"True": "true", "False": "false", "None": "null"}.get(str(one), str(one))


def config_rows(family: Family) -> list[str]:
    rows = []
    for name, known in family.fields.items():
        if isinstance(known, Field):
            words = "; ".join(f"{theirs} is {ours}" for theirs, ours in (known.values or {}).items())
            words += "the first layers, [0, 1, ...]" if known.prefix else ""
            names = code(name, known.also) if known.also else code(name)
            rows.append(f"| {names} | {code(known.ours)}{': ' + words if words else ''} | {value(known.default)} |")
        elif isinstance(known, Must):
            rows.append(f"| {code(name)} | only {value(known.value)}: {known.why} | |")
        else:
            rows.append(f"| {code(name)} | not used: {known.why} | |")
    return rows


def tensor_rows(family: Family) -> list[str]:
    def row(one) -> str:
        words = ", transposed" if one.transposed else ""
        if one.part is not None:
            index, number = one.part
            words += ", of one expert" + (f": half {index + 1}" if number == 2 else "")
        return f"| {code(one.theirs)} | {code(*one.ours)}{words} |"

    skipped = [f"| {code(name)} | skipped: a buffer of old files |" for name in family.buffers]
    return [row(one) for one in family.tensors] + skipped


def table(family: Family) -> str:
    """A family's tables. Those of Llama's kind have only the rows that Llama's have not."""
    base = LLAMA if family is not LLAMA and family.has_rope else None
    known = {*config_rows(base), *tensor_rows(base)} if base else set()
    config, tensors = ([row for row in rows(family) if row not in known] for rows in (config_rows, tensor_rows))
    fixed = ", ".join(f"{name} = {value(one)}" for name, one in family.fixed.items())
    lines = [f"Always: {fixed}.", "", f"| {family.model_type} | here | default |", "|---|---|---|", *config]
    if tensors:
        lines += ["", "| tensor | parameters here |", "|---|---|", *tensors]
    return "\n".join(lines)


def test_the_page_has_every_family():
    page = PAGE.read_text()
    for family in FAMILIES.values():
        assert table(family) in page, f"{family.model_type}: take what python tests/weights/test_tables.py prints"
    assert len(re.findall(r"^Always: ", page, re.M)) == len(FAMILIES)


if __name__ == "__main__":
    for each in FAMILIES.values():
        print(f"### {each.architecture}\n\n{table(each)}\n")

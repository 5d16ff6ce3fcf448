"""PTX as Triton writes it, read into statements, each with the Python line that it comes from.

Belongs here: the text alone. The compile check reads events from it (ptx.py), and the executor runs it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction and where it comes from."""

    opcode: str
    rest: str
    """The text of its operands."""
    predicate: str
    """The register that guards it, or the empty string."""
    negated: bool
    """Whether it runs where the predicate is false."""
    source: str
    """The Python line, as file.py:12."""

    @property
    def parts(self) -> list[str]:
        """The opcode's parts: ld, global, sys, acquire, b32."""
        return self.opcode.split(".")

    @property
    def operands(self) -> list[str]:
        """What it reads and writes."""
        return split_operands(self.rest)

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " * bool(self.predicate)
        return f"{self.source} ({guard}{self.opcode} {self.rest})"


def split_operands(text: str) -> list[str]:
    """The operands between commas. A comma within brackets or braces separates nothing."""
    return [operand.strip() for operand in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|[^,{[])+", text) if operand.strip()]


def statements(ptx: str) -> Iterator[tuple[str, str]]:
    """(text, Python line) of each instruction, label and declaration, and of the lines of a kernel's head."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', ptx, re.M))
    source = "?"
    for line in ptx.split("\t.section\t.debug")[0].splitlines():
        if location := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            if location[2] != "0":
                source = f"{files.get(location[1], '?')}:{location[2]}"
            continue
        for text in line.split("//")[0].split(";"):
            text = text.strip("{ \t")  # inline assembly stands in braces
            while text.endswith("}") and text.count("}") > text.count("{"):
                text = text[:-1].strip()
            if text:
                yield text, source


def read_instruction(text: str, source: str) -> Instruction | None:
    """The instruction of a statement, or None if it is none."""
    match = re.match(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
    return Instruction(match[3], match[4], match[2] or "", bool(match[1]), source) if match else None

"""PTX of one kernel, as Triton writes it for sm_80, read into instructions.

Belongs here: the text alone. What an instruction does is in code.py.
"""

import re
from dataclasses import dataclass, field


class Unsupported(ValueError):
    """PTX that the executor does not know."""


@dataclass(frozen=True)
class Instruction:
    """One instruction and where it comes from."""

    opcode: str
    operands: tuple[str, ...]
    predicate: str
    """The register that guards it, or the empty string."""
    negated: bool
    """Whether it runs where the predicate is false."""
    source: str
    """The Python line, as file.py:12."""
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode's parts: ld, global, sys, acquire, b32."""
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"{self.source} ({self.text})"


@dataclass
class Kernel:
    """The kernel's parameters, registers and instructions."""

    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(offset, bytes) by name, in the order of the launch's arguments."""
    registers: dict[str, str] = field(default_factory=dict)
    """Types by name: pred, b16, b32, b64, f32 and so on."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """The index of the instruction behind each label."""

    @property
    def parameter_bytes(self) -> int:
        """The size of the block of parameters."""
        return max((offset + size for offset, size in self.parameters.values()), default=0)


def split_operands(text: str) -> list[str]:
    """The operands between commas. A comma within brackets or braces separates nothing."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [operand.strip() for operand in found if operand.strip()]


def parse(ptx: str) -> Kernel:
    """Read the PTX of one kernel. Unsupported for a statement that is none of the known kinds."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', ptx, re.M))
    body = ptx.split("\t.section\t.debug")[0]
    kernel, source, inside, offset = Kernel(), "?", False, 0
    for bits, name in re.findall(r"\.param \.[busf](\d+)(?: \.ptr \.global \.align \d+)? (\w+)", body):
        size = int(bits) // 8
        offset = -(-offset // size) * size
        kernel.parameters[name] = (offset, size)
        offset += size
    for line in body.splitlines():
        text = line.split("//")[0].strip()
        if location := re.match(r"\.loc\s+(\d+)\s+(\d+)", text):
            if location[2] != "0":
                source = f"{files.get(location[1], '?')}:{location[2]}"
        elif label := re.match(r"(\$\w+):$", text):
            kernel.labels[label[1]] = len(kernel.instructions)
        elif inside:
            for statement in text.split(";"):
                read_statement(kernel, statement.strip(), source)
        inside = line != "}" and (inside or text == "{")  # the last brace alone is at the left margin
    return kernel


def read_statement(kernel: Kernel, text: str, source: str) -> None:
    """Add what one statement declares or does to the kernel."""
    if text.startswith("{"):  # inline assembly has registers of its own
        text = text[1:].strip()
    while text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1].strip()
    if declaration := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
        for name in split_operands(declaration[2]):
            several = re.match(r"(%\w+)<(\d+)>", name)
            for register in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
                if kernel.registers.setdefault(register, declaration[1]) != declaration[1]:
                    raise Unsupported(f"{source}: register {register} is declared with two types")
    elif text and not text.startswith(".pragma"):
        match = re.match(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        if match is None:
            raise Unsupported(f"{source}: {text!r} is no instruction that the executor can read")
        negation, predicate, opcode, operands = match.groups()
        kernel.instructions.append(
            Instruction(opcode, tuple(split_operands(operands)), predicate or "", bool(negation), source, text)
        )

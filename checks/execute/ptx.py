"""The PTX of one kernel for sm_80: its parameters, registers, labels and instructions.

Belongs here: what a kernel declares. What an instruction does is in code.py.
"""

import re
from dataclasses import dataclass, field

from checks.compile.statements import Instruction, read_instruction, split_operands, statements

# statements that say nothing to the executor
SILENT = re.compile(r"\.(version|target|address_size|file|extern|visible|reqntid|maxnreg|global|pragma)\b.*|\)")


class Unsupported(ValueError):
    """PTX that the executor does not know."""


@dataclass
class Kernel:
    """The kernel's parameters, registers and instructions."""

    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(offset, bytes) by name, in the order of the launch's arguments."""
    registers: dict[str, str] = field(default_factory=dict)
    """Types by name: pred, b16, b32 or b64."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """The index of the instruction behind each label."""


def parse(ptx: str) -> Kernel:
    """Read the PTX of one kernel. Unsupported for a statement that is none of the known kinds."""
    kernel, end = Kernel(), 0
    for text, source in statements(ptx):
        if parameter := re.match(r"\.param \.[busf](\d+)(?: \.ptr \.global \.align \d+)? (\w+)", text):
            size = int(parameter[1]) // 8
            offset = -(-end // size) * size
            kernel.parameters[parameter[2]], end = (offset, size), offset + size
        elif label := re.fullmatch(r"(\$\w+):", text):
            kernel.labels[label[1]] = len(kernel.instructions)
        elif declaration := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
            for name in split_operands(declaration[2]):
                several = re.match(r"(%\w+)<(\d+)>", name)
                for register in [f"{several[1]}{i}" for i in range(int(several[2]))] if several else [name]:
                    if kernel.registers.setdefault(register, declaration[1]) != declaration[1]:
                        raise Unsupported(f"{source}: register {register} is declared with two types")
        elif instruction := read_instruction(text, source):
            kernel.instructions.append(instruction)
        elif not SILENT.fullmatch(text):
            raise Unsupported(f"{source}: {text!r} is nothing that the executor can read")
    return kernel

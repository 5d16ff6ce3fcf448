"""PTX as events on a control-flow graph, and the rules of the protocol between ranks that are checked on it.

Belongs here: what is read from PTX. Its blocks do not stand in the program's order, so rules about order follow the
branches. Loops are read from TTGIR (ttgir.py).
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .statements import Instruction, read_instruction, statements

WIDE = 16  # bytes of the widest store of one thread
WARP = 32  # threads

# kinds of events, each by a pattern for the beginning of its instructions; the first that matches counts
KINDS = {
    "barrier": r"bar(rier)?(\.cta)?\.sync",
    "warp barrier": r"bar\.warp\.sync",
    "proxy fence": r"fence\.proxy\.async",
    "fence": r"fence\.(acq_rel|sc)|membar",
    "tma load": r"cp\.async\.bulk\.\S*shared::c(ta|luster)\.global",
    "tma store": r"cp\.(reduce\.)?async\.bulk\.\S*global\.shared::c",
    "cp.async": r"cp\.async\.c[ag]\.",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"mma\.sync",
    "atomic": r"(atom|red)\.(?!\S*shared)|(ld|st)\.\S*(acquire|release|relaxed)",
    "store": r"st\.global",
    "load": r"ld\.global",
}


class Event(NamedTuple):
    """An instruction that matters to a rule or to a count."""

    kind: str
    """A key of KINDS."""
    opcode: str
    source: str
    """The Python line, as file.py:12."""
    answered: bool = False
    """Whether something reads what it returns."""

    @property
    def order(self) -> str:
        """An atomic's order: release, acquire, acq_rel or relaxed, which other events are, too."""
        found = re.search(r"release|acquire|acq_rel", self.opcode) if self.kind == "atomic" else None
        return found.group() if found else "relaxed"

    @property
    def scope(self) -> str:
        """sys, gpu, cluster, cta or none."""
        found = re.search(r"\.(sys|gpu|cluster|cta)\b", self.opcode)
        return found.group(1) if found else "none"

    @property
    def releases(self) -> bool:
        """Whether it releases what was stored before it: a fence does by the flags that are set after it."""
        return self.kind == "fence" or self.order in ("release", "acq_rel")

    @property
    def fences(self) -> bool:
        """Whether it is a fence of system scope."""
        return self.kind == "fence" and self.scope == "sys"

    @property
    def sets_flag(self) -> bool:
        """Whether it is a relaxed write of system scope that nobody waits for."""
        relaxed = self.kind == "atomic" and self.order == "relaxed" and not self.opcode.startswith("ld")
        return relaxed and self.scope == "sys" and not self.answered

    @property
    def acquires(self) -> bool:
        """Whether it acquires what another thread released."""
        return self.order in ("acquire", "acq_rel")

    @property
    def width(self) -> int:
        """Bytes that a load or store moves per thread."""
        size = re.search(r"(?:\.v(\d))?\.[a-z]+(\d+)$", self.opcode)
        assert size is not None, self.opcode
        return int(size.group(1) or 1) * int(size.group(2)) // 8


@dataclass
class Block:
    """Instructions without a branch between them, and the blocks that may come next."""

    label: str | None = None
    events: list[Event] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True
    successors: list["Block"] = field(default_factory=list, repr=False)
    predecessors: list["Block"] = field(default_factory=list, repr=False)
    is_entry: bool = False


@dataclass
class Program:
    """All blocks of a kernel, in the order of the text."""

    blocks: list[Block]

    @property
    def events(self) -> list[Event]:
        """All events, in the order of the text."""
        return [event for block in self.blocks for event in block.events]

    def count(self, kind: str) -> int:
        """How many events are of a kind."""
        return sum(event.kind == kind for event in self.events)


def parse(ptx: str) -> Program:
    """Read the PTX of one kernel, which must have Python lines in it."""
    read = set(re.findall(r",\s*(%\w+)", ptx))  # what an instruction writes stands before its first comma
    blocks: list[Block] = []
    for text, source in statements(ptx):
        if re.match(r"(\.visible |\.weak )?\.(entry|func)", text):
            blocks.append(Block(is_entry=True))
        elif label := re.match(r"(\$L__BB\w+):", text):
            blocks.append(Block(label.group(1)))
        elif blocks and (instruction := read_instruction(text, source)) and add(instruction, blocks[-1], read):
            blocks.append(Block())
    connect(blocks)
    return Program(blocks)


def add(instruction: Instruction, block: Block, read: set[str]) -> bool:
    """Add an instruction's event and its targets to the block, and return whether it ends the block.

    read: the registers that the kernel reads.
    """
    opcode, operands = instruction.opcode, instruction.rest
    if opcode in ("bra", "bra.uni"):
        if not operands.startswith("$L__BB"):  # a loop within inline assembly, which ends where it began
            return False
        block.targets.append(operands)
    elif opcode in ("brx.idx", "brx.idx.uni"):
        block.targets.append("any")
    elif opcode not in ("ret", "exit", "trap"):
        if kind := kind_of(opcode):
            answered = opcode.startswith("atom") and operands.partition(",")[0] in read
            block.events.append(Event(kind, opcode, instruction.source, answered))
        return False
    block.falls_through = bool(instruction.predicate)
    return True


@functools.cache
def kind_of(opcode: str) -> str | None:
    """The kind of an opcode, if any. It is cached because a kernel has thousands of instructions, but few opcodes."""
    return next((kind for kind, pattern in KINDS.items() if re.match(pattern, opcode)), None)


def connect(blocks: list[Block]) -> None:
    """Fill in the blocks' successors, and their predecessors among the blocks that can be reached."""
    labels = {block.label: block for block in blocks if block.label}
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        for target in block.targets:
            block.successors += labels.values() if target == "any" else [labels[target]]
        if block.falls_through and following is not None and not following.is_entry:
            block.successors.append(following)
    pending = [block for block in blocks if block.is_entry]
    reached = set(map(id, pending))
    while pending:
        block = pending.pop()
        for successor in block.successors:
            successor.predecessors.append(block)
            if id(successor) not in reached:
                reached.add(id(successor))
                pending.append(successor)


def search(block: Block, index: int, backwards: bool, stop: Callable[[Event], bool]) -> Iterator[Event | None]:
    """The first event after (or before) block.events[index] on each path for which stop is true; None if none comes."""
    seen = set()
    pending = [(block, block.events[:index][::-1] if backwards else block.events[index + 1 :])]
    while pending:
        block, events = pending.pop()
        found = next((event for event in events if stop(event)), None)
        if found is not None:
            yield found
            continue
        nexts = block.predecessors if backwards else block.successors
        if not nexts or (backwards and block.is_entry):
            yield None
        for following in nexts:
            if id(following) not in seen:
                seen.add(id(following))
                pending.append((following, following.events[::-1] if backwards else following.events))


def barrier_before_release(program: Program, warps: int) -> list[str]:
    """Rule: on every path, a bar.sync stands between the stores and the release, or the fence.

    Both order only what their own thread did and saw. In a kernel that releases to other ranks, local releases need
    the barrier, too: by them programs of a rank hand over what one of them then publishes.
    """
    barriers = ("barrier", "warp barrier") if warps == 1 else ("barrier",)
    publishes = any(event.releases and event.scope == "sys" for event in program.events)
    violations = []
    for block in program.blocks:
        for index, event in enumerate(block.events):
            if not (event.releases and publishes):
                continue
            before = search(block, index, True, lambda e: e.kind in (*barriers, "store", "tma store"))
            for found in before:
                if found is None or found.kind not in barriers:
                    what = "nothing" if found is None else f"{found.opcode} ({found.source})"
                    violations.append(f"{event.opcode} ({event.source}) comes after {what} without a bar.sync between")
                    break
    return violations


def fence_before_flag(program: Program) -> list[str]:
    """Rule: on every path, a fence of system scope stands before each relaxed write of a flag, and no store between."""
    violations = []
    for block in program.blocks:
        for index, event in enumerate(block.events):
            before = search(block, index, True, lambda e: e.fences or e.kind in ("store", "tma store"))
            for found in before if event.sets_flag else ():
                if found is None or not found.fences:
                    what = "nothing" if found is None else f"{found.opcode} ({found.source})"
                    violations.append(f"{event.opcode} ({event.source}) comes after {what} without a fence between")
                    break
    return violations


def no_tma_store_before_release(program: Program) -> list[str]:
    """Rule: a kernel that releases has no TMA stores, which before Triton 3.8 a release does not cover."""
    stores = [event for event in program.events if event.kind == "tma store"]
    if stores and any(event.releases and event.scope == "sys" for event in program.events):
        return [f"{stores[0].opcode} ({stores[0].source}) in a kernel that releases"]
    return []


def fence_before_tma_load(program: Program) -> list[str]:
    """Rule: fence.proxy.async stands between an acquire and TMA loads, as peers wrote by the generic proxy."""

    def stop(event: Event) -> bool:
        fence = event.kind == "proxy fence" and event.opcode in ("fence.proxy.async", "fence.proxy.async.global")
        return fence or event.kind == "tma load"

    violations = []
    for block in program.blocks:
        for index, event in enumerate(block.events):
            if event.acquires and event.scope == "sys":
                reached = [found for found in search(block, index, False, stop) if found and found.kind == "tma load"]
                if reached:
                    where = f"{event.opcode} ({event.source})"
                    violations.append(f"{where} reaches a TMA load ({reached[0].source}) without fence.proxy.async")
    return violations


def bytes_in_flight(ptx: str) -> int:
    """The most bytes that a warp has asked of global memory when it comes to the first use of any of them.

    It follows the text, and forgets loads into registers at labels. Bytes that TMA loads are not in the instructions.
    """
    loads: dict[str, int] = {}
    groups, most = [0], 0
    for text, source in statements(ptx):
        instruction = read_instruction(text, source)
        if instruction is None:
            loads = {} if text.startswith("$") else loads
            continue
        opcode, operands = instruction.opcode, instruction.rest
        kind = kind_of(opcode)
        used = set(re.findall(r"%\w+", operands.partition("[")[2] if kind == "load" else text))
        if opcode.startswith("cp.async.wait") or used & loads.keys():
            most = max(most, sum(loads.values()) + sum(groups))
            if used & loads.keys():
                loads = {}
        if opcode == "cp.async.commit_group":
            groups.append(0)
        elif opcode == "cp.async.wait_group":
            groups = groups[max(0, len(groups) - 1 - int(operands, 0)) :]
        elif kind == "cp.async":
            groups[-1] += WARP * int(operands.split(",")[2], 0)
        elif kind == "load":
            targets = re.findall(r"%\w+", operands.partition("[")[0])
            loads |= dict.fromkeys(targets, WARP * Event(kind, opcode, "").width // len(targets))
    return most

"""TTGIR as a tree of operations, and the rules about waits and loads that are checked on it.

Belongs here: what is read from TTGIR. Its operations stand in the order that software pipelining gave them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

COPIES = ("ttg.async_copy_global_to_local", "ttng.async_tma_copy_global_to_local", "ttng.async_tma_gather")
LOADS = ("tt.load", "tt.descriptor_load")
DOTS = ("tt.dot", "tt.dot_scaled", "ttng.warp_group_dot", "ttng.tc_gen5_mma", "ttng.tc_gen5_mma_scaled")
LOOPS = ("scf.for", "scf.while")
TABLE = "an address from memory"  # the origin of a pointer that no argument gives

NAME = r"%[\w.$-]+"
USE = rf"{NAME}(?:#\d+)?"
RESULTS = rf"((?:{NAME}(?::\d+)?(?:, )?)+) = "
CARRIED = r"(?:iter_args|scf\.while )\((.*?)\) (?:->|:)"
LOCATION = r"\s*loc\((#loc\d*|unknown)\)$"


@dataclass(eq=False)
class Value:
    """An argument of a function, or result number `index` of an operation. A loop's argument counts as its result."""

    name: str
    operation: "Operation | None" = None
    index: int = 0
    is_pointer: bool = False


@dataclass(eq=False)
class Operation:
    """One operation, with those in its regions."""

    name: str
    text: str
    """The line without its location."""
    location: str = ""
    parent: "Operation | None" = None
    region: int = 0
    """The number of the parent's region in which it stands."""
    operands: list[Value] = field(default_factory=list)
    carried: list[Value] = field(default_factory=list)
    """The initial values of what a loop carries."""
    children: list["Operation"] = field(default_factory=list)
    regions: int = 1

    def walk(self) -> Iterator["Operation"]:
        """All operations inside of this one, in program order."""
        for child in self.children:
            yield child
            yield from child.walk()

    def loop(self) -> "Operation | None":
        """The innermost loop around it."""
        operation = self.parent
        while operation is not None and operation.name not in LOOPS:
            operation = operation.parent
        return operation

    @property
    def waits(self) -> bool:
        """Whether it acquires what another rank published. Atomics of one rank, acq_rel at gpu scope, do not."""
        if self.name.startswith("tt.atomic"):
            return re.search(r"\bacquire\b|\bacq_rel, sys\b", self.text) is not None
        return self.name == "tt.elementwise_inline_asm" and "acquire" in self.text

    @property
    def loads(self) -> bool:
        """Whether it reads more than a scalar from global memory."""
        return self.name in COPIES or (self.name in LOADS and "tensor<" in self.text)


@dataclass
class Module:
    """A kernel's functions, and the Python lines of their operations."""

    functions: list[Operation]
    locations: dict[str, str]

    def source(self, operation: Operation) -> str:
        """The Python line of an operation, as file.py:12."""
        reference = operation.location
        for _ in range(len(self.locations)):
            text = self.locations.get(reference, "")
            if found := re.search(r'"(?:[^"]*/)?([^"/]+)":(\d+)', text):
                return f"{found.group(1)}:{found.group(2)}"
            following = re.search(r"#loc\d*", text)  # of a call site the first: the line in the function called
            if following is None:
                break
            reference = following.group()
        return "?"

    def operations(self) -> Iterator[Operation]:
        """All operations, in program order."""
        for function in self.functions:
            yield from function.walk()

    def releases(self) -> int:
        """How many atomics release to other ranks."""
        return sum(re.search(r"\b(release|acq_rel), sys\b", atomic.text) is not None for atomic in self.atomics())

    def fences(self) -> int:
        """How many fences order relaxed flags for other ranks."""
        fence = r"\b(fence\.(acq_rel|sc)|membar)\.sys\b"
        return sum(
            operation.name == "tt.elementwise_inline_asm" and re.search(fence, operation.text) is not None
            for operation in self.operations()
        )

    def flags(self) -> int:
        """How many relaxed atomics of system scope set flags: nobody asks what they return."""
        used = {id(value.operation) for operation in self.operations() for value in operation.operands}
        return sum("relaxed, sys" in atomic.text and id(atomic) not in used for atomic in self.atomics())

    def acquires(self) -> int:
        """How many atomics acquire from other ranks."""
        return sum(re.search(r"\b(acquire|acq_rel), sys\b", atomic.text) is not None for atomic in self.atomics())

    def atomics(self) -> Iterator[Operation]:
        """All atomic operations."""
        return (operation for operation in self.operations() if operation.name.startswith("tt.atomic"))

    def scalar_stores(self) -> set[str]:
        """The Python lines that store scalars and no blocks."""
        stores = [operation for operation in self.operations() if operation.name == "tt.store"]
        blocks = {self.source(store) for store in stores if "tensor<" in store.text}
        return {self.source(store) for store in stores} - blocks


def parse(ttgir: str) -> Module:
    """Read the TTGIR of one kernel."""
    locations = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", ttgir, re.M))
    functions: list[Operation] = []
    stack: list[Operation] = []
    scopes: list[dict[str, Value]] = [{}]  # sibling regions use the same names again
    for line in ttgir.splitlines():
        text = line.strip()
        if not text or text.startswith(("#", "//", "module", "^")):
            continue
        if text.startswith("}"):
            if len(scopes) > 1:
                scopes.pop()
            if text.endswith("{"):  # `} else {`, `} do {`: the next region of the same operation
                scopes.append({})
                stack[-1].regions += 1
            elif stack:
                stack.pop().location = location_of(text)
            continue
        operation = read_operation(text, scopes, stack[-1] if stack else None)
        if operation.name == "tt.func":
            functions.append(operation)
        if text.endswith("{"):
            stack.append(operation)
            scopes.append(region_arguments(operation))
    return Module(functions, locations)


def location_of(text: str) -> str:
    """The location at the end of a line, or an empty text."""
    found = re.search(LOCATION, text)
    return found.group(1) if found else ""


def read_operation(text: str, scopes: list[dict[str, Value]], parent: Operation | None) -> Operation:
    """Read an operation, look up its operands, and enter its results in the innermost scope."""
    location, text = location_of(text), re.sub(LOCATION, "", text)
    results = re.match(RESULTS, text)
    body = text[results.end() :] if results else text
    name = re.match(r'"?([a-z_]\w*(?:\.\w+)+)', body)
    operation = Operation(name.group(1) if name else "?", text, location, parent)
    if operation.name != "tt.func":
        initial = re.search(CARRIED, body)
        if initial is not None:
            operation.carried = [look_up(pair.split(" = ")[1], scopes) for pair in initial.group(1).split(", ") if pair]
        operation.operands = [look_up(use, scopes) for use in re.findall(USE, body)]
    for result in results.group(1).split(", ") if results else []:
        base, _, count = result.partition(":")
        for index in range(int(count or 1)):
            scopes[-1][f"{base}#{index}" if count else base] = Value(base, operation, index)
    if parent is not None:
        operation.region = parent.regions - 1
        parent.children.append(operation)
    return operation


def look_up(use: str, scopes: list[dict[str, Value]]) -> Value:
    """The value of that name, or a new one if it is the argument of a region that no rule looks at."""
    return next((scope[use] for scope in reversed(scopes) if use in scope), Value(use))


def region_arguments(operation: Operation) -> dict[str, Value]:
    """The names that an operation gives to its region's arguments."""
    if operation.name == "tt.func":
        arguments = re.findall(rf'({NAME}): (.*?) loc\("([\w.]+)"', operation.text)
        return {
            name: Value(source, is_pointer=kind.startswith(("!tt.ptr", "!tt.tensordesc")))
            for name, kind, source in arguments
        }
    if operation.carried and (found := re.search(CARRIED, operation.text)):
        pairs = enumerate(found.group(1).split(", "))
        return {pair.split(" = ")[0]: Value(pair, operation, index) for index, pair in pairs}
    return {}


def origins(value: Value, seen: set[int] | None = None) -> set[str]:
    """The kernel's pointer and descriptor arguments that an address is computed from, by name; TABLE for memory."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    operation = value.operation
    if operation is None:
        return {value.name} if value.is_pointer else set()
    if operation.name == "tt.int_to_ptr":
        return {TABLE}
    if operation.name in LOADS:
        return set()
    sources = operation.operands
    if operation.name in (*LOOPS, "scf.if"):
        ends = [child.operands for child in operation.children if child.name in ("scf.yield", "scf.condition")]
        if operation.name == "scf.while":  # its two regions may carry different values
            sources = [*operation.carried, *(source for end in ends for source in end)]
        else:
            sources = [values[value.index] for values in (operation.carried, *ends) if value.index < len(values)]
    return set().union(*(origins(source, seen) for source in sources))


def system_scope(module: Module, local_atomics: int) -> list[str]:
    """Rule: atomics have system scope, but for the case's number of local ones, which are acq_rel at gpu scope.

    The local ones count tiles of several programs, for whose stores one program then publishes.
    """
    local = [atomic for atomic in module.atomics() if re.search(r"\bsys\b", atomic.text) is None]
    weak = [atomic for atomic in local if re.search(r"\bacq_rel, gpu\b", atomic.text) is None]
    violations = [f"not acq_rel at gpu scope: {module.source(atomic)}" for atomic in weak]
    if len(local) != local_atomics:
        lines = ", ".join(module.source(atomic) for atomic in local) or "none"
        violations.append(f"{len(local)} atomics below system scope instead of {local_atomics}: {lines}")
    return violations


def dot_loops(module: Module) -> list[Operation]:
    """The innermost loops around dots. Where the pipeliner peeled off a step, that dot's loop is an outer one, and is
    not among them."""
    loops = {id(loop): loop for op in module.operations() if op.name in DOTS and (loop := op.loop()) is not None}
    return [loop for loop in loops.values() if not any(id(operation) in loops for operation in loop.walk())]


def no_wait_in_dot_loop(module: Module) -> list[str]:
    """Rule: the innermost loop around a dot has no wait.

    That loop is pipelined: its loads would move over the wait, or the wait would stop the pipelining.
    """
    violations = []
    for loop in dot_loops(module):
        wait = next((operation for operation in loop.walk() if operation.waits), None)
        if wait is not None:
            violations.append(f"a wait ({module.source(wait)}) inside of the dot's loop ({module.source(loop)})")
    return violations


def loads_run_ahead(module: Module) -> list[str]:
    """Rule: the innermost loop around a dot is pipelined, so its first asynchronous copies stand before it.

    Otherwise each step waits for its own loads. The buffers, the registers and the code's length do not show it.
    """
    violations = []
    for loop in dot_loops(module):
        before: list[Operation] = []
        for sibling in reversed(earlier(loop)):
            if any(child.name in DOTS for child in sibling.walk()):
                break
            before += (sibling, *sibling.walk())
        copies = any(operation.name in COPIES for operation in loop.walk())
        if copies and not any(operation.name in COPIES for operation in before):
            violations.append(f"no load of the dot's loop ({module.source(loop)}) runs ahead of it")
    return violations


def no_load_before_wait(module: Module, own: frozenset[str]) -> list[str]:
    """Rule: a wait stands before each load that is not from arguments in `own`, and before it in its loop.

    Kernels that never wait receive nothing, so the rule does not apply to them.
    """
    violations = []
    for function in module.functions:
        if not any(operation.waits for operation in function.walk()):
            continue
        for load in function.walk():
            if load.loads and not is_own(load, own):
                what = f"{load.name} from {', '.join(sorted(origins(load.operands[0]))) or '?'} ({module.source(load)})"
                if not follows_wait(load):
                    violations.append(f"{what} without a wait before it")
                elif late := wait_after(load):
                    violations.append(f"{what} before the wait ({module.source(late)}) of its loop")
    return violations


def is_own(load: Operation, own: frozenset[str]) -> bool:
    """Whether a load's address comes from arguments in `own` alone."""
    found = origins(load.operands[0])
    return bool(found) and found <= own


def always_waits(operation: Operation) -> bool:
    """Whether an operation waits each time it runs. A loop counts if one of its rounds would wait."""
    return operation.waits or (operation.name in LOOPS and any(always_waits(child) for child in operation.children))


def earlier(operation: Operation) -> list[Operation]:
    """The operations before this one in its own region."""
    assert operation.parent is not None
    siblings = [child for child in operation.parent.children if child.region == operation.region]
    return siblings[: siblings.index(operation)]


def follows_wait(operation: Operation) -> bool:
    """Whether a wait comes before an operation on every path."""
    while operation.parent is not None:
        if any(always_waits(sibling) for sibling in earlier(operation)):
            return True
        operation = operation.parent
    return False


def wait_after(load: Operation) -> Operation | None:
    """The first wait of a loop around a load, if it comes after the load."""
    loop = load.loop()
    while loop is not None:
        operations = list(loop.walk())
        first = next((operation for operation in operations if operation.waits), None)
        if first is not None and operations.index(first) > operations.index(load):
            return first
        loop = loop.loop()
    return None

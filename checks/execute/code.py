"""Generates Python from PTX: a function for each straight-line segment, numpy over the lanes of the warps that run it.

Belongs here: what each instruction means. A generated function takes the Warps (machine.py) that execute it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import arithmetic
from .ptx import Instruction, Kernel, Unsupported, split_operands

# type -> (the view of a register file, numpy's type, bits)
TYPES = {
    "pred": ("p", "bool_", 1),
    **{f"{kind}{bits}": (view, f"{numpy}{bits}", bits)
       for bits, letter in ((16, "h"), (32, "r"), (64, "d"))
       for kind, view, numpy in (("b", letter, "uint"), ("u", letter, "uint"),
                                 ("s", letter + "s", "int"), ("f", letter + "f", "float"))},
    "b8": ("h", "uint8", 8), "u8": ("h", "uint8", 8), "s8": ("hs", "int8", 8),
    "bf16": ("h", "uint16", 16), "f16x2": ("r", "uint32", 32), "bf16x2": ("r", "uint32", 32),
}  # fmt: skip
FILES = {1: "p", 16: "h", 32: "r", 64: "d"}
BRANCHES = re.compile(r"bra(\.uni)?|ret|bar\.sync|bar\.warp\.sync")
# instructions after which a segment ends: control, and what other programs can see or answer
ENDS = re.compile(BRANCHES.pattern + r"|atom\..*|red\..*|(ld|st)\.\S*(acquire|release|relaxed|volatile)\S*")
UFUNCS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "min": "minimum", "max": "maximum", "neg": "negative", "abs": "absolute", "not": "invert", "ex2": "exp2",
    "lg2": "log2", "rcp": "reciprocal", "sqrt": "sqrt", "sin": "sin", "cos": "cos",
}  # fmt: skip
COMPARISONS = {
    "eq": "{x} == {y}", "ne": "{x} != {y}", "lt": "{x} < {y}", "le": "{x} <= {y}", "gt": "{x} > {y}",
    "ge": "{x} >= {y}", "lo": "{x} < {y}", "ls": "{x} <= {y}", "hi": "{x} > {y}", "hs": "{x} >= {y}",
    "equ": "~(({x} < {y}) | ({x} > {y}))", "neu": "{x} != {y}", "ltu": "~({x} >= {y})", "leu": "~({x} > {y})",
    "gtu": "~({x} <= {y})", "geu": "~({x} < {y})", "num": "({x} == {x}) & ({y} == {y})",
    "nan": "({x} != {x}) | ({y} != {y})",
}  # fmt: skip
ROUNDINGS = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}
WIDER = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}
MMA_FLOPS = 2 * 16 * 8 * 16
ORDERS = ("acquire", "release", "acq_rel", "relaxed", "volatile")


@dataclass
class Segment:
    """Instructions that run one after another: all of them, or none."""

    run: Callable[[Any], None]
    """Executes them, except a last one that branches."""
    count: int
    flops: int
    """Of one warp on tensor cores."""
    last: Instruction
    line: int
    """The index of `last`."""


class Code:
    """A kernel's segments."""

    def __init__(self, kernel: Kernel, in_flight: int = 0) -> None:
        """Unsupported if there are instructions that the executor does not know."""
        self.kernel = kernel
        self.in_flight = in_flight
        """Bytes that a warp asks of global memory before it uses any of them."""
        self.index: dict[str, tuple[str, int]] = {}
        self.counts = dict.fromkeys(FILES.values(), 0)
        for name, kind in kernel.registers.items():
            file = FILES[TYPES[kind][2]]
            self.index[name] = (file, self.counts[file])
            self.counts[file] += 1
        self.constants: dict[str, Any] = {}
        starts = sorted({0, *kernel.labels.values()} | {
            i + 1 for i, instruction in enumerate(kernel.instructions) if ENDS.fullmatch(instruction.opcode)
        })  # fmt: skip
        starts = [start for start in starts if start < len(kernel.instructions)]
        self.segments, unknown = [], []
        for start, end in zip(starts, [*starts[1:], len(kernel.instructions)], strict=True):
            lines = ["def segment(w):", " r,rs,rf,d,ds,df,h,hs,hf,p=w.views", " pass"]
            for line in range(start, end):
                try:
                    lines += [" " + text for text in self.emit(kernel.instructions[line], line)]
                except (Unsupported, KeyError, IndexError, ValueError):
                    unknown.append(str(kernel.instructions[line]))
            scope = {"np": np, "a": arithmetic, "k": self.constants}
            exec(compile("\n".join(lines), "<ptx>", "exec"), scope)
            last = kernel.instructions[end - 1]
            flops = MMA_FLOPS * sum(i.opcode.startswith("mma.") for i in kernel.instructions[start:end])
            self.segments.append(Segment(scope["segment"], end - start, flops, last, end - 1))  # type: ignore
        if unknown:
            raise Unsupported(f"the executor does not know {len(unknown)} instructions: {'; '.join(unknown[:5])}")
        self.labels = {label: starts.index(at) for label, at in kernel.labels.items() if at < len(kernel.instructions)}

    def constant(self, value: int | float, kind: str) -> str:
        """An expression for a constant of a type."""
        dtype, bits = np.dtype(TYPES[kind][1]), TYPES[kind][2]
        if isinstance(value, int) and dtype.kind in "iu":
            value = value & ((1 << bits) - 1)
            made = np.array(value, f"uint{bits}").view(dtype)[()]
        else:
            made = dtype.type(value)
        name = f"{kind} {value!r}"
        self.constants[name] = made
        return f"k[{name!r}]"

    def value(self, operand: str, kind: str) -> str:
        """An expression for an operand that is read as a type."""
        view, dtype, bits = TYPES[kind]
        if operand in self.index:
            file, number = self.index[operand]
            if FILES.get(bits) == file:
                return f"{view}[{number}]"
            if operand and TYPES[self.kernel.registers[operand]][2] < bits:
                raise Unsupported(f"{operand} is narrower than {kind}")
            return f"{file}[{number}].astype(np.{dtype})"
        if operand == "%tid.x":
            return "w.threads"
        if operand.startswith("%"):
            return f"w.special[{operand!r}]"
        if operand == "global_smem":
            return self.constant(0, kind)
        if operand in self.kernel.parameters:
            return self.constant(self.kernel.parameters[operand][0], kind)
        if operand.startswith(("0f", "0d")):
            size = len(operand) // 2 - 1
            name = f"{kind} {operand}"
            self.constants[name] = np.array(int(operand[2:], 16), f"uint{8 * size}").view(dtype)[()]
            return f"k[{name!r}]"
        return self.constant(int(operand, 0), kind)

    def target(self, operand: str, kind: str) -> str:
        """An expression for the register that an instruction of a type writes. A wider one is extended."""
        file, number = self.index[operand]
        bits = TYPES[kind][2]
        if FILES.get(bits) == file:
            return f"{TYPES[kind][0]}[{number}]"
        if bits > TYPES[self.kernel.registers[operand]][2]:
            raise Unsupported(f"{operand} is narrower than {kind}")
        return f"{file + 's' * (kind[0] == 's')}[{number}]"

    def mask(self, i: Instruction) -> str:
        """An expression for the lanes that execute an instruction; None for all."""
        return ("~" * i.negated + self.value(i.predicate, "pred")) if i.predicate else "None"

    def put(self, i: Instruction, target: str, kind: str, expression: str) -> list[str]:
        """Lines that write an expression of a type into a register."""
        if target == "_":
            return []
        register = self.target(target, kind)
        if i.predicate:
            return [f"np.copyto({register}, {expression}, where={self.mask(i)}, casting='unsafe')"]
        return [f"{register}[...] = {expression}"]

    def address(self, operand: str, kind: str) -> str:
        """An expression for the address in brackets."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise Unsupported(operand)
        base, offset = self.value(match[1], kind), int(match[2] or "0", 0)
        return base if offset == 0 else f"{base} + {self.constant(offset, kind)}"

    def emit(self, i: Instruction, line: int) -> list[str]:
        """Lines that execute one instruction; none for a branch or a barrier, which the machine takes."""
        operation, kind = i.parts[0], i.parts[-1]
        if BRANCHES.fullmatch(i.opcode):
            if operation != "bra" and (i.predicate or i.operands not in ((), ("0",), ("-1",), ("0xffffffff",))):
                raise Unsupported(i.text)
            return []
        if special := getattr(self, f"emit_{operation}", None):
            return special(i, line)
        if kind == "bf16x2" and operation == "fma":
            kind = "b32"
            expression = f"a.fma_bf16x2({', '.join(self.value(x, 'b32') for x in i.operands[1:])})"
        elif kind == "bf16" and operation == "fma":
            kind = "b16"
            wide = (f"a.widen_bf16({self.value(x, 'b16')})" for x in i.operands[1:])
            expression = f"a.bf16(a.fma({', '.join(wide)}))"
        elif kind in ("bf16", "bf16x2", "f16x2") or (kind == "f16" and operation not in ("add", "fma")):
            raise Unsupported(i.opcode)
        elif i.opcode == "mul.hi.u64":
            x, y = (self.value(operand, kind) for operand in i.operands[1:])
            expression = f"a.multiply_high({x}, {y})"
        elif operation in ("mul", "mad") and ("wide" in i.parts or "hi" in i.parts):
            expression, kind = self.wide_product(i, kind)
        elif operation in UFUNCS:
            name = UFUNCS[operation]
            if operation in ("min", "max") and kind[0] == "f" and "NaN" not in i.parts:
                name = "fmin" if operation == "min" else "fmax"
            sources = ", ".join(self.value(operand, kind) for operand in i.operands[1:])
            if not i.predicate:
                return [f"np.{name}({sources}, out={self.target(i.operands[0], kind)})"]
            expression = f"np.{name}({sources})"
        else:
            expression = self.expression(i, operation, kind)
        return self.put(i, i.operands[0], kind, expression)

    def wide_product(self, i: Instruction, kind: str) -> tuple[str, str]:
        """mul.wide, mad.wide and mul.hi: an expression and its type."""
        wide = WIDER[kind]
        dtype = TYPES[wide][1]
        x, y = (f"{self.value(operand, kind)}.astype(np.{dtype})" for operand in i.operands[1:3])
        if "hi" in i.parts:
            if i.parts[0] == "mad":
                raise Unsupported(i.opcode)
            return f"({x} * {y} >> np.{dtype}({TYPES[kind][2]})).astype(np.{TYPES[kind][1]})", kind
        return f"{x} * {y}" + (f" + {self.value(i.operands[3], wide)}" if i.parts[0] == "mad" else ""), wide

    def emit_setp(self, i: Instruction, line: int) -> list[str]:
        kind, name, targets = i.parts[-1], i.parts[1], i.operands[0].split("|")
        if i.parts[2] in ("and", "or", "xor") or kind in ("bf16", "bf16x2") or len(targets) != 1 + (kind == "f16x2"):
            raise Unsupported(i.opcode)
        form = "({x} < {y}) | ({x} > {y})" if name == "ne" and kind[0] == "f" else COMPARISONS[name]
        x, y = (self.value(operand, kind) for operand in i.operands[1:3])
        if kind != "f16x2":
            return self.put(i, targets[0], "pred", form.format(x=x, y=y))
        halves = (form.format(x=f"a.half({x}, {n})", y=f"a.half({y}, {n})") for n in range(2))
        pairs = zip(targets, halves, strict=True)
        return [text for target, half in pairs for text in self.put(i, target, "pred", half)]

    def expression(self, i: Instruction, operation: str, kind: str) -> str:
        """The expression of an operation that numpy has no function for."""
        given = [operand for operand in i.operands[1:] if self.kernel.registers.get(operand) != "pred"]
        x, *more = (self.value(operand, kind) for operand in given)
        numbers = [int(operand, 0) for operand in i.operands[2:] if re.fullmatch(r"-?(\d+|0x[0-9a-fA-F]+)", operand)]
        match operation:
            case "fma":
                return f"a.fma({x}, {more[0]}, {more[1]})"
            case "mad":
                return f"{x} * {more[0]} + {more[1]}"
            case "div":
                return f"{x} / {more[0]}" if kind[0] == "f" else f"a.divide({x}, {more[0]})"
            case "rem":
                return f"{x} - a.divide({x}, {more[0]}) * {more[0]}"
            case "shl" | "shr":
                _, dtype, bits = TYPES[kind]
                name = "left" if operation == "shl" else "right"
                count = f"np.minimum({self.value(i.operands[2], 'u32')}, {bits}).astype(np.{dtype})"
                return f"np.{name}_shift({x}, {count})"
            case "shf" if i.parts[1] == "l" and len(numbers) == 1:
                return f"a.funnel_left({x}, {more[0]}, {numbers[0]})"
            case "bfe":
                return f"a.extract({x}, {numbers[0]}, {numbers[1]})"
            case "prmt":
                return f"a.permute({x}, {more[0]}, {numbers[-1]})"
            case "selp":
                return f"np.where({self.value(i.operands[3], 'pred')}, {x}, {more[0]})"
            case "rsqrt":
                return f"np.float32(1) / np.sqrt({x})"
            case "shfl" if numbers[-1] & 0xFFFFFFFF == 0xFFFFFFFF and "|" not in i.operands[0]:
                return f"a.shuffle({x}, {i.parts[2]!r}, {self.value(i.operands[2], 'u32')}, {numbers[-2]})"
        raise Unsupported(i.opcode)

    def emit_mov(self, i: Instruction, line: int) -> list[str]:
        kind, (target, source) = i.parts[-1], i.operands
        bits = TYPES[kind][2]
        packed = split_operands(next((x for x in (target, source) if x.startswith("{")), "").strip("{}"))
        if not packed:
            return self.put(i, target, kind, self.value(source, kind))
        small, whole = f"b{bits // len(packed)}", f"b{bits}"
        shifts = [self.constant(n * bits // len(packed), whole) for n in range(len(packed))]
        if target.startswith("{"):
            parts = [f"{self.value(source, whole)} >> {shift}" for shift in shifts]
            return [text for part, value in zip(packed, parts, strict=True) for text in self.put(i, part, small, value)]
        pairs = zip(packed, shifts, strict=True)
        parts = [f"({self.value(part, small)}.astype(np.uint{bits}) << {shift})" for part, shift in pairs]
        return self.put(i, target, whole, " | ".join(parts))

    def emit_cvt(self, i: Instruction, line: int) -> list[str]:
        to, kind, sources = i.parts[-2], i.parts[-1], i.operands[1:]
        if to in ("bf16x2", "f16x2"):
            high, low = (f"a.{to[:-2]}({self.value(x, 'f32')})" for x in sources)
            return self.put(i, i.operands[0], "b32", f"a.pair({high}, {low})")
        (source,) = (self.value(x, kind) for x in sources)
        if to == "bf16" and kind == "f32":
            return self.put(i, i.operands[0], "b16", f"a.bf16({source})")
        if kind == "bf16" and to == "f32":
            return self.put(i, i.operands[0], "f32", f"a.widen_bf16({source})")
        if "bf16" in (to, kind):
            raise Unsupported(i.opcode)
        rounding = next((ROUNDINGS[part] for part in i.parts if part in ROUNDINGS), None)
        if rounding:
            source = f"np.{rounding}({source})"
        elif kind[0] == "f" and to[0] != "f":
            raise Unsupported(i.opcode)
        return self.put(i, i.operands[0], to, f"{source}.astype(np.{TYPES[to][1]})")

    def emit_ld(self, i: Instruction, line: int) -> list[str]:
        kind, (targets, address) = i.parts[-1], i.operands
        size = TYPES[kind][2] // 8
        if i.parts[1] == "param":
            where = address[1:-1].strip()
            offset = self.value(where.split("+")[0], "u64") if where in self.index else self.address(address, "u64")
            return self.put(i, targets, kind, f"w.parameter({offset}, np.{TYPES[kind][1]})")
        registers = split_operands(targets[1:-1]) if targets.startswith("{") else [targets]
        if any(part in ORDERS for part in i.parts):
            return self.atomic(i, line, "ld", targets.strip("{} "), address, [])
        if any(TYPES[self.kernel.registers[x]][2] != 8 * size for x in registers):
            raise Unsupported(i.opcode)
        tuple_of = ", ".join(self.target(x, f"b{8 * size}") for x in registers)
        space = self.space(i)
        where = self.address(address, "u64" if space == "global" else "u32")
        return [f"w.load(w.{space}_memory, {where}, {size}, ({tuple_of},), {self.mask(i)}, {line})"]

    def emit_st(self, i: Instruction, line: int) -> list[str]:
        kind, (address, sources) = i.parts[-1], i.operands
        size = TYPES[kind][2] // 8
        registers = split_operands(sources[1:-1]) if sources.startswith("{") else [sources]
        if any(part in ORDERS for part in i.parts):
            return self.atomic(i, line, "st", None, address, registers)
        values = ", ".join(self.value(x, f"b{8 * size}") for x in registers)
        space = self.space(i)
        where = self.address(address, "u64" if space == "global" else "u32")
        return [f"w.store(w.{space}_memory, {where}, {size}, ({values},), {self.mask(i)}, {line})"]

    def space(self, i: Instruction) -> str:
        """global or shared."""
        found = [part.split("::")[0] for part in i.parts if part.split("::")[0] in ("global", "shared")]
        if len(found) != 1:
            raise Unsupported(i.opcode)
        return found[0]

    def emit_atom(self, i: Instruction, line: int) -> list[str]:
        operation = next(part for part in i.parts if part in ("add", "exch", "cas", "min", "max", "and", "or"))
        return self.atomic(i, line, operation, i.operands[0], i.operands[1], list(i.operands[2:]))

    def emit_red(self, i: Instruction, line: int) -> list[str]:
        operation = next(part for part in i.parts if part in ("add", "min", "max", "and", "or"))
        return self.atomic(i, line, operation, None, i.operands[0], list(i.operands[1:]))

    def atomic(
        self, i: Instruction, line: int, operation: str, target: str | None, address: str, values: list[str]
    ) -> list[str]:
        """The line of an access that is atomic, which only integers in global memory have."""
        kind = i.parts[-1]
        if self.space(i) != "global" or kind[0] not in "bus":
            raise Unsupported(i.opcode)
        order = next((part for part in i.parts if part in ORDERS), "relaxed")
        scope = next((part for part in i.parts if part in ("sys", "gpu", "cta")), "gpu")
        written = self.target(target, kind) if target else "None"
        given = ", ".join(self.value(x, kind) for x in values)
        where = self.address(address, "u64")
        return [
            f"w.atomic({operation!r}, {order!r}, {scope!r}, np.{TYPES[kind][1]}, {where}, [{given}], {written}, "
            f"{self.mask(i)}, {line})"
        ]

    def emit_cp(self, i: Instruction, line: int) -> list[str]:
        if i.parts[1] != "async" or i.parts[2] not in ("commit_group", "wait_group", "wait_all", "ca", "cg"):
            raise Unsupported(i.opcode)
        if i.parts[2] == "commit_group":
            return ["w.commit_copies()"]
        if i.parts[2] == "wait_group":
            return [f"w.wait_copies({int(i.operands[0], 0)})"]
        if i.parts[2] == "wait_all":
            return ["w.commit_copies()", "w.wait_copies(0)"]
        target, source, size, *given = i.operands
        live = self.value(given[0], "u32") if given else size
        to, where = self.address(target, "u32"), self.address(source, "u64")
        return [f"w.copy_async({to}, {where}, {int(size, 0)}, {live}, {self.mask(i)}, {line})"]

    def emit_ldmatrix(self, i: Instruction, line: int) -> list[str]:
        registers = split_operands(i.operands[0].strip("{} "))
        targets = ", ".join(self.target(x, "b32") for x in registers)
        if i.parts[-1] != "b16" or i.predicate or "m8n8" not in i.parts:
            raise Unsupported(i.opcode)
        return [f"w.load_matrix({self.address(i.operands[1], 'u32')}, ({targets},), {'trans' in i.parts}, {line})"]

    def emit_mma(self, i: Instruction, line: int) -> list[str]:
        kind = i.parts[-2]
        if "m16n8k16" not in i.parts or i.parts[-1] != "f32" or kind not in ("bf16", "f16") or i.predicate:
            raise Unsupported(i.opcode)
        d, a, b, c = ([*split_operands(operand[1:-1])] for operand in i.operands)
        fragments = ", ".join(
            "(" + ", ".join(self.value(x, kind_of) for x in group) + ",)"
            for group, kind_of in ((d, "f32"), (a, "b32"), (b, "b32"), (c, "f32"))
        )
        return [f"a.multiply_fragments({fragments}, {kind!r})"]

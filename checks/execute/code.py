"""Generates Python from PTX: a function for each straight-line segment, numpy over the lanes of the warps that run it.

Belongs here: what each instruction means. A generated function takes the Warps (machine.py) that execute it.
"""

import functools
import itertools
import re
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from checks.compile.statements import Instruction, split_operands

from . import arithmetic
from .memory import COMBINE, Atomic
from .ptx import Kernel, Unsupported

# the registers of a file, viewed as each type
VIEWS: dict[str, Any] = {
    "r": np.uint32, "rs": np.int32, "rf": np.float32, "d": np.uint64, "ds": np.int64, "df": np.float64,
    "h": np.uint16, "hs": np.int16, "hf": np.float16, "p": np.bool_,
}  # fmt: skip
BYTES: dict[str, Any] = {"b": np.uint8, "bs": np.int8}  # of registers of 16 bits, which hold them extended
FILES = {1: "p", 16: "h", 32: "r", 64: "d"}
# type -> (the view, bits)
TYPES = {"pred": ("p", 1), "bf16": ("rf", 16), "bf16x2": ("r", 32), "f16x2": ("r", 32)} | {
    "b8": ("b", 8), "u8": ("b", 8), "s8": ("bs", 8),
} | {
    f"{kind}{bits}": (FILES[bits] + view, bits)
    for bits in (16, 32, 64) for kind, view in (("b", ""), ("u", ""), ("s", "s"), ("f", "f"))
}  # fmt: skip
WIDER = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}
# the arithmetic that there is on these types
FEW = {"bf16": ("fma",), "bf16x2": (), "f16": ("add", "fma"), "f16x2": ()}
UFUNCS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "min": "minimum", "max": "maximum", "min f": "fmin", "max f": "fmax", "neg": "negative", "abs": "absolute",
    "not": "invert", "shl": "left_shift", "shr": "right_shift", "rem": "fmod", "div f": "divide", "ex2": "exp2",
    "lg2": "log2", "rcp": "reciprocal", "sqrt": "sqrt",
}  # fmt: skip
FUNCTIONS = {
    "fma": "a.fma({}, {}, {})", "mad": "{} * {} + {}",
    "mul wide": "a.widen({}) * {}", "mad wide": "a.widen({}) * {} + {}", "mul hi": "a.multiply_high({}, {})",
    "div": "a.divide({}, {})", "bfe": "a.extract({}, {}, {})", "rsqrt": "np.reciprocal(np.sqrt({}))",
    "prmt": "a.permute({}, {}, {})", "popc": "a.count_ones({})",
}  # fmt: skip
COMPARISONS = {"eq": "==", "ne": "!=", "neu": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# what has no registers to compute with: the machine takes branches and barriers, and lanes of a warp run together
CALLS = {
    "bra": "", "bra.uni": "", "ret": "", "bar.sync": "", "bar.warp.sync": "",
    "cp.async.commit_group": "w.commit_copies()", "cp.async.wait_group": "w.wait_copies({})",
    "fence.acq_rel.sys": "w.fence('sys')", "fence.sc.sys": "w.fence('sys')", "membar.sys": "w.fence('sys')",
    "fence.acq_rel.gpu": "w.fence('gpu')", "fence.sc.gpu": "w.fence('gpu')", "membar.gl": "w.fence('gpu')",
}  # fmt: skip
GUARDED = ("bra", "ld", "st", "atom", "cp")  # what lanes may leave out
# instructions after which a segment ends: control, and what other programs can see or answer
ENDS = re.compile(r"bra(\.uni)?|ret|bar\.sync|atom\..*|ld\.\S*(acquire|relaxed)\S*")
ORDERS = ("acquire", "release", "acq_rel", "relaxed")
MMA_FLOPS = 2 * 16 * 8 * 16


@functools.lru_cache(maxsize=1 << 14)
def compiled(text: str) -> CodeType:
    """Generated Python. Most segments of a kernel that is edited or compiled again are as they were."""
    return compile(text, "<ptx>", "exec")


class Segment(NamedTuple):
    """Instructions that run one after another: all of them, or none."""

    run: Callable[[Any], None]
    """Executes them, except a last one that branches."""
    lines: range
    """The instructions' indices."""
    flops: int
    """FLOPs of one warp on tensor cores."""
    last: Instruction


class Code:
    """A kernel's segments."""

    def __init__(self, kernel: Kernel, in_flight: int = 0) -> None:
        """in_flight: bytes that a warp asks of global memory before it uses any of them.

        Unsupported if there are instructions that the executor does not know.
        """
        self.kernel, self.in_flight = kernel, in_flight
        self.index: dict[str, tuple[int, int]] = {}
        """(bits, place among the registers of as many bits) of each register."""
        self.counts = dict.fromkeys(FILES.values(), 0)
        for name, kind in kernel.registers.items():
            bits = TYPES[kind][1]
            self.index[name] = (bits, self.counts[FILES[bits]])
            self.counts[FILES[bits]] += 1
        self.named = {name: offset for name, (offset, _) in kernel.parameters.items()} | {"global_smem": 0}
        self.constants: dict[str, Any] = {}
        self.unknown: list[str] = []
        end = len(kernel.instructions)
        behind = {line + 1 for line, i in enumerate(kernel.instructions) if ENDS.fullmatch(i.opcode)}
        starts = sorted({0, *kernel.labels.values(), *behind} - {end})
        self.segments = [self.segment(range(*lines)) for lines in itertools.pairwise([*starts, end])]
        if self.unknown:
            texts = "; ".join(self.unknown[:5])
            raise Unsupported(f"the executor does not know {len(self.unknown)} instructions: {texts}")
        self.labels = {label: starts.index(line) for label, line in kernel.labels.items() if line < end}

    def segment(self, lines: range) -> Segment:
        """The instructions of these lines."""
        texts, flops = ["def segment(w):", f" {','.join(VIEWS)}=w.views"], 0
        for line in lines:
            i = self.kernel.instructions[line]
            flops += MMA_FLOPS * i.opcode.startswith("mma.")
            try:
                if i.predicate and i.parts[0] not in GUARDED:
                    raise Unsupported(i.opcode)
                texts += [f" {text}" for text in self.emit(i, line - lines.start)]
            except (Unsupported, KeyError, IndexError, ValueError):
                self.unknown.append(str(i))
        scope: dict[str, Any] = {"np": np, "a": arithmetic, "k": self.constants}
        exec(compiled("\n".join(texts)), scope)
        return Segment(scope["segment"], lines, flops, self.kernel.instructions[lines[-1]])

    def constant(self, name: str, value: Any) -> str:
        """An expression for an object."""
        self.constants[name] = value
        return f"k[{name!r}]"

    def value(self, operand: str, kind: str) -> str:
        """An expression for an operand that is read as a type."""
        if kind == "bf16":
            return f"a.widen_bf16({self.value(operand, 'b16')})"
        view, bits = TYPES[kind]
        if operand in self.index:
            own, number = self.index[operand]
            if own < bits:
                raise Unsupported(f"{operand} is narrower than {kind}")
            return f"{view}[{number}]" if own == bits else f"{FILES[own]}[{number}].astype({numpy_name(kind)})"
        if operand.startswith("%"):
            return f"w.special[{operand!r}]"
        digits, base = (operand[2:], 16) if operand.startswith(("0f", "0d")) else (operand, 0)
        number = self.named[operand] if operand in self.named else int(digits.rstrip("U"), base)
        made = np.array(number & ((1 << bits) - 1), VIEWS[FILES[bits]]).view(VIEWS[view])[()]
        return self.constant(f"{operand} {kind}", made)

    def put(self, target: str, kind: str, expression: str) -> list[str]:
        """Lines that write an expression of a type into a register. A wider one is extended."""
        if target == "_":
            return []
        if kind == "bf16":
            return self.put(target, "b16", f"a.bf16({expression})")
        (own, number), (view, bits) = self.index[target], TYPES[kind]
        if own < bits:
            raise Unsupported(f"{target} is narrower than {kind}")
        return [f"{view if own == bits else FILES[own] + 's' * (kind[0] == 's')}[{number}][...] = {expression}"]

    def lanes(self, i: Instruction) -> str:
        """An expression that selects the lanes which execute an instruction."""
        return f"({'~' * i.negated}{self.value(i.predicate, 'pred')}).nonzero()[0]" if i.predicate else "slice(None)"

    def address(self, operand: str, kind: str) -> str:
        """An expression for the address in brackets."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise Unsupported(operand)
        base, offset = self.value(match[1], kind), match[2] or "0"
        return base if offset == "0" else f"{base} + {self.value(offset, kind)}"

    def registers(self, operand: str, kind: str) -> str:
        """An expression for a tuple of registers, or of one alone, which are as wide as a type."""
        names = split_operands(operand.strip("{} "))
        if any(self.index[name][0] != TYPES[kind][1] for name in names if name in self.index):
            raise Unsupported(f"{operand} is wider than {kind}")
        return f"({', '.join(self.value(name, kind) for name in names)},)"

    def emit(self, i: Instruction, line: int) -> list[str]:
        """Lines that execute one instruction."""
        operation, kind = i.parts[0], i.parts[-1]
        if i.opcode in CALLS and (i.opcode != "bar.sync" or i.rest == "0"):
            return [CALLS[i.opcode].format(*i.operands)]
        if special := getattr(self, f"emit_{operation}", None):
            return special(i, line)
        operation = " ".join(part for part in i.parts if part in (operation, "wide", "hi"))
        if operation not in FEW.get(kind, (operation,)) or "NaN" in i.parts:
            raise Unsupported(i.opcode)
        wide = WIDER[kind] if "wide" in i.parts else kind
        values = [self.value(x, of) for x, of in zip(i.operands[1:], (kind, kind, wide), strict=False)]
        if ufunc := UFUNCS.get(f"{operation} {kind[0]}") or UFUNCS.get(operation):
            return [f"np.{ufunc}({', '.join(values)}, out={self.registers(i.operands[0], kind)})"]
        form = FUNCTIONS.get(f"{operation} {kind}") or FUNCTIONS[operation]
        return self.put(i.operands[0], wide, form.format(*values))

    def emit_setp(self, i: Instruction, line: int) -> list[str]:
        (_, name, *more, kind), (targets, *sources) = i.parts, i.operands
        if set(more) - {"ftz"} or "bf16" in kind or (name == "ne" and "f" in kind):
            raise Unsupported(i.opcode)
        x, y = (self.value(operand, kind) for operand in sources)
        halves = [(f"a.half({x}, {n})", f"a.half({y}, {n})") for n in range(2)] if kind == "f16x2" else [(x, y)]
        return [text for target, (x, y) in zip(targets.split("|"), halves, strict=True)
                for text in self.put(target, "pred", f"{x} {COMPARISONS[name]} {y}")]  # fmt: skip

    def emit_selp(self, i: Instruction, line: int) -> list[str]:
        (target, x, y, chosen), kind = i.operands, i.parts[-1]
        values = f"{self.value(chosen, 'pred')}, {self.value(x, kind)}, {self.value(y, kind)}"
        return self.put(target, kind, f"np.where({values})")

    def emit_shfl(self, i: Instruction, line: int) -> list[str]:
        (target, source, lane, *segment), (_, _, mode, kind) = i.operands, i.parts
        if segment != {"bfly": ["31", "-1"], "idx": ["31", "-1"], "up": ["0", "-1"]}.get(mode):
            raise Unsupported(i.opcode)
        values = f"{self.value(source, kind)}, {self.value(lane, 'u32')}"
        return self.put(target, kind, f"a.shuffle({values}, '{mode}')")

    def emit_redux(self, i: Instruction, line: int) -> list[str]:
        (target, source, members), (_, _, operation, kind) = i.operands, i.parts
        values = f"{self.value(source, kind)}, {self.value(members, 's32')}"
        return self.put(target, kind, f"a.reduce_lanes({values}, '{operation}')")

    def emit_mov(self, i: Instruction, line: int) -> list[str]:
        kind, (target, source) = i.parts[-1], i.operands
        names = split_operands(next((x for x in i.operands if x.startswith("{")), "").strip("{}"))
        if not names:
            return self.put(target, kind, self.value(source, kind))
        part = f"b{TYPES[kind][1] // len(names)}"
        shifts = [(name, n * TYPES[part][1]) for n, name in enumerate(names)]
        if target.startswith("{"):
            value = self.value(source, kind)
            return [text for name, shift in shifts for text in self.put(name, part, f"{value} >> {shift}")]
        values = (f"({self.value(name, part)}.astype({numpy_name(kind)}) << {shift})" for name, shift in shifts)
        return self.put(target, kind, " | ".join(values))

    def emit_cvt(self, i: Instruction, line: int) -> list[str]:
        (_, *how, to, kind), (target, *sources) = i.parts, i.operands
        if set(how) - {"rn"} or ("f" in kind and "f" not in to):
            raise Unsupported(i.opcode)
        values = [f"{self.value(x, kind)}.astype({numpy_name(to.removesuffix('x2'))}, copy=False)" for x in sources]
        if to.endswith("x2"):
            values = [f"a.pair({', '.join(f'a.{to[:-2]}({value})' for value in values)})"]
        return self.put(target, to, *values)

    def vector(self, i: Instruction, line: int, call: str, address: str, registers: str) -> list[str]:
        """The line of a load or a store without an order."""
        space, bits = i.parts[1], TYPES[i.parts[-1]][1]
        if not {"v2", "v4"}.issuperset(i.parts[2:-1]):
            raise Unsupported(i.opcode)
        where = f"w.{space}_memory, {self.address(address, {'global': 'u64', 'shared': 'u32'}[space])}, {bits // 8}"
        # a wider register takes a value with zeros before it, and gives its lowest bits
        own = max(self.index[name][0] for name in split_operands(registers.strip("{} ")) if name in self.index)
        if own < bits or (own > bits and i.parts[-1][0] not in "bu"):
            raise Unsupported(i.opcode)
        return [f"w.{call}({where}, {self.registers(registers, f'b{own}')}, {self.lanes(i)}, {line})"]

    def emit_ld(self, i: Instruction, line: int) -> list[str]:
        kind, (targets, address) = i.parts[-1], i.operands
        if i.parts[1] == "param":
            return self.put(targets, kind, f"w.parameter({self.address(address, 'u64')}, {numpy_name(kind)})")
        if set(i.parts) & set(ORDERS):
            return self.emit_atom(i, line)
        return self.vector(i, line, "load", address, targets)

    def emit_st(self, i: Instruction, line: int) -> list[str]:
        return self.vector(i, line, "store", *i.operands)

    def emit_atom(self, i: Instruction, line: int) -> list[str]:
        """An access that is atomic, which only integers in global memory have."""
        (target, address, *values), kind = i.operands, i.parts[-1]
        if i.parts[1] != "global" or kind[0] not in "bus":
            raise Unsupported(i.opcode)
        name, order, scope = (next(part for part in i.parts if part in parts)
                              for parts in (("ld", *COMBINE), ORDERS, ("sys", "gpu", "cta")))  # fmt: skip
        operation = self.constant(i.opcode, Atomic(name, order, scope, VIEWS[TYPES[kind][0]]))
        given, into = ", ".join(self.value(x, kind) for x in values), self.value(target, kind)
        return [f"w.atomic({operation}, {self.address(address, 'u64')}, [{given}], {into}, {self.lanes(i)}, {line})"]

    def emit_cp(self, i: Instruction, line: int) -> list[str]:
        target, source, size, live = i.operands
        if i.parts[1] != "async" or i.parts[2] not in ("ca", "cg"):
            raise Unsupported(i.opcode)
        to, where = self.address(target, "u32"), self.address(source, "u64")
        return [f"w.copy_async({to}, {where}, {size}, {self.value(live, 'u32')}, {self.lanes(i)}, {line})"]

    def emit_ldmatrix(self, i: Instruction, line: int) -> list[str]:
        if i.parts[-1] != "b16" or "m8n8" not in i.parts:
            raise Unsupported(i.opcode)
        targets, address = self.registers(i.operands[0], "b32"), self.address(i.operands[1], "u32")
        return [f"w.load_matrix({address}, {targets}, {'trans' in i.parts}, {line})"]

    def emit_mma(self, i: Instruction, line: int) -> list[str]:
        kind = i.parts[-2]
        if "m16n8k16" not in i.parts or i.parts[-1] != "f32" or kind not in ("bf16", "f16"):
            raise Unsupported(i.opcode)
        d, a, b, c = map(self.registers, i.operands, ("f32", "b32", "b32", "f32"))
        return [f"a.multiply_fragments({d}, {a}, {b}, {c}, {kind!r})"]


def numpy_name(kind: str) -> str:
    """An expression for the numpy type of a PTX type's values."""
    return f"np.{(VIEWS | BYTES)[TYPES[kind][0]].__name__}"

"""What is counted of a case, and what is asserted of it: a row of the table, with the list of violations.

Belongs here: the rules. compiler.py compiles a kernel, ptx.py and ttgir.py read its code.
"""

from typing import TypedDict

import torch

from . import ptx, ttgir
from .cases import Case
from .compiler import Compiled, compile_only

SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}  # bytes that one program may have, by architecture
TENSOR_MEMORY = 512  # columns that one program may have
TENSOR_CORE = {80: "mma", 90: "wgmma", 100: "tcgen05"}  # the instruction that multiplies, by architecture
TENSOR_CORE_ROWS = 64  # the least BLOCK_M that wgmma takes


class Row(TypedDict):
    """What is known of one case. Numbers are None if the kernel did not compile."""

    kernel: str
    name: str
    arch: str
    dtype: str
    tile: str
    stages: int | None
    warps: int | None
    registers: int | None
    spills: int | None
    shared: int | None
    wgmma: int | None
    tcgen05: int | None
    mma: int | None
    tma_loads: int | None
    cp_async: int | None
    releases: int | None
    fences: int | None
    flags: int | None
    acquires: int | None
    barriers: int | None
    in_flight: int | None
    wide_stores: int | None
    narrow_stores: int | None
    violations: list[str]


def empty_row(case: Case) -> Row:
    """The row of a case that is not compiled yet."""
    row = dict.fromkeys(Row.__annotations__) | {
        "kernel": case.kernel,
        "name": case.name,
        "arch": f"sm_{case.capability}",
        "dtype": str(case.dtype).removeprefix("torch."),
        "tile": case.tile_text,
        "violations": [],
    }
    return row  # type: ignore[return-value]


def judge(case: Case) -> Row:
    """Compile a case and judge it. An exception on the way is a violation, too."""
    row = empty_row(case)
    try:
        with compile_only(case.capability, case.kernel) as kernels:
            case.launch()
        kernel = only(kernels, case)
        program, module = ptx.parse(kernel.ptx), ttgir.parse(kernel.ttgir)
        row.update(counts(kernel, program, module))  # type: ignore[typeddict-item]
        row["violations"] = violations(case, kernel, program, module, row)
    except Exception as error:
        message = str(error).split("Repro command")[0].strip()
        row["violations"] = [f"fails: {type(error).__name__}: {message[:800]}"]
    return row


def only(kernels: list[Compiled], case: Case) -> Compiled:
    """The one kernel that a case compiles. ValueError if there are several, or none."""
    if len(kernels) != 1:
        raise ValueError(f"the case launches {len(kernels)} variants of {case.kernel}: one case is one kernel")
    return kernels[0]


def counts(kernel: Compiled, program: ptx.Program, module: ttgir.Module) -> dict[str, int]:
    """The numbers of a row."""
    events = program.events
    wide = sum(event.kind == "store" and event.width >= ptx.WIDE for event in events)
    return {
        "stages": kernel.stages,
        "warps": kernel.warps,
        "registers": kernel.registers,
        "spills": kernel.spills,
        "shared": kernel.shared,
        "wgmma": program.count("wgmma"),
        "tcgen05": program.count("tcgen05"),
        "mma": program.count("mma"),
        "tma_loads": program.count("tma load"),
        "cp_async": program.count("cp.async"),
        "releases": sum(event.releases and event.kind == "atomic" and event.scope == "sys" for event in events),
        "fences": sum(event.fences for event in events),
        "flags": sum(event.sets_flag for event in events),
        "acquires": sum(event.acquires and event.scope == "sys" for event in events),
        "barriers": program.count("barrier"),
        "in_flight": ptx.bytes_in_flight(kernel.ptx),
        "wide_stores": wide,
        "narrow_stores": len(narrow_stores(program, module)),
    }


def narrow_stores(program: ptx.Program, module: ttgir.Module) -> list[ptx.Event]:
    """Stores of blocks that move less than 16 bytes per thread. Stores of scalars, such as a report's, do not count."""
    scalars = module.scalar_stores()
    stores = [event for event in program.events if event.kind == "store" and event.width < ptx.WIDE]
    return [store for store in stores if store.source not in scalars]


def violations(case: Case, kernel: Compiled, program: ptx.Program, module: ttgir.Module, row: Row) -> list[str]:
    """Texts of what is wrong. Each begins with the name of its rule, by which a case may waive it."""
    found = {
        "releases": differs(module.releases(), case.releases, row["releases"]),
        "fences": differs(module.fences(), case.fences, row["fences"]),
        "flags": differs(module.flags(), case.flags, row["flags"]),
        "acquires": differs(module.acquires(), case.acquires, row["acquires"]),
        "barrier_before_release": ptx.barrier_before_release(program, kernel.warps),
        "fence_before_flag": ptx.fence_before_flag(program),
        "system_scope": ttgir.system_scope(module, case.local_atomics),
        "no_tma_store_before_release": ptx.no_tma_store_before_release(program),
        "fence_before_tma_load": ptx.fence_before_tma_load(program),
        "no_wait_in_dot_loop": ttgir.no_wait_in_dot_loop(module),
        "loads_run_ahead": ttgir.loads_run_ahead(module),
        "no_load_before_wait": ttgir.no_load_before_wait(module, case.own),
        "in_flight": too_few(case.in_flight, (row["in_flight"] or 0) * kernel.warps),
        "wide_stores": too_narrow(case, narrow_stores(program, module)),
        "tensor_cores": tensor_cores(case, row),
        "spills": [f"{row['spills']} bytes"] if row["spills"] else [],
        "shared_memory": too_much(kernel.shared, SHARED_MEMORY[case.capability], "bytes"),
        "tensor_memory": too_much(kernel.tensor_memory, TENSOR_MEMORY, "columns"),
        "serialized": list(kernel.warnings),
    }
    unknown = case.waived - found.keys()
    if unknown:
        raise ValueError(f"waived rules that do not exist: {sorted(unknown)}")
    texts = [f"{rule}: {text}" for rule, texts in found.items() if rule not in case.waived for text in texts]
    return list(dict.fromkeys(texts))  # unrolled code breaks a rule several times


def differs(seen: int, wanted: int, emitted: int | None) -> list[str]:
    """Rule: the TTGIR has the number that is wanted, and the PTX as many, or more if a loop was unrolled."""
    if seen != wanted:
        return [f"{seen} instead of {wanted}"]
    return [f"{wanted}, of which the PTX has {emitted}"] if (emitted or 0) < wanted else []


def too_much(used: int, limit: int, unit: str) -> list[str]:
    """Rule: no more is used than there is."""
    return [f"{used} {unit}, more than {limit}"] if used > limit else []


def too_few(wanted: int, seen: int) -> list[str]:
    """Rule: as many bytes are in flight as fill a link with the pushers that there are."""
    return [f"{seen} bytes, less than {wanted}"] if seen < wanted else []


def too_narrow(case: Case, stores: list[ptx.Event]) -> list[str]:
    """Rule: in a kernel that publishes, each store of a block moves 16 bytes per thread."""
    if not (case.releases or case.fences) or not stores:
        return []
    where = ", ".join(sorted({f"{store.opcode} ({store.source})" for store in stores}))
    return [f"{len(stores)} stores below {ptx.WIDE} bytes: {where}"]


def tensor_cores(case: Case, row: Row) -> list[str]:
    """Rule: a GEMM on 16-bit operands uses its architecture's instruction."""
    if case.tile is None or case.tile.m < TENSOR_CORE_ROWS or case.dtype == torch.float32:
        return []
    instruction = TENSOR_CORE[case.capability]
    return [] if row[instruction] else [f"no {instruction}"]  # type: ignore[literal-required]

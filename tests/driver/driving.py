"""Calls launchers under Triton's own launcher and the driver of libcuda.c, and prints what came to the driver, as JSON.

Belongs here: what test_driver.py runs in a process of its own, as Triton looks for its driver once in a process.
"""

import ast
import contextlib
import gc
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/kernels"), str(ROOT / "tests/driver")]  # the repository is not installed

import torch  # noqa: E402
import triton  # noqa: E402
from replaying import Shelf, call_variants, compared, keep_little  # noqa: E402
from triton.backends.nvidia import compiler  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from checks.driver.stub import GPUS, Stub, memory  # noqa: E402
from tpformer.kernels import operands  # noqa: E402
from tpformer.kernels.launch import MAXIMUM_REGISTERS, REGISTERS  # noqa: E402

PARTS = 2  # processes that share the launchers that ship


def shipped_cases(capability: int, shelf: Shelf) -> list[Any]:
    """Of the compile check's cases, with memory and with as many programs as launchers choose: in bfloat16 every GEMM's
    first variant with each tile, and each variant with a tile of which an SM holds several programs, so that they have
    to fit beside one another; its first one in float32; the last two of each other kernel."""
    from checks.compile import cases

    made = cases.channel

    @cache
    def channel(*sizes: int, **options: int) -> Any:
        """One for all calls, because what is kept of calls, a channel keeps. Its memory is none of a case's."""
        place = shelf.tensors, shelf.taken
        shelf.begin([])
        found = made(*sizes, **options)
        shelf.tensors, shelf.taken = place
        return found

    cases.meta, cases.channel = shelf, channel
    from checks.compile import memory_bound, quantized, shipped

    memory_bound.PROGRAMS = quantized.PROGRAMS = shipped.PROGRAMS = None
    ours = [case for case in shipped.cases() if case.capability == capability and case.dtype != torch.float16]
    ours.sort(key=lambda case: case.dtype == torch.bfloat16)
    groups: dict = {}
    for case in ours:
        groups.setdefault((case.kernel, case.dtype if case.tile else None), []).append(case)
    several = REGISTERS // (32 * (MAXIMUM_REGISTERS + 1))  # warps; of more an SM holds one program
    chosen = []
    for (_, dtype), group in groups.items():
        if dtype != torch.bfloat16:
            chosen += group[-2:] if dtype is None else group[:1]
            continue
        fit = {case.name: case for case in reversed(group) if 2 * case.tile.warps <= several}
        chosen += [case for case in group if case.name == group[0].name or case is fit[case.name]]
    return chosen


def call_launchers(stub: Stub, capability: int, part: int) -> list[dict]:
    """The attempt of every second of these cases, with what test_driver.py expects by."""
    shelf, done = Shelf(), []
    for case in shipped_cases(capability, shelf)[part::PARTS]:
        found = compared(stub, shelf, *[lambda launch=case.launch: (launch, (), {})] * 2)
        # poll_in_vain polls for nobody, and publishes no report; every kernel that waits for others may publish one
        done.append({
            "case": case.key, "name": case.name, "kernel": case.kernel, "waits": bool(case.acquires and case.releases),
            "gemm": case.tile is not None, "tma": bool(case.tile and case.tile.tma), "processors": GPUS[capability][0],
            **found.pop("plain"), **found,
        })  # fmt: skip
    return done


def trial_of(stub: Stub, launches: int, message: str | None, call: Callable, *arguments: Any, **options: Any) -> dict:
    """The attempt of a call, with how many launches it should make, and the error, a regular expression."""
    return {"launches": launches, "message": message} | stub.attempt(lambda: call(*arguments, **options))


def try_driver(stub: Stub, capability: int) -> list[dict]:
    """Trials of Triton's own launcher and encoder: what the driver has to refuse, and what is right beside it."""
    from tpformer.kernels.protocol import bump_kernel

    epoch, mebibyte = memory(4, dtype=torch.int32), 1 << 20
    nowhere = torch.empty(1, dtype=torch.int32, device="meta")
    stopped = memory(4, dtype=torch.int32)
    bump = bump_kernel[(1,)](epoch, stopped, 2, num_warps=1)
    fit = 32 * GPUS[capability][0]  # blocks of one warp: the most that an SM holds

    def launch(grid=(1, 1, 1), warps=1, shared=0, cooperative=False, pointer=epoch, served=2):
        with mock.patch.object(bump.run, "launch_cooperative_grid", cooperative):
            bump.run(*grid, 0, bump.function, (warps, 1, shared), None, None, None, pointer, stopped, served)

    def encode(address=mebibyte, kind=9, box=(128, 64), shape=(256, 64), strides=(64, 1)):
        utils = triton.runtime.driver.active.utils
        fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # its name in triton 3.6
        fill(address, 3, 2, kind, box, shape, strides, 0)

    trial = partial(trial_of, stub)
    return [
        trial(1, None, launch),
        trial(1, None, launch, grid=(1, 65535, 1)),
        trial(0, "no grid has 1 x 65536 x 1 blocks", launch, grid=(1, 65536, 1)),
        trial(0, None, launch, grid=(0, 1, 1)),  # Triton does not ask the driver
        trial(0, "bump_kernel is compiled for 32 threads, not 64", launch, warps=2),
        trial(1, None, launch, shared=48 << 10),
        trial(0, "may have 49152 bytes of shared memory, not 49153", launch, shared=(48 << 10) + 1),
        trial(1, None, launch, grid=(fit, 1, 1), cooperative=True),
        trial(0, f"of {fit + 1} cooperative .* {fit} are", launch, grid=(fit + 1, 1, 1), cooperative=True),
        trial(0, "Pointer argument must be either uint64 or have data_ptr method", launch, pointer="epoch"),
        trial(0, "would get a null pointer", launch, pointer=nowhere),
        trial(0, "'i' format requires|OverflowError", launch, served=2**31),  # from 3.7 on Triton drops the bits
        trial(0, None, encode),
        trial(0, "begins at 0x100008, no multiple of 16", encode, address=mebibyte + 8),
        trial(0, "begins at", encode, address=0),
        trial(0, "rows 130 bytes apart", encode, strides=(65, 1)),
        trial(0, "rows 1099511627776 bytes apart", encode, strides=(1 << 39, 1)),
        trial(0, "1 to 256 elements in dim 1, not 257", encode, box=(257, 64)),
        trial(0, "256 bytes, the swizzle 128", encode, box=(128, 128)),
        trial(0, "a row of a box has 40 bytes", encode, box=(128, 20)),
        trial(0, "dim 1 has 0 elements", encode, shape=(0, 64)),
        trial(0, "dim 0 has 4294967297 elements", encode, shape=(1, 2**32 + 1), strides=(2**33, 1)),
        trial(0, "elements of type 99", encode, kind=99),
    ]


def try_launchers(stub: Stub) -> list[dict]:
    """Trials of calls that launchers have to refuse, and at the end of a matrix that no tensor map can be of."""
    from channels import virtual_channel

    from tpformer.kernels.all_gather_matmul import kernel as gathers
    from tpformer.kernels.configurations import TILES
    from tpformer.kernels.matmul import kernel as matmuls

    tile, channel = TILES["small"], virtual_channel(1, 1 << 16, 4096)
    a, w = (memory(rows, 64, dtype=torch.bfloat16) for rows in (256, 128))
    skewed = memory(256 * 64 + 1, dtype=torch.bfloat16)[1:].view(256, 64)
    crowded = mock.patch.object(gathers.plan, "pushers_of", lambda *_: 4096)(gathers.await_gathered)
    unpadded = mock.patch.object(matmuls, "padded", lambda x: x)(matmuls.matmul)
    trial = partial(trial_of, stub)
    return [
        trial(0, r"Required: 2\d{5}, Hardware limit: 232448", matmuls.matmul, a, [w], tile=tile._replace(stages=10)),
        trial(0, "of 4097 cooperative blocks of await_gathered_kernel", crowded, channel, a, push=True),
        trial(0, "ValueError: .* at least one row and one column", matmuls.matmul, a[:0], [w], tile=tile),
        trial(0, "base must be 16-byte aligned", unpadded, skewed, [w], tile=tile),
        trial(1, None, matmuls.matmul, skewed, [w], tile=tile),  # a padded copy is encoded
    ]


def parse_head(function: JITFunction, parse: Callable) -> ast.Module:
    """In place of JITFunction.parse: a function that does nothing."""
    tree = parse(function)
    tree.body[0].body = [ast.copy_location(ast.Pass(), tree.body[0])]
    return tree


def lower_with_shared(backend: CUDABackend, lower: Callable, source: Any, metadata: dict, *options: Any) -> Any:
    """In place of CUDABackend.make_llir: blocks of kernels that do nothing have 64 KiB of shared memory."""
    lowered = lower(backend, source, metadata, *options)
    metadata["shared"] = 1 << 16
    return lowered


def lower_alone(backend: CUDABackend, lower: Callable, *arguments: Any) -> str:
    """In place of CUDABackend.make_llir: what Triton has lowered loses its body, and LLVM optimises nothing."""
    with mock.patch.object(compiler.llvm, "optimize_module", lambda *module: None):
        text = lower(backend, *arguments)
    head, found = re.subn(r"(?ms)^(define ptx_kernel [^\n]*\{\n).*?^\}", r"\1  ret void\n}", text)
    assert found == 1, text[:1000]
    return head


def assemble_with_registers(
    backend: CUDABackend, assemble: Callable, ptx: str, metadata: dict, options: Any, capability: int
) -> bytes:
    """In place of CUDABackend.make_cubin: the cubin says that each thread has all registers that the launch allows it,
    so that what is resident at once is so whatever ptxas makes of the body."""
    cubin = assemble(backend, ptx, metadata, options, capability)
    registers = struct.pack("<I", options.maxnreg or MAXIMUM_REGISTERS)
    found, number = re.subn(rb"(?s)(\x04\x2f\x08\x00.{4}).{4}", lambda match: match[1] + registers, cubin)
    assert number, "the cubin does not say how many registers a thread has"
    return found


# LLVM and ptxas take most of the time of compiling. Of what a launch depends on they make the registers alone.
HEADS = (JITFunction, "parse", parse_head), (CUDABackend, "make_llir", lower_with_shared)
LOWERED = (CUDABackend, "make_llir", lower_alone), (CUDABackend, "make_cubin", assemble_with_registers)


@contextlib.contextmanager
def compiling(cache: Path, replacements: tuple) -> Iterator[None]:
    """Within, Triton compiles in this way, and keeps kernels in a cache of their own. HEADS: kernels do nothing; they
    have the parameters and threads of the real ones. LOWERED: they have their shared memory, too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)))
        for owner, name, function in replacements:
            stack.enter_context(mock.patch.object(owner, name, partialmethod(function, getattr(owner, name))))
        yield


def drive(driver: Path, capability: int, part: int | None = None) -> None:
    """Print what test_driver.py judges: a part of the launchers that ship, or trials and replays."""
    gc.freeze()  # what this process was forked with is never garbage
    stub, folder = Stub(driver, capability), driver.parent / "cache"
    operands.readable = lambda _: False  # memory of a GPU, whose values no check looks at
    if part is not None:
        with compiling(folder / "lowered", LOWERED):
            done: Any = call_launchers(stub, capability, part)
    else:
        trials = [*try_driver(stub, capability), *try_launchers(stub)]
        with compiling(folder / "heads", HEADS):
            done = {"trials": trials, "variants": call_variants(stub), "kept": keep_little()}
    print(json.dumps(done))

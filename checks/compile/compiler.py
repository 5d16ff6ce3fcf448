"""Makes launchers compile instead of launch: for any architecture, without a GPU, with ptxas's report.

Belongs here: all that reaches into Triton's runtime. rules.py says what must hold of a compiled kernel.
"""

import contextlib
import functools
import io
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Compiled:
    """One kernel as Triton and ptxas made it."""

    kernel: str
    """The jitted function's name."""
    ptx: str
    ttgir: str
    stages: int
    warps: int
    registers: int
    """Per thread."""
    spills: int
    """Bytes per thread, stores and loads."""
    shared: int
    """Bytes of shared memory per program."""
    tensor_memory: int
    """Columns (sm_100)."""
    warnings: tuple[str, ...]
    """ptxas's warnings C75xx, about wgmma instructions that it had to serialize."""


class Driver:
    """A driver with which Triton can compile. It lacks what a launch needs, so a launch would fail."""

    def __init__(self, capability: int, device: str = "meta") -> None:
        """device: that of the launchers' tensors."""
        from triton.backends.compiler import GPUTarget

        self.target, self.device = GPUTarget("cuda", capability, 32), torch.device(device)

    def get_current_device(self) -> "Driver":
        """The key under which jitted functions keep their kernels; this object, so that no other driver finds them."""
        return self

    def get_current_stream(self, device: object) -> int:
        """A stream that nothing is launched on."""
        return 0

    def get_current_target(self) -> object:
        """The architecture to compile for."""
        return self.target

    def get_active_torch_device(self) -> torch.device:
        """The device of the launchers' tensors."""
        return self.device


def unavailable() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    try:
        import triton
        from triton.backends.nvidia.compiler import get_ptxas
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: kernels are interpreted, not compiled"
    try:
        get_ptxas(90), get_ptxas(100)
    except RuntimeError as error:
        return f"triton has no ptxas: {error}"
    return None


def ptxas_version(capability: int) -> str:
    """The version of the ptxas that Triton uses for an architecture."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(capability).version


@contextlib.contextmanager
def intercepted(driver: Driver, instead: Callable[..., Any]) -> Iterator[None]:
    """Within, a launch calls instead(function, compiles, arguments, grid, options) and returns what that returns.

    compiles: gives the kernel, compiled for the driver's architecture. Afterwards Triton is as it was.
    """
    import triton
    from triton.runtime.jit import JITFunction

    functions: dict[int, JITFunction] = {}
    launch, active = JITFunction.run, getattr(triton.runtime.driver, "_active", None)

    def run(function, *arguments, grid, warmup, **options):
        functions[id(function)] = function
        compiles = functools.partial(launch, function, *arguments, grid=grid, warmup=True, **options)
        return instead(function, compiles, arguments, grid, options)

    triton.runtime.driver.set_active(driver)
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch
        triton.runtime.driver.set_active(active)
        for function in functions.values():
            function.device_caches.pop(driver, None)


@contextlib.contextmanager
def compile_only(capability: int, name: str = "") -> Iterator[list[Compiled]]:
    """Inside this context a launch compiles its kernel for an architecture, and appends it to the list that is yielded.

    name: of the one jitted function whose launches compile anything; by default all do. Launchers take tensors of
    device meta. Their address is 0, so Triton specialises pointers as aligned ones. Triton itself derives signature and
    hints from the arguments, and runs ptxas. A kernel that is launched twice with one specialisation is listed once.
    RuntimeError if nothing can be compiled here.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    import triton

    kernels: list[Compiled] = []
    known: dict[int, Any] = {}  # Triton's kernels, by identity

    def compile_instead(function, compiles, arguments, grid, options):
        if name not in ("", function.__name__):
            return None
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = compiles()
        if id(kernel) not in known:
            known[id(kernel)] = kernel
            kernels.append(report(function.__name__, kernel, log.getvalue()))
        return kernel

    with (
        tempfile.TemporaryDirectory() as cache,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        intercepted(Driver(capability), compile_instead),
    ):
        triton.knobs.cache.dir = cache  # an empty folder: a kernel from the user's would come without ptxas's report
        triton.knobs.nvidia.dump_ptxas_log = True
        yield kernels


def report(name: str, kernel, log: str) -> Compiled:
    """A kernel as Triton's metadata and ptxas's log describe it. RuntimeError if the log has no report."""
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    if not registers:
        raise RuntimeError(f"{name}: Triton showed no report of ptxas: {log[-200:]!r}")
    return Compiled(
        kernel=name,
        ptx=kernel.asm["ptx"],
        ttgir=kernel.asm["ttgir"],
        stages=kernel.metadata.num_stages,
        warps=kernel.metadata.num_warps,
        registers=max(registers),
        spills=sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)),
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        warnings=tuple(line.strip() for line in re.findall(r"\(C75\d\d\).*", log)),
    )

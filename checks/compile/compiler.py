"""Makes launchers compile instead of launch: for any architecture, without a GPU, with ptxas's report.

Belongs here: all that reaches into Triton's runtime. rules.py says what must hold of a compiled kernel.
"""

import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

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

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

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
        return torch.device("meta")


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
def compile_only(capability: int) -> Iterator[list[Compiled]]:
    """Inside this context a launch compiles its kernel for an architecture, and appends it to the list that is yielded.

    Launchers take tensors of device meta. Their address is 0, so Triton specialises pointers as aligned ones. Triton
    itself derives signature and hints from the arguments, and runs ptxas. A kernel that is launched twice with one
    specialisation is listed once. RuntimeError if nothing can be compiled here.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    import triton
    from triton.runtime.jit import JITFunction

    driver = Driver(capability)
    compiled: dict[int, Compiled] = {}  # by identity of Triton's kernel
    functions: dict[int, JITFunction] = {}
    launch = JITFunction.run

    def compile_instead(function, *arguments, grid, warmup, **options):
        functions[id(function)] = function
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = launch(function, *arguments, grid=grid, warmup=True, **options)
        if id(kernel) not in compiled:
            compiled[id(kernel)] = report(function.__name__, kernel, log.getvalue())
            kernels.append(compiled[id(kernel)])
        return kernel

    kernels: list[Compiled] = []
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(triton.knobs.cache.scope())
        stack.enter_context(triton.knobs.nvidia.scope())
        triton.knobs.cache.dir = cache  # an empty folder: a kernel from the user's would come without ptxas's report
        triton.knobs.nvidia.dump_ptxas_log = True
        stack.callback(triton.runtime.driver.set_active, getattr(triton.runtime.driver, "_active", None))
        triton.runtime.driver.set_active(driver)
        stack.callback(setattr, JITFunction, "run", launch)
        JITFunction.run = compile_instead
        try:
            yield kernels
        finally:
            for function in functions.values():
                function.device_caches.pop(driver, None)


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

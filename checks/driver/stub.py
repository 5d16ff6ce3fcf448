"""Builds the driver of libcuda.c, makes this process believe that it has a GPU, and keeps what came to the driver.

Belongs here: all that reaches into Triton's runtime to this end. Triton looks for its driver once in a process.
"""

import ctypes
import json
import math
import mmap
import os
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from checks.execute.session import FORMATS

SOURCE = Path(__file__).with_name("libcuda.c")
NAME = "libcuda.so.1"  # by which Triton finds a driver that is open already
VARIABLE = "TRITON_LIBCUDA_PATH"  # Triton's: the folder of the driver that its launcher is linked with
# capability -> SMs, bytes of shared memory that a block can have, and those of an SM: an A100, an H100, a B200
GPUS = {80: (108, 163 << 10, 164 << 10), 90: (132, 227 << 10, 228 << 10), 100: (148, 227 << 10, 228 << 10)}
NO_RESERVE = 0x4000  # mmap's flag: memory that nobody touches takes no room, however large it is
OBJECT_BYTES = 128  # from where Triton's object of a tensor map begins to its map


def missing() -> str | None:
    """What the driver cannot be built without and is not here; None if all is."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton"
    if compiler() is None:
        return "a C compiler, gcc or clang"
    header = Path(str(sysconfig.get_config_var("INCLUDEPY")), "Python.h")
    return None if header.exists() else "Python.h, from which Triton builds its launcher"


def compiler() -> str | None:
    """The C compiler, as Triton looks for it."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def build(folder: Path, *options: str) -> Path:
    """The driver, built in a folder with these options of the compiler."""
    import triton

    path, headers = folder / NAME, Path(triton.__file__).parent / "backends/nvidia/include"
    shared = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{NAME}", f"-I{headers}"]
    subprocess.run([str(compiler()), *shared, *options, "-o", path, SOURCE], check=True, timeout=60)
    return path


def memory(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with addresses, and as good as without memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(room, dtype=dtype).view(shape)


def flattened(value: Any, kind: Any) -> Iterator[list[int]]:
    """[bytes, value] of each parameter of the kernel that an argument becomes; of a tensor map the address."""
    if isinstance(kind, tuple | list):
        for member, of_member in zip(value, kind, strict=True):
            yield from flattened(member, of_member)
    elif kind.startswith("tensordesc"):
        numbers = [[4, size] for size in value.shape] + [[8, stride] for stride in value.strides]
        yield from [[128, value.base.data_ptr()], *numbers]
    elif kind == "nvTmaDesc":
        yield [128, ctypes.c_uint64.from_address(id(value) + OBJECT_BYTES).value]
    elif kind.startswith("*"):
        address = value if isinstance(value, int) else value.data_ptr()
        if not address:
            raise ValueError("a kernel would get a null pointer")
        yield [8, address]
    elif kind != "constexpr":
        packed = struct.pack(FORMATS[kind], value)
        yield [len(packed), int.from_bytes(packed, "little")]


class Stub:
    """This process believes that it has such a GPU, as long as it runs. `path` is a driver, whose folder VARIABLE has.

    records: the driver's lines since the last `attempt` began, each launch with what Triton's launcher was `given`.
    quiet: the driver was built with QUIET, and nothing is recorded.
    """

    def __init__(self, path: Path, capability: int, quiet: bool = False) -> None:
        import triton
        from triton.backends.nvidia.driver import CudaDriver, CudaLauncher

        self.records: list[dict] = []
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.library.take_notes.restype = ctypes.c_char_p
        self.library.describe(capability, *GPUS[capability])
        stub = self

        class Launcher(CudaLauncher):
            """Triton's launcher, which keeps what it is given for each launch."""

            def __init__(self, source: Any, metadata: Any) -> None:
                super().__init__(source, metadata)
                self.kinds = list(source.signature.values())

            def __call__(self, *arguments: Any) -> None:
                super().__call__(*arguments)
                # grid, stream, function, two kinds of metadata and two hooks come first; two kinds of scratch last
                stub.note_launch(
                    [each for part in zip(arguments[9:], self.kinds, strict=True) for each in flattened(*part)]
                )

        class Driver(CudaDriver):
            """Triton's driver, without torch.cuda."""

            def __init__(self) -> None:
                super().__init__()
                self.launcher_cls = CudaLauncher if quiet else Launcher
                self.get_current_stream = self.get_current_device = lambda *device: 0
                self.get_device_capability = lambda device=None: divmod(capability, 10)

            def get_active_torch_device(self) -> torch.device:
                return torch.device("cpu")

        triton.runtime.driver.set_active(Driver())
        processors, _, shared = GPUS[capability]
        properties = SimpleNamespace(multi_processor_count=processors, shared_memory_per_multiprocessor=shared)
        torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
        torch.cuda.get_device_properties = lambda device: properties

    def note_launch(self, given: list[list[int]]) -> None:
        """Keep the driver's lines of a launch whose arguments are these."""
        notes = [json.loads(line) for line in self.library.take_notes().splitlines()]
        for launch in (note for note in notes if "launch" in note):
            launch["given"] = [*given, [8, 0], [8, 0]]
        self.records.extend(notes)

    def attempt(self, call: Callable[[], object]) -> dict:
        """What came to the driver while a function ran, and the error with which it ended."""
        self.records.clear()
        self.library.take_notes()
        error = None
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {"error": error, "records": list(self.records)}

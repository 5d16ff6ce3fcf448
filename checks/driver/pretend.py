"""Runs a program as if there were an H100: its kernels are compiled, and launched by a driver that runs none.

    python -m checks.driver.pretend -m bench norm --quick

What tensors hold then means nothing, nor do times. Large tensors are memory that nobody touches, so that sizes of a GPU
cost little here. It serves rehearsals of what needs a GPU, and it fills Triton's cache.

Belongs here: what of torch.cuda and of tensors has to seem otherwise, besides what Stub changes.
"""

import contextlib
import math
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - it lists what torch.cuda has, each function once, before this file replaces some
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .stub import GPUS, VARIABLE, Stub, build, memory, missing

CAPABILITY = 90
NAME = "H100 of a rehearsal"  # with a name by which kernels/cost.py knows the machine
LARGE = 1 << 18  # elements of a tensor that nothing is computed of, as it would take long
WITH_SIZES = ("randn", "rand", "full", "zeros", "ones")  # what makes a tensor of its first argument's sizes
WITHOUT = {"device": "meta", "generator": None}  # in place of these options: what gives sizes and no values


def placed(value: Any) -> Any:
    """The CPU in place of a GPU."""
    name = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(name, str) and (name == "cuda" or name.startswith("cuda:")) else value


EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # what a kernel would write
BLOCKS = "_scaled_mm_v2"  # what torch.nn.functional.scaled_mm calls, and a CPU has for no blocks


def large(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > LARGE


def untouched(like: Any) -> Any:
    """For a tensor without values, memory of its sizes and strides that takes no room until it is written."""
    if not isinstance(like, Tensor):
        return like
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    return memory(extent, dtype=like.dtype).as_strided(like.shape, like.stride())


class Untouched(TorchDispatchMode):
    """Within, nothing is computed of large tensors, neither in a backward: results have their sizes, and no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        makes_large = func.overloadpacket.__name__ in WITH_SIZES and math.prod(args[0]) > LARGE
        if func.is_view or not (makes_large or any(map(large, tree_leaves((args, given))))):
            return func(*args, **given)
        if func._schema.is_mutable:
            return given.get("out", args[0]) if func._schema.returns else None
        of_sizes = {name: WITHOUT.get(name, value) for name, value in given.items()}
        try:
            return tree_map(
                untouched, func(*tree_map_only(Tensor, on_meta, args), **tree_map_only(Tensor, on_meta, of_sizes))
            )
        except RuntimeError:  # sizes of the result depend on values
            return func(*args, **given)


def on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


class Pretence(TorchFunctionMode):
    """Within, every tensor is made on the CPU and says that it lies on a GPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_cuda and func.__name__ == "__get__":
            return True
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        given = {name: placed(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        args = tuple(map(placed, args))
        name = getattr(func, "__name__", "")
        if name == BLOCKS:
            return memory(args[0].shape[0], args[1].shape[1], dtype=torch.bfloat16)
        if func in (torch.mm, torch.addmm) and "out_dtype" in given:  # no CPU has one with a wider sum, either
            return given["out"]
        made = func(*args, **given)
        if name in EMPTY and made.device.type == "cpu" and not large(made):
            made.untyped_storage().fill_(0)  # else what is called would depend on what was in memory, such as indices
        return made


class Event:
    """An event of a GPU on which everything takes a millisecond."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Stream:
    """The stream of a GPU that has one."""

    cuda_stream = 0

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


def nothing(*arguments: Any, **options: Any) -> None:
    """A stand-in for what only a GPU can do."""


def within(function: Callable, *arguments: Any, **options: Any) -> Any:
    """Call it within a Pretence. torch leaves that while it runs a backward, as it does within any function of its."""
    with Pretence():
        return function(*arguments, **options)


def begin(folder: Path) -> Stub:
    """This process believes that it has a GPU, until it ends. The driver is built in the folder."""
    if (needed := missing()) is not None:
        raise RuntimeError(f"a driver without a GPU needs {needed}")
    os.environ[VARIABLE] = str(folder)  # before Triton looks for it
    stub = Stub(build(folder, "-DQUIET"), CAPABILITY, quiet=True)
    processors, _, shared = GPUS[CAPABILITY]
    major, minor = divmod(CAPABILITY, 10)
    properties = SimpleNamespace(
        name=NAME, major=major, minor=minor, multi_processor_count=processors, total_memory=80 << 30,
        shared_memory_per_multiprocessor=shared, L2_cache_size=1 << 10,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_name = lambda device=None: NAME
    cuda.get_device_properties = lambda device=None: properties
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream()
    cuda.stream = cuda.device = lambda which: contextlib.nullcontext()
    cuda.max_memory_allocated = cuda.memory_allocated = cuda.max_memory_reserved = lambda device=None: 0
    cuda.mem_get_info = lambda device=None: (properties.total_memory, properties.total_memory)
    for name in ("synchronize", "empty_cache", "_sleep", "reset_peak_memory_stats", "set_device", "manual_seed_all"):
        setattr(cuda, name, nothing)
    cuda.set_sync_debug_mode = nothing
    cuda.is_current_stream_capturing = lambda: False
    autograd: Any = torch.autograd
    autograd._engine_run_backward = partial(within, autograd._engine_run_backward)
    return stub


def main(arguments: list[str]) -> None:
    """Run `-m MODULE ARGUMENTS`, or `FILE ARGUMENTS`, in this process."""
    with tempfile.TemporaryDirectory(prefix="tpformer-driver-") as folder:
        begin(Path(folder))
        module = arguments[0] == "-m"
        sys.argv = arguments[module:]
        with Pretence(), Untouched():
            if module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

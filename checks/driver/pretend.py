"""Runs a program as if there were an H100: its kernels are compiled, and launched by a driver that runs none.

    python -m checks.driver.pretend -m bench norm --quick

What tensors hold then means nothing, nor do times. Random numbers, large tensors that are filled, products of matrices
without gradients, and attention are memory that nobody touches, so that sizes of a GPU cost little here. This is for
rehearsals of what needs a GPU, and to fill Triton's cache.

Belongs here: what of torch.cuda and of tensors has to seem otherwise, besides what Stub changes.
"""

import contextlib
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
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .stub import GPUS, VARIABLE, Stub, build, memory, missing

CAPABILITY = 90
NAME = "H100 of a rehearsal"  # with a name by which kernels/cost.py knows the machine
RANDOM = (torch.randn, torch.rand)
LARGE = 1 << 20  # elements that it takes long to fill
PRODUCTS = (torch.matmul, torch.mm, torch.addmm, F.linear, Tensor.matmul, Tensor.__matmul__, Tensor.mm)
IN_PLACE = (Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.addmm_)


def placed(value: Any) -> Any:
    """The CPU in place of a GPU."""
    name = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(name, str) and (name == "cuda" or name.startswith("cuda:")) else value


BLOCKS = "_scaled_mm_v2"  # what torch.nn.functional.scaled_mm calls, and a CPU has for no blocks


class Attention(torch.autograd.Function):
    """A stand-in for attention, which would take most of the time of a layer here."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.like = q.shape, k.shape, v.shape
        return memory(*q.shape[:-1], v.shape[-1], dtype=q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(memory(*shape, dtype=gradients[0].dtype) for shape in ctx.like)


class Pretence(TorchFunctionMode):
    """Within, every tensor is made on the CPU and says that it lies on a GPU."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is Tensor.is_cuda and func.__name__ == "__get__":
            return True
        if func in IN_PLACE or func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        given = {name: placed(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        args = tuple(map(placed, args))
        if func in RANDOM and "generator" not in given:
            return as_good_as_random(args, given)
        if func is torch.full and "dtype" in given and torch.Size(args[0]).numel() > LARGE:
            return memory(*args[0], dtype=given["dtype"])
        if func is F.scaled_dot_product_attention:
            return Attention.apply(*args[:3])
        if func in PRODUCTS and "out" in given:
            return given["out"]
        if getattr(func, "__name__", "") == BLOCKS:
            return memory(args[0].shape[0], args[1].shape[1], dtype=torch.bfloat16)
        tensors = [each for each in (*args, *given.values()) if isinstance(each, Tensor)]
        if func in PRODUCTS and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors)):
            like = func(*(each.to("meta") if isinstance(each, Tensor) else each for each in args), **given)
            return memory(*like.shape, dtype=like.dtype) if like.numel() else torch.empty_like(like, device="cpu")
        return func(*args, **given)


def as_good_as_random(args: tuple, given: dict[str, Any]) -> Tensor:
    """Zeros in memory that takes no room until it is written."""
    size = args or given.pop("size")
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    dtype = given.pop("dtype", None) or torch.get_default_dtype()
    wants = given.pop("requires_grad", False)
    made = memory(*shape, dtype=dtype) if shape.numel() else torch.empty(shape, dtype=dtype)
    return made.requires_grad_(wants)


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
    for name in ("synchronize", "empty_cache", "_sleep", "reset_peak_memory_stats", "set_device", "manual_seed_all"):
        setattr(cuda, name, nothing)
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
        with Pretence():
            if module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

"""What the tests of tensor-parallel operations share.

Belongs here: seeded tensors, a rank's shards of them, the whole from all ranks' results. No tests.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from testing import assert_kernel_close, assert_same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tpformer import ops


class Here:
    """The device on which `make` creates this process's tensors."""

    device = torch.device("cpu")


def make(seed: int, dtype: torch.dtype, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Named tensors that are the same on every rank. They are drawn in float64, so that every dtype rounds the same
    numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(Here.device, dtype)
        for name, shape in shapes.items()
    }


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's slice of x along dim, as a leaf."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def with_transport(transport: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with this transport in every column_linear and row_linear; fail if another one ran."""
    names = ("column_linear", "row_linear")
    before = {name: getattr(ops, name) for name in names}
    try:
        for name in names:
            setattr(ops, name, partial(before[name], transport=transport))
        with ops.record_transports() as ran:
            result = function(*args)
    finally:
        for name in names:
            setattr(ops, name, before[name])
    assert {name for _, name in ran} <= {transport} and (ran or dist.get_world_size() == 1), ran
    return result


def on_device(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with its tensors on this device, and return CPU tensors. "cuda" is the GPU of this rank's
    number."""
    place = torch.device("cuda", dist.get_rank()) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.init()  # else a device mesh chooses a device by LOCAL_RANK
        torch.cuda.set_device(place)
    before, Here.device = Here.device, place
    try:
        return tree_map_only(Tensor, Tensor.cpu, function(*args))
    finally:
        Here.device = before


class OnTransport:
    """Like the fixture `ranks`, but every linear runs on one transport, on a device as in `on_device`.

    timeout: seconds of one run, in which a GPU's first kernels are compiled.
    """

    def __init__(self, ranks: Any, transport: str, device: str = "cpu", timeout: float = 60) -> None:
        self.ranks, self.transport, self.device, self.timeout = ranks, transport, device, timeout

    def __call__(self, size: int) -> Any:
        run, call = self.ranks(size).run, (on_device, self.device, with_transport, self.transport)
        return SimpleNamespace(run=partial(run, *call, timeout=self.timeout))


class Seen(TorchDispatchMode):
    """While on, counts the GEMMs, and finds the largest result: its elements in any dtype and in float32."""

    gemms = largest = largest_float32 = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.gemms += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                if x.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, x.numel())
        return result


def join(parts: list[Tensor], how: int | str) -> Tensor:
    """Put the ranks' parts together along a dim, or add them up ("sum"), or check that all are the same ("equal")."""
    if how == "sum":
        return torch.stack(parts).sum(0)
    if how == "equal":
        assert all(torch.equal(part, parts[0]) for part in parts), "ranks disagree"
        return parts[0]
    return torch.cat(parts, int(how))


def assert_close(actual: dict[str, Tensor], oracle: dict[str, Tensor], baseline: dict[str, Tensor]) -> None:
    """A lower precision has at most about the error of plain torch in that dtype; float64 differs by rounding alone.

    float64 gradients, whose names begin with d, are compared together: one of them may be zero but for rounding.
    """
    assert actual.keys() == oracle.keys() == baseline.keys()
    gradients = [name for name, x in actual.items() if x.dtype == torch.float64 and name.startswith("d")]
    for name in actual.keys() - gradients:
        assert_kernel_close(actual[name], oracle[name], baseline[name], name)
    assert_same(*({name: each[name] for name in gradients} for each in (actual, oracle)))

"""What the tests of tensor-parallel operations share.

Belongs here: seeded tensors, a rank's shards of them, the whole from all ranks' results, and what plain torch makes of
them. No tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from opened import IN_FP8
from testing import assert_kernel_close, assert_same
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tpformer import ops
from tpformer.distributed import record_collectives


class Here:
    """The device on which `make` creates this process's tensors, and the transport of the linears of its cases."""

    device = torch.device("cpu")
    transport = "auto"


def make(seed: int, dtype: torch.dtype, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Named tensors, the same on every rank, drawn in float64, so that every dtype rounds the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(Here.device, dtype)
        for name, shape in shapes.items()
    }


def mine(x: Tensor, place: int | str) -> Tensor:
    """This rank's slice of x along a dim, as a leaf. Of what ranks hold whole, all."""
    return x.chunk(dist.get_world_size(), place)[dist.get_rank()].clone() if isinstance(place, int) else x


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


class Case(Protocol):
    """A tensor-parallel operation with its sizes, as t ranks and as plain torch compute it from the same tensors.

    inputs, outputs: of each its whole shape, and the dim along which ranks hold slices of it. Of one that every rank
    holds whole, how the ranks' gradients make the whole's: they are added up ("sum"), or are the same everywhere
    ("equal").
    calls: the collectives of the forward, in order, and those of the backward, on more than one rank.
    """

    t: int

    def inputs(self) -> Shapes: ...
    def outputs(self) -> Shapes: ...
    def plain(self, **inputs: Tensor) -> dict[str, Tensor]: ...
    def ours(self, group: dist.ProcessGroup | None, **inputs: Tensor) -> dict[str, Tensor]: ...
    def calls(self, itemsize: int) -> tuple[Calls, Calls]: ...


Calls = list[tuple[str, int]]
Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], int | str]]


def inputs_of(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return make(0, dtype, **{name: shape for name, (shape, _) in case.inputs().items()})


def upstream_of(case: Case) -> dict[str, Tensor]:
    """The gradients of the outputs."""
    return make(1, torch.float64, **{name: shape for name, (shape, _) in case.outputs().items()})


def mine_of(tensors: dict[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    return {name: mine(x, shapes[name][1]) for name, x in tensors.items()}


def on_ranks(cases: Sequence[Case], dtype: torch.dtype) -> list[tuple[dict[str, Tensor], tuple[Calls, Calls]]]:
    """Of each case this rank's outputs and gradients, and the collectives of forward and backward."""
    found = []
    for case in cases:
        inputs = leaves(mine_of(inputs_of(case, dtype), case.inputs()))
        with record_collectives() as forward:
            outputs = case.ours(dist.group.WORLD, **inputs)
        upstream = mine_of(upstream_of(case), case.outputs())
        with record_collectives() as backward:
            results = with_gradients(inputs, outputs, upstream)
        found.append((results, (list(forward), sorted(backward))))
    return found


def plain(case: Case, dtype: torch.dtype, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same in plain torch: inputs rounded to `rounded`, computed in dtype."""
    inputs = leaves({name: x.to(dtype) for name, x in inputs_of(case, rounded or dtype).items()})
    return with_gradients(inputs, case.plain(**inputs), upstream_of(case))


def with_gradients(inputs: Tensors, outputs: Tensors, upstream: Tensors) -> Tensors:
    pairs = [(outputs[name], dy.to(outputs[name])) for name, dy in upstream.items()]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return {name: y.detach() for name, y in outputs.items()} | {f"d{name}": x.grad for name, x in inputs.items()}


def check(run: Callable[..., Any], cases: Sequence[Case], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Compare the ranks' results, put together, with plain torch, and their collectives with the list of each case.

    run: that of the world, perhaps with `on_transport`. All cases run in one session. Returns what was put together.
    """
    found = []
    for case, by_rank in zip(cases, zip(*run(on_ranks, cases, dtype), strict=True), strict=True):
        places = {name: place for name, (_, place) in (case.inputs() | case.outputs()).items()}
        results, calls = zip(*by_rank, strict=True)
        whole = {name: join([x[name] for x in results], places[name.removeprefix("d")]) for name in results[0]}
        each = (whole, plain(case, torch.float64), plain(case, dtype))
        assert_close(*({f"{name} of {case}": x for name, x in some.items()} for some in each))
        forward, backward = case.calls(dtype.itemsize) if len(calls) > 1 else ([], [])
        assert list(calls) == [(forward, sorted(backward))] * case.t, case
        found.append(whole)
    return found


def on_transport(transport: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with this transport in the linears of its cases; fail if another one ran."""
    with mock.patch.object(Here, "transport", transport), ops.record_transports() as ran:
        result = function(*args)
    assert {name for _, name in ran} <= {transport.removeprefix(IN_FP8)} and (ran or dist.get_world_size() == 1), ran
    return result


def on_device(device: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function with its tensors on this device, and return CPU tensors. "cuda" is this rank's own GPU."""
    place = torch.device("cuda", dist.get_rank()) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.init()  # else a device mesh chooses a device by LOCAL_RANK
        torch.cuda.set_device(place)
    with mock.patch.object(Here, "device", place):
        return tree_map_only(Tensor, Tensor.cpu, function(*args))


class Seen(TorchDispatchMode):
    """While on, counts the GEMMs, and finds the largest result: its elements in any dtype and in float32."""

    gemms = largest = largest_float32 = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.gemms += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for x in filter(torch.is_tensor, result if isinstance(result, tuple | list) else [result]):
            self.largest = max(self.largest, x.numel())
            self.largest_float32 = max(self.largest_float32, x.numel() if x.dtype == torch.float32 else 0)
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

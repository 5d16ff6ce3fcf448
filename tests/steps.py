"""One forward and backward of a module: its result and gradients, put together from ranks.

Belongs here: what tests of modules on one rank and on several share. tests/ops/shards.py is the same for operations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from testing import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.parallel import reduce_partial_gradients

Results = dict[str, Tensor | None]


def gradients(module: nn.Module, partial: Sequence[str] = ()) -> Results:
    """Whole gradients by name. partial: names of a user's own parameters whose gradients are summed, too."""
    reduce_partial_gradients(module, partial=partial)
    return {name: full_tensor(p.grad) for name, p in module.named_parameters()}


def step(module: nn.Module, x: Tensor, dy: Tensor, *, partial: Sequence[str] = (), **options: Any) -> Results:
    """Return y, dx and the gradients of the parameters."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = module(x, **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(module, partial)


def with_keys_in_one(results: Results) -> Results:
    """Join the gradients of each k_proj: its bias has one of zero but for rounding, in proportion to its weight's."""
    found = dict(results)
    for bias in [name for name in results if name.endswith("k_proj.bias")]:
        weight = bias.removesuffix("bias") + "weight"
        found[weight] = torch.cat([found[weight].flatten(), found.pop(bias).flatten()])
    return found


def joined(by_rank: list[Results], dim: int) -> list[Results]:
    """Each rank's results with the whole y and dx, of which the ranks had slices along dim."""
    rows = {name: torch.cat([each[name] for each in by_rank], dim) for name in ("y", "dx")}
    return [each | rows for each in by_rank]


def tp_mesh() -> DeviceMesh:
    """The tensor-parallel mesh of all ranks."""
    return build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]


def own(x: Tensor, dim: int | None = 0) -> Tensor:
    """A copy of this rank's slice of x along dim, or of all of x."""
    return (x if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()]).clone()


def _all_cases(function: Callable[..., Any], cases: list[tuple]) -> list[Any]:
    mesh = tp_mesh()
    return [function(mesh, *case) for case in cases]


def each_case(ranks: Any, t: int, function: Callable[..., Any], cases: Iterable[tuple]) -> Iterator[tuple]:
    """(case, all ranks' results of function(mesh, *case)) of every case, in one session of t ranks."""
    cases = list(cases)
    assert cases
    return zip(cases, zip(*ranks(t).run(_all_cases, function, cases), strict=True), strict=True)


def assert_ranks_have(found: Iterable[Results], wanted: Results, dim: int | None, what: Any = "") -> None:
    """Each rank has the wanted gradients, and together they have y and dx: slices along dim, or all on each rank."""
    for each in found if dim is None else joined(list(found), dim):
        assert_same(each, wanted, str(what))


def draw(*shapes: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    """Float64 normals of these shapes, which depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

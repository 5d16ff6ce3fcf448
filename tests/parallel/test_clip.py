"""clip_grad_norm_ scales gradients on any mixture of meshes as torch's function does in one process."""

import math

import pytest
import torch
from testing import assert_same
from torch import nn
from torch.distributed.fsdp import fully_shard

from tpformer.distributed import build_mesh, record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from tpformer.parallel import clip_grad_norm_

ROWS, WIDTH = 8, 6


def model(tp=None) -> nn.Sequential:
    """Sharded linears, a bias whose gradient is partial, and a plain linear that sees whole rows."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), ColumnParallelLinear(WIDTH, 8, tp=tp), RowParallelLinear(8, WIDTH, tp=tp)]
    built = nn.Sequential(*parts).double()
    values = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in built.named_parameters()}
    built.load_state_dict(values)
    return built


def backward(built: nn.Module, x: torch.Tensor) -> None:
    built(x).square().sum().backward()


def rows(first: int = 0, last: int = ROWS) -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).cos()[first:last]


LIMITS = [(0.1, 2.0), (1e9, 2.0), (0.1, math.inf), (0.1, 3.0)]


def clipped(data_parallel: int, by_parameters: bool) -> list[tuple]:
    """For each of LIMITS: the norm, whole gradients after clipping, and the collectives that it took."""
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    share, number, found = ROWS // data_parallel, mesh["dp_shard"].get_local_rank(), []
    for limit in LIMITS:
        built = model(mesh["tp"])
        if data_parallel > 1:
            for part in (built[1], built[2]):  # the plain linear stays plain: its gradient is summed here
                fully_shard(part, mesh=mesh["dp_shard"]).set_gradient_divide_factor(1.0)
        backward(built, rows(share * number, share * (number + 1)))
        if data_parallel > 1:
            for p in built[0].parameters():
                torch.distributed.all_reduce(p.grad, group=mesh.get_group("dp_shard"))
        with record_collectives() as calls:
            norm = clip_grad_norm_(built.parameters() if by_parameters else built, *limit, foreach=True)
        found.append((norm, {name: full_tensor(p.grad) for name, p in built.named_parameters()}, calls))
    return found


@pytest.mark.parametrize(("data_parallel", "by_parameters"), [(1, True), (1, False), (2, True)])
def test_equals_torch(ranks, data_parallel, by_parameters):
    by_rank = ranks(2 * data_parallel).run(clipped, data_parallel, by_parameters)
    for limit, results in zip(LIMITS, zip(*by_rank, strict=True), strict=True):
        built = model()
        backward(built, rows())
        norm = torch.nn.utils.clip_grad_norm_(built.parameters(), *limit)
        for found, gradients, calls in results:
            assert [name for name, _ in calls] == ["all_reduce"] * data_parallel, limit
            assert_same(found, norm, f"norm of {limit}")
            assert_same(gradients, {name: p.grad for name, p in built.named_parameters()}, f"clipped to {limit}")


def with_partial_gradients():
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    tp = TensorParallel(mesh, sequence_parallel=True)
    part = model(tp)[2]
    half = 4 * mesh.get_local_rank()
    x = (rows() @ torch.ones(WIDTH, 8, dtype=torch.float64)).sin()
    part(x[:, half : half + 4]).square().sum().backward()
    assert part.bias.grad.placements[0].is_partial()
    return clip_grad_norm_(part, 0.1), {name: full_tensor(p.grad) for name, p in part.named_parameters()}


def test_partial_gradients_are_added_up(ranks):
    part = model()[2]
    part((rows() @ torch.ones(WIDTH, 8, dtype=torch.float64)).sin()).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(part.parameters(), 0.1)
    for found, gradients in ranks(2).run(with_partial_gradients):
        assert_same(found, norm)
        assert_same(gradients, {name: p.grad for name, p in part.named_parameters()})


def test_plain_parameters_need_no_process_group():
    linear = nn.Linear(2, 2)
    assert clip_grad_norm_(linear, 1.0) == 0
    linear(torch.ones(1, 2)).sum().backward()
    linear.weight.grad[0, 0] = math.nan
    assert clip_grad_norm_(linear.weight, 1.0).isnan()
    with pytest.raises(RuntimeError, match="norm of order 2.0 of the gradients is nan"):
        clip_grad_norm_(linear, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type=0.0"):
        clip_grad_norm_(linear, 1.0, 0)

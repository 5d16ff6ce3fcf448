"""Partial gradients are added up once; norms count every parameter once, and gradients on any mixture of meshes are
clipped as torch's function does in one process."""

import math

import pytest
import torch
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tpformer.distributed import build_mesh, record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.distributed.mesh import expert_mesh
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import clip_grad_norm_, gradient_norm, reduce_partial_gradients
from tpformer.parallel.gradients import local_part

CONFIG = GPTConfig(vocab_size=60, seq_length=12, n_layers=2, hidden_size=24, n_heads=2, n_kv_heads=1)
ROWS, WIDTH = 8, 6
LIMITS = [(0.1, 2.0), (1e9, 2.0), (0.1, math.inf), (0.1, 3.0)]


@on_every_rank(2)
def test_one_all_reduce_and_idempotent() -> None:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    model = GPT(CONFIG, tp=TensorParallel(mesh, True), dtype=torch.float64)
    ids = torch.arange(24).view(2, 12)
    model(ids, targets=ids.flip(1)).backward()
    with pytest.raises(RuntimeError, match="reduce_partial_gradients"):
        gradient_norm(model.parameters(), [mesh.get_group()])
    with record_collectives() as first:
        reduce_partial_gradients(model)
    before = [p.grad.to_local().clone() for p in model.parameters()]
    with record_collectives() as second:
        reduce_partial_gradients(model)
    assert_identical([p.grad.to_local() for p in model.parameters()], before)
    replicated = {name: p for name, p in model.named_parameters() if p.grad.placements[0].is_replicate()}
    assert [tuple(each) for each in first] == [("all_reduce", 8 * sum(p.numel() for p in replicated.values()))]
    assert second == []
    # all ranks share norms, row biases, positions, and the one key-value head
    shared = {"layers.0.self_attn.k_proj.weight", "layers.1.mlp.fc2.bias", "embed_positions.weight", "norm.weight"}
    assert shared <= replicated.keys()


def model(tp=None) -> nn.Sequential:
    """A plain linear that sees whole rows, and sharded linears, one of which has a bias that all ranks share."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), ColumnParallelLinear(WIDTH, 8, tp=tp), RowParallelLinear(8, WIDTH, tp=tp)]
    built = nn.Sequential(*parts).double()
    built.load_state_dict({name: torch.randn(p.shape, dtype=torch.float64) for name, p in built.named_parameters()})
    return built


def backward(built: nn.Module, first: int = 0, last: int = ROWS) -> None:
    x = torch.arange(ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).cos()[first:last]
    built(x).square().sum().backward()


def clipped(data_parallel: int, by_parameters: bool) -> list[tuple]:
    """For each of LIMITS: the norm, whole gradients after clipping, and the collectives that it took."""
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    share, number, found = ROWS // data_parallel, mesh["dp_shard"].get_local_rank(), []
    for limit in LIMITS:
        built = model(mesh["tp"])
        if data_parallel > 1:  # the last linear is on both axes, the others' gradients are summed here
            fully_shard(built[2], mesh=mesh["dp_shard"]).set_gradient_divide_factor(1.0)
        backward(built, share * number, share * (number + 1))
        if data_parallel > 1:
            for p in built[:2].parameters():
                torch.distributed.all_reduce(local_part(p.grad), group=mesh.get_group("dp_shard"))
        with record_collectives() as calls:
            norm = clip_grad_norm_(built.parameters() if by_parameters else built, *limit, foreach=True)
        found.append((norm, {name: full_tensor(p.grad) for name, p in built.named_parameters()}, calls))
    return found


@pytest.mark.parametrize(("data_parallel", "by_parameters"), [(1, True), (1, False), (2, True)])
def test_clipping_equals_torchs(ranks, data_parallel, by_parameters):
    by_rank = ranks(2 * data_parallel).run(clipped, data_parallel, by_parameters)
    for limit, results in zip(LIMITS, zip(*by_rank, strict=True), strict=True):
        built = model()
        backward(built)
        norm = torch.nn.utils.clip_grad_norm_(built.parameters(), *limit)
        for found, gradients, calls in results:
            assert [name for name, _ in calls] == ["all_reduce"] * data_parallel, limit
            assert_same(found, norm, f"norm of {limit}")
            assert_same(gradients, {name: p.grad for name, p in built.named_parameters()}, f"clipped to {limit}")


@on_every_rank(2)
def test_partial_gradients_are_added_up_before_they_are_clipped() -> None:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    part, whole = model(TensorParallel(mesh, sequence_parallel=True))[2], model()[2]
    x = torch.arange(ROWS * 8, dtype=torch.float64).view(ROWS, 8).sin()
    part(x.chunk(2, 1)[mesh.get_local_rank()]).square().sum().backward()
    whole(x).square().sum().backward()
    assert part.bias.grad.placements[0].is_partial()
    assert_same(clip_grad_norm_(part, 0.1), torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    assert_same(*({name: full_tensor(p.grad) for name, p in each.named_parameters()} for each in (part, whole)))


@on_every_rank(4)
def test_groups_that_leave_out_parts_of_experts_are_refused() -> None:
    """They may be as many ranks as have all parts: those that have the same part."""
    mesh = build_mesh("cpu", tensor_parallel=1, data_parallel_replicate=4)
    view = expert_mesh(mesh, 2, 2)
    copies, _, experts = (view[name] for name in view.mesh_dim_names)
    whole = torch.arange(8, dtype=torch.float64)
    weight = nn.Parameter(distribute_tensor(whole, experts, [Shard(0)]))
    weight.grad = weight.detach().clone()
    for right in ([mesh.get_group("dp_replicate")], [experts.get_group()], [copies.get_group(), experts.get_group()]):
        assert_same(gradient_norm([weight], right), whole.norm())
    for wrong in ([copies.get_group()], [None]):
        words = r"shape \(8,\) has parts on 2 ranks, and the norm's groups leave out rank \d of these: give the groups"
        with pytest.raises(ValueError, match=words):
            gradient_norm([weight], wrong)


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

"""tpformer.Muon of a model that parallelize has cut, with and without FSDP2, and the refusal of torch's."""

from copy import deepcopy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_afterwards import Model, X
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

import tpformer
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.kernels.newton_schulz.reference import muon_scale
from tpformer.kernels.update import reference as update

MATRICES = {"0.up.weight": 1, "0.down.weight": 1, "1.up.weight": 3, "1.down.weight": 1}  # of one, three that are fused


def whole() -> nn.Module:
    return nn.Sequential(Model(seed=0), Model(seed=1))


def trained(model: nn.Module, state: dict | None = None) -> tuple[list[torch.Tensor], dict]:
    optimizer = tpformer.Muon(model, MATRICES, lr=0.1)
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()
    return [full_tensor(each.detach()).clone() for each in model.parameters()], optimizer.state_dict()


@on_every_rank(4)
def test_it_is_the_step_of_one_process():
    """Two tensor-parallel ranks, which cut 33 rows into 17 and 16, and two ranks of FSDP2, which cut those again."""
    model = whole()
    expected, state = trained(model)
    further, _ = trained(model, deepcopy(state))
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=2)
    cut = tpformer.parallelize(whole(), mesh["tp"], example=X)
    seen = []
    with mock.patch.object(update, "adamw_", lambda *lists, **options: seen.extend(map(type, lists[0]))):
        trained(tpformer.parallelize(whole(), mesh["tp"], example=X))
    assert set(seen) == {torch.Tensor} and len(seen) == 3 * 8, "kernels get this rank's parts"
    assert_same(trained(cut)[0], expected)
    assert_same(trained(cut, state)[0], further, "from the momentum of one process")
    sharded = tpformer.parallelize(whole(), mesh["tp"], example=X)
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh["dp_shard"])
    assert_same(trained(sharded)[0], expected)
    for each in (cut, sharded):
        each(X).pow(2).sum().backward()
        theirs = torch.optim.Muon([each[0].up.weight])
        with pytest.raises(ValueError, match=r"Muon cannot step a parameter of \(33, 16\) .*; use tpformer.Muon"):
            theirs.step()
    dist.barrier()


@pytest.mark.parametrize(("options", "words"), [
    ({"momentum": 1.0}, "momentum=1.0, weight_decay=0.1: give a momentum from 0 to below 1"),
    ({"weight_decay": -1.0}, "momentum=0.95, weight_decay=-1.0: give"),
    ({"dtype": torch.float16}, "dtype=torch.float16: small momenta are 0 in it, so take torch.bfloat16"),
    ({"dtype": torch.int64}, "dtype=torch.int64: small momenta are 0 in it"),
])  # fmt: skip
def test_numbers_that_no_step_can_be_taken_with_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        tpformer.Muon(nn.Linear(4, 3), ["weight"], **options)


def test_groups_of_ones_own():
    """AdamW's can be added, and are loaded again; those of matrices stay one, and a foreign state changes nothing."""
    model, extra = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), nn.Parameter(torch.ones(2))
    optimizers = [tpformer.Muon(model, ["0.weight", "1.weight"]) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    first, second = optimizers
    for parameter in (*model.parameters(), extra):
        parameter.grad = torch.ones_like(parameter)
    first.step()
    assert ((extra - 0.5).abs() < 0.01).all(), "a first step of AdamW is as long as the rate of its group"
    second.load_state_dict(first.state_dict())
    assert_identical(second.state_dict(), first.state_dict())
    foreign = torch.optim.AdamW([{"params": group["params"]} for group in first.param_groups])
    before = first.state_dict()
    with pytest.raises(ValueError, match="of an optimizer with other groups"):
        first.load_state_dict(foreign.state_dict())
    assert_identical(first.state_dict(), before)
    with pytest.raises(ValueError, match="a group of matrices cannot be added to a Muon"):
        first.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "muon": True})
    group = first.param_groups[0]
    first.param_groups += [group | {"params": [group["params"].pop()]}]
    with pytest.raises(RuntimeError, match=r"are in groups of \[1, 1\], and it was made with one of 2"):
        first.step()


def test_a_matrix_with_two_names_is_one():
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False)})
    model["b"].weight = model["a"].weight
    for names in ("b.weight", ["a.weight", "b.weight"]):
        (group,) = tpformer.Muon(model, names).param_groups
        assert group["muon"] and group["params"] == [model["a"].weight]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_torchs_default_dtype_and_that_of_parameters(dtype):
    """The flag of a step is float32 whatever torch's default is, and a small gradient in float16 is none of 0."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        matrix = nn.Linear(6, 4, bias=False, dtype=dtype)
        optimizer, start = tpformer.Muon(matrix, ["weight"], lr=0.5, weight_decay=0.0), matrix.weight.detach().clone()
        matrix.weight.grad = 1e-6 * torch.eye(4, 6, dtype=dtype)
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    moved = (start - matrix.weight.detach()).diagonal().double()
    assert (moved > 0.3 * 0.5 * muon_scale(4, 6)).all(), "singular values are near 1"

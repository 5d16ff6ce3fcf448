"""tpformer.Muon of a model that parallelize has cut, with and without FSDP2, and the refusal of torch's."""

from copy import deepcopy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from testing import assert_same, on_every_rank
from torch import nn
from torch.distributed.fsdp import fully_shard

import tpformer
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.kernels.update import reference as update

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MATRICES = {"0.up.weight": 1, "0.down.weight": 1, "1.up.weight": 3, "1.down.weight": 1}  # of one, three that are fused


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 33), nn.Linear(33, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def whole() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


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

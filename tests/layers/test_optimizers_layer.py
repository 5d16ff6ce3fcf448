"""Optimizers that update each element by itself are exact on shards; Adafactor does not, and is refused."""

import pytest
import torch
import torch.distributed as dist
from testing import assert_same
from torch import Tensor, nn

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]


def stepped(kind: type[torch.optim.Optimizer], parts: str, with_mesh: bool) -> list[Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"] if with_mesh else None
    torch.manual_seed(0)
    layer = ColumnParallelLinear(6, 8, gather_output=True, tp=mesh, dtype=torch.float64)
    optimizer = kind([p for name, p in layer.named_parameters() if name in parts.split()], lr=0.1)
    for seed in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full_tensor(p.detach()) for p in layer.parameters()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_by_elements_equal_one_process(ranks, kind):
    results = ranks(2).run(stepped, kind, "weight bias", True)
    assert_same(results[0], stepped(kind, "weight bias", False))


def refused(parts: str) -> None:
    with pytest.raises(ValueError, match=r"Adafactor cannot step a parameter of \(8,.*\) that is sharded over ranks"):
        stepped(torch.optim.Adafactor, parts, True)
    plain = nn.Linear(3, 3)
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.Adafactor(plain.parameters()).step()


@pytest.mark.parametrize("parts", ["weight bias", "bias"])
def test_adafactor_is_refused_on_shards(ranks, parts):
    ranks(2).run(refused, parts)

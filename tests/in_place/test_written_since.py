"""What is written to parameters between a forward and its backward is minded, as in one process."""

import re

import torch
from steps import tp_mesh
from testing import on_every_rank
from torch import nn

from tpformer import layers, parallelize

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
WRITES = {
    "in place": lambda model, step: model[2].weight.mul_(2),
    "of a list": lambda model, step: torch._foreach_mul_([model[0].bias, model[2].weight], 2.0),
    "by nn.init": lambda model, step: nn.init.constant_(model[2].weight, 1.0),
    "a step": lambda model, step: step(foreach=False),
    "a step as on a GPU": lambda model, step: step(foreach=True),
    "whole": lambda model, step: model[3].weight.add_(1),
    ".data": lambda model, step: model[2].weight.data.mul_(2),
    "frozen": lambda model, step: model[2].weight.requires_grad_(False),
}


def raises(model, write):
    """Whether a backward raises after this write; None if it runs."""

    def step(foreach):
        torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach).step()

    model(X).sum().backward()
    loss = model(X.clone().requires_grad_()).sum()
    with torch.no_grad():
        write(model, step)
    try:
        loss.backward()
    except RuntimeError as error:
        return re.search("modified (by an )?inplace|written in place", str(error)) is not None


@on_every_rank(2)
def test_a_backward_minds_what_was_written_since_its_forward():
    """DTensor counts a write for itself alone, and a forward keeps the local tensor."""
    plain, cut = (nn.Sequential(nn.Linear(8, 22), nn.Tanh(), nn.Linear(22, 8), nn.LayerNorm(8)) for _ in range(2))
    cut.load_state_dict(plain.state_dict())
    parallelize(cut, tp_mesh(), {"0": "colwise", "2": "rowwise"}, example=X)
    up = layers.ColumnParallelLinear(8, 22, tp=tp_mesh())
    down, norm = layers.RowParallelLinear(22, 8, tp=tp_mesh()), layers.LayerNorm(8, tp=tp_mesh())
    models = plain, cut, nn.Sequential(up, nn.Tanh(), down, norm)
    outcomes = [{name: raises(model, write) for name, write in WRITES.items()} for model in models]
    unseen = ".data", "frozen"
    wanted = [unseen, unseen, (*unseen, "of a list")]  # torch counts no such write for a DTensor
    assert outcomes == [{name: None if name in some else True for name in WRITES} for some in wanted], outcomes

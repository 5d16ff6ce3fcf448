"""What runs within a backward sees parameters as the forward did, also where a parameter itself is differentiated."""

import torch
from steps import tp_mesh
from testing import assert_same, on_every_rank
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from tpformer import parallelize
from tpformer.distributed.dtensor import full_tensor

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Model(nn.Module):
    """A norm and two linears, which are run again in the backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.double()

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x):
        return self.down(torch.tanh(self.up(self.norm(x) * self.norm.weight)))


def penalised(model: nn.Module, way: str) -> list:
    """What the ways to differentiate a loss give of which parameters themselves are a term."""
    seen: list = []
    if way == "hooks":
        for p in (model.up.weight, model.down.weight):
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    loss = sum(p.square().sum() for p in model.parameters()) + model(X).square().mean()
    named = dict(model.named_parameters())
    if way == "grad":
        found = torch.autograd.grad(loss, list(named.values()))
        return [full_tensor(each) for each in found]
    if way == "grad of a dict, materialized":
        named |= {"other": torch.ones(3, dtype=torch.float64, requires_grad=True)}
        found = torch.autograd.grad(loss, named, materialize_grads=True)
        return [{name: full_tensor(each) for name, each in found.items()}]
    loss.backward(inputs=list(named.values()) if way == "inputs" else None)
    return [*seen, {name: full_tensor(p.grad) for name, p in named.items()}]


@on_every_rank(2)
def test_a_loss_of_parameters_and_a_recomputed_forward() -> None:
    for way in ("backward", "inputs", "hooks", "grad", "grad of a dict, materialized"):
        model = parallelize(Model(), tp_mesh(), example=X)
        assert_same(penalised(model, way), penalised(Model(), way), way)


@on_every_rank(2)
def test_linears_that_a_checkpoint_runs_are_cut() -> None:
    """Also where its forward makes no graph."""
    for reentrant in (False, True):
        models = Model(reentrant), parallelize(Model(reentrant), tp_mesh(), example=X)
        for each in models:
            each(X.clone().requires_grad_()).square().mean().backward()
        assert models[1].up.weight.to_local().shape == models[1].down.weight.to_local().shape == (16, 16)
        assert_same(*({name: full_tensor(p.grad) for name, p in each.named_parameters()} for each in models))


@on_every_rank(2)
def test_values_from_a_vector_lie_as_the_parameters_did() -> None:
    """A rank's part of a row-parallel weight is a slice of a matrix's columns, which no view makes a vector."""
    whole, model = Model(), parallelize(Model(), tp_mesh(), example=X)
    for _ in range(2):
        for each in (whole, model):
            vector_to_parameters(0.5 * parameters_to_vector(each.parameters()), each.parameters())
        assert_same(*(parameters_to_vector(map(full_tensor, each.parameters())).detach() for each in (model, whole)))
    assert all(p.to_local().is_contiguous() for p in model.parameters())

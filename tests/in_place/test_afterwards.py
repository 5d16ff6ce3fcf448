"""What people do with a model after parallelize, and around it: right, or refused in one sentence."""

import inspect
import warnings
from copy import deepcopy
from functools import partial
from tempfile import mkstemp
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from steps import tp_mesh
from testing import assert_same, on_every_rank
from torch import nn, optim
from torch.ao.quantization import quantize_dynamic
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from turns import of_turn

from tpformer import parallelize
from tpformer.distributed.dtensor import full_tensor
from tpformer.in_place import tensor_parts, tensor_rules

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OF_WHOLE = ("Adafactor", "Muon", "LBFGS", "SparseAdam")  # not element by element, or of sparse gradients


class Model(nn.Module):
    """33 features, which two ranks share unequally."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.norm = nn.Linear(16, 33), nn.Linear(33, 16), nn.LayerNorm(16)
        self.double()

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def cut():
    return parallelize(Model(), tp_mesh(), example=X)


def trained(model, make, steps=2, state=None):
    """The parameters after some steps, and the optimizer."""
    optimizer = make(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()
    return [full_tensor(each.detach()).clone() for each in model.parameters()], optimizer


@on_every_rank(2)
def test_parameters_computed_from_parameters():
    """functional_call with what is computed from them, as an inner step of meta-learning or an average of weights."""
    found = []
    for model in (Model(), cut()):
        own = dict(model.named_parameters())
        inner = torch.autograd.grad(model(X).pow(3).mean(), list(own.values()))
        stepped = {name: p - 0.1 * g for (name, p), g in zip(own.items(), inner, strict=True)}
        functional_call(model, stepped, X).pow(3).sum().backward()
        averaged = {name: (0.9 * p + 0.1 * p.grad).detach() for name, p in own.items()}
        gradients = {name: full_tensor(p.grad) for name, p in own.items()}
        found.append([functional_call(model, averaged, X), gradients])
    assert_same(found[1], found[0])


@of_turn(0)
@on_every_rank(2)
def test_every_optimizer_of_torch_that_works_by_element():
    whole, model = Model(), cut()
    for name, kind in vars(optim).items():
        if not inspect.isclass(kind) or name in (*OF_WHOLE, "Optimizer"):
            continue
        for option in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
            known = inspect.signature(kind).parameters
            if option.keys() <= known.keys():
                make = partial(kind, lr=1e-2, **option, **{"eps": 1e-3} if "eps" in known else {})
                assert_same(trained(deepcopy(model), make)[0], trained(deepcopy(whole), make)[0], f"{name} {option}")


@on_every_rank(2)
def test_a_state_of_one_process_is_loaded():
    """Each rank takes its part of the moments. A state of other shapes is refused."""
    make = partial(optim.AdamW, lr=1e-2, eps=1e-3)
    whole = Model()
    _, saved = trained(whole, make)
    state = deepcopy(saved.state_dict())
    expected = trained(whole, make, state=deepcopy(state))[0]
    model = cut()
    trained(model, make)
    assert_same(trained(model, make, state=deepcopy(state))[0], expected)
    state["state"][0]["exp_avg"] = torch.zeros(17, 16)
    with pytest.raises(ValueError, match=r"exp_avg of AdamW is \(17, 16\), and its parameter is \(33, 16\) on all"):
        trained(model, make, state=state)


def hessian(model):
    x = X.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()


# what comes after parallelize, and words of the refusal
REFUSED = {
    "fully_shard.model, mesh=mesh": DistributedDataParallel,
    "torch.func's grad, vmap and jvp, forward-mode AD": lambda model: torch.func.vmap(model)(X),
    "forward-mode AD and tracers cannot go": forward_ad.dual_level()(lambda model: model(forward_ad.make_dual(X, X))),
    "gradients by backward.. or torch.autograd.grad": lambda model: torch.func.grad(lambda x: model(x).sum())(X),
    "trace the model before parallelize": lambda model: torch.jit.trace(model, X),
    "__setitem__ of a part of a parameter .* change its": lambda model: prune.l1_unstructured(model.up, "weight", 3),
    "torch cannot take normalize .* before parallelize": lambda model: parametrizations.spectral_norm(model.up),
    "torch cannot take _weight_norm .* before": lambda model: parametrizations.weight_norm(model.up).weight,
    "quantize before parallelize": lambda model: quantize_dynamic(model, {nn.Linear}),
    "leave the linears of that part out of its plan": hessian,
}
BEFORE = {"a FSDPModel is data-parallel already": fully_shard, "a DistributedDataP": DistributedDataParallel}


@on_every_rank(2)
def test_what_cannot_be_right_is_refused():
    for words, use in REFUSED.items():
        with pytest.raises((ValueError, RuntimeError), match=words):
            use(cut())
    for words, wrap in BEFORE.items():
        with pytest.raises(ValueError, match=f"{words}.*: call parallelize first"):
            parallelize(wrap(Model()), tp_mesh(), example=X)
    lazy = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 16))
    with pytest.raises(ValueError, match="0.weight has no shape yet: call the model once before"):
        parallelize(lazy, tp_mesh(), example=X.float())


@on_every_rank(2)
def test_a_value_that_one_rank_asks_for():
    """It says that it waits; what every rank has whole needs nobody."""
    model, path = cut(), [mkstemp()[1]]
    dist.broadcast_object_list(path)
    store = dist.FileStore(path[0], 2)
    said = mock.patch.object(warnings, "warn", lambda words, *_: store.set(words.split(" (")[0], words))
    with said, mock.patch.object(tensor_rules, "PATIENCE", 0.05):
        if dist.get_rank() == 0:
            assert model.norm.weight.sum().item() == 16
        else:
            waited = store.get("item() of a tensor")
            assert b"item() of a tensor () that ranks share has waited 0.05 s for other ranks" in waited
        model.up.weight.detach().sum().item()
    dist.barrier()
    with said, mock.patch.object(tensor_parts, "PATIENCE", 0.05):
        if dist.get_rank() == 1:
            assert b"a result of () of which each rank has a term has waited 0.05 s" in store.get("a result of")
        model.up.weight.detach().norm()

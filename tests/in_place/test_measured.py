"""A model that was planned is the model that it was: what its own code did while it was measured is undone."""

import pickle
import random
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from steps import tp_mesh
from testing import on_every_rank
from tiny import batch, tiny
from torch import nn
from torch.ao.quantization import MinMaxObserver
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from tpformer import auto_plan, parallelize

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))


class Meter:
    def __init__(self):
        self.calls, self.total = 0, torch.zeros(2)


class Writes(nn.Module):
    """Two linears around everything that a forward may write to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.vectors = nn.ModuleList([spectral_norm(nn.Linear(16, 16)), hooked_spectral_norm(nn.Linear(16, 16))])
        self.norm, self.observer, self.table = nn.BatchNorm1d(6), MinMaxObserver(), nn.Embedding(4, 16, max_norm=0.1)
        self.scale = nn.Parameter(torch.full((16,), 3.0))
        self.register_buffer("mean", torch.zeros(()))
        self.generators = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
        self.torch, self.numpy, self.state, self.python = self.generators
        self.calls, self.cache, self.first, self.meter = 0, torch.zeros(2), None, Meter()
        self.seen, self.named, self.counter, self.last = [], {"a": torch.zeros(3), "b": [1]}, Counter(), deque(maxlen=2)

    def forward(self, x):
        self.calls += 1
        self.meter.calls += 1
        self.meter.total += 1
        self.named["a"] += 1
        self.named["b"].append(self.seen.append(self.calls))
        self.named["c"] = self.counter["x"] = self.calls
        self.last.append(self.calls)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        self.cache.data = torch.ones(3)
        self.first = x if self.first is None else self.first
        with torch.no_grad():
            self.scale.clamp_(max=1.0)
        torch.rand(2, generator=self.torch), self.numpy.random(), self.state.rand(), self.python.random()
        random.random(), np.random.rand(), torch.rand(2)
        self.train()
        for part in self.vectors:
            x = part(x)
        x = self.norm(self.observer(x)) + self.table(torch.tensor([1]))
        return self.down(torch.tanh(self.up(x))) * self.scale


def state(model: nn.Module) -> bytes:
    """All that a model and the process hold, but for the identities of tensors."""
    torch_own = model.generators[0].get_state().tolist()
    numpy_own = repr([each.get_state() for each in (model.state, np.random)]), repr(model.numpy.bit_generator.state)
    drawn, kept = ("generators", "torch", "numpy", "state", "python"), ("_parameters", "_buffers")
    every = [vars(module).items() for module in model.modules()]
    held = [{k: v for k, v in each if k not in drawn and (k in kept or not k.startswith("_"))} for each in every]
    python_own = [each.getstate() for each in (model.python, random)]
    return pickle.dumps([held, torch_own, numpy_own, python_own, torch.get_rng_state().tolist()])


@on_every_rank(2)
def test_nothing_that_a_trial_writes_stays():
    model = Writes()
    buffers, before = {name: (x, x.data_ptr()) for name, x in model.named_buffers()}, state(model)
    plan = auto_plan(model, 2, example=X)
    assert plan["up"] == "colwise" and state(model) == before
    parallelize(model, tp_mesh(), example=X)
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0] and buffer.data_ptr() == buffers[name][1], name
    assert model.calls == 0 and not model.seen and model.first is None and model.mean == 0


class Makes(OrderedDict):
    """Gives a new object for each item that is asked for, and loads something where all are."""

    def __getitem__(self, key):
        return super().__getitem__(key)()

    def keys(self):
        raise AssertionError("all items were asked for")


TABLE, LATEST, NAMES = Makes({"tanh": nn.Tanh}), OrderedDict(a=1, b=2), {"x"}


def test_containers_keep_their_items_and_those_that_nothing_writes_to_are_not_touched():
    class Asks(Writes):
        def forward(self, x):
            LATEST.move_to_end("a")
            NAMES.add("y")
            return self.down(TABLE["tanh"](self.up(x)))

    assert auto_plan(Asks(), 2, example=X)["up"] == "colwise"
    assert list(OrderedDict.items(TABLE)) == [("tanh", nn.Tanh)] and list(LATEST) == ["a", "b"] and NAMES == {"x"}


@pytest.mark.parametrize("options", [{}, {"use_cache": True}])
def test_an_example_that_makes_caches(options):
    """A trial runs a layer again, and must not find the cache that the first run has filled."""
    model = tiny("llama")
    assert auto_plan(model, 2, example=batch(8, 0, **options)).regions.keys() == auto_plan(model, 2).regions.keys()
    assert model.config.use_cache


def test_what_is_compiled_is_measured_as_it_is_written() -> None:
    model, graphs = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), []
    for part in (*model, model):
        part.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert len(auto_plan(model, 2, example=torch.randn(2, 8)).regions) == 1 and not graphs

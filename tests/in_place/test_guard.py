"""Whatever module of a cut model is called, and however: ranks that would not compute one process's result are told."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from steps import tp_mesh
from testing import assert_identical, assert_same, on_every_rank
from torch import nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from turns import in_turns

from tpformer import parallelize
from tpformer.distributed.dtensor import full_tensor

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OUTSIDE = [
    lambda x: dropout(x, 0.4),
    lambda x: x * random.random(),
    lambda x: x + torch.from_numpy(np.random.rand(*x.shape)),
]
DRAWS = {
    "torch": lambda block, y: torch.rand_like(y),
    "blocks.0.own": lambda block, y: torch.rand(y.shape, generator=block.own),
    "numpy": lambda block, y: torch.from_numpy(np.random.rand(*y.shape)),
}
CALLS = {
    "Model": lambda model: model(X),
    "forward": lambda model: model.forward(X),
    "a method that is no forward": lambda model: model.features(X),
    "a block": lambda model: model.blocks[0](X),
}


class Block(nn.Module):
    """A region, within which `draw` is called with this rank's features."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down, self.own = nn.Linear(16, 22), nn.Tanh(), nn.Linear(22, 16), torch.Generator()
        self.draw = None

    def forward(self, x):
        y = self.act(self.up(x))
        return x + self.down(y if self.draw is None else y * self.draw(self, y))


class Model(nn.Module):
    """Two blocks, before each of which `draw` is called with all features, and an outer layer."""

    draw, recompute = None, False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)
        self.double()

    def features(self, x):
        for block in self.blocks:
            x = x if self.draw is None else self.draw(x)
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x

    def forward(self, x):
        return self.head(self.features(x))


def cut():
    return parallelize(Model(), tp_mesh(), example=torch.rand(2, 3, 16, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["blocks.0.own", *in_turns(["torch", "numpy"], first=1)])
@on_every_rank(2)
def test_random_numbers_for_a_part_of_the_features_are_refused(kind):
    for training in (True, False):
        for call in CALLS.values():
            model = cut().train(training)
            model.blocks[0].draw = DRAWS[kind]
            with pytest.raises(ValueError, match=re.escape(f"blocks.0 draws random numbers ({kind})")):
                call(model)
    model = cut()
    for _ in range(5):
        model(X)
    model.blocks[0].draw = DRAWS[kind]
    with pytest.raises(ValueError, match=re.escape(f"Model draws random numbers ({kind}) after 5 calls without any")):
        model(X)
    with pytest.raises(ValueError, match=re.escape(f"blocks.0 draws random numbers ({kind})")):
        model(X)


@on_every_rank(2)
def test_random_numbers_for_all_features_are_those_of_one_process_or_refused():
    def results(model, seed):
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(seed)
        y = model(X)
        y.square().sum().backward()
        found = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found | {"y": y.detach()}

    for draw in OUTSIDE:
        for recompute in (False, True):
            whole, model = Model(), cut()
            for each in (whole, model):
                each.draw, each.recompute = draw, recompute and draw is OUTSIDE[0]
            assert_same([results(model, seed) for seed in range(3)], [results(whole, seed) for seed in range(3)])
        with pytest.raises(ValueError, match="different random states, and would draw different numbers"):
            results(model, torch.distributed.get_rank())


@on_every_rank(2)
def test_a_copy_of_a_model_is_guarded_as_the_model_is():
    """It may draw what the model may, before and after the model is called, and is refused what the model is."""
    found = []
    for copied in (False, True):
        original = model = cut()
        if copied:
            original(X)
            model = copy.deepcopy(original)
        model.draw = OUTSIDE[0]
        torch.manual_seed(0)
        found += [model(X).detach() for _ in range(2)]
        original(X)
        model.blocks[1].draw = DRAWS["torch"]
        with pytest.raises(ValueError, match=re.escape("blocks.1 draws random numbers (torch)")):
            model(X)
        model.blocks[1].draw, model.blocks[0].act = None, nn.Softmax(-1)
        with pytest.raises(ValueError, match="act is another Softmax than when the model was cut"):
            model(X)
        if copied:
            original(X)
    assert_identical(found[2:], found[:2])


def train(model, extra):
    """Steps of training; after the second, a rank does something besides."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and torch.distributed.get_rank() == 1:
            extra(model, optimizer)


@on_every_rank(2)
def test_ranks_at_different_places_are_named():
    for words, extra in {
        "after 4 forwards, 3 backwards and 2 optimizer steps": lambda model, _: model(X).sum().backward(),
        "in Model in evaluation, after 3 forwards": lambda model, _: model.eval()(X),
        "in blocks.0 in training, after 3 forwards": lambda model, _: model.blocks[0](X),
        "2 backwards and 3 optimizer steps": lambda model, optimizer: optimizer.step(),
    }.items():
        with pytest.raises(ValueError, match=f"not at the same place: rank 0 is in Model in training.*{words}"):
            train(cut(), extra)


@on_every_rank(2)
def test_inputs_and_gradients_are_compared_in_each_mode_and_again():
    rank = torch.distributed.get_rank()
    inputs = "ranks got different inputs, but they compute one batch together"
    for warm in (lambda model: model(X), lambda model: model.blocks[0](X), lambda model: model.eval()(X)):
        for call in (lambda model: model.train()(X + rank), lambda model: model.eval().blocks[1](X + rank)):
            model = cut()
            warm(model)
            with pytest.raises(ValueError, match=inputs):
                for _ in range(64):
                    call(model)
    with pytest.raises(ValueError, match="ranks got different gradients of the model's outputs"):
        (cut()(X) - rank).square().sum().backward()
    with pytest.raises(
        ValueError, match="blocks.0.up gives or takes one rank's part of the features, and was called by"
    ):
        cut().blocks[0].up(X)


@on_every_rank(2)
def test_what_was_made_of_the_parameters_before_is_refused():
    model = Model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model = parallelize(model, tp_mesh(), example=X)
    model(X).sum().backward()
    whole = torch.optim.SGD([each for each in parameters if each.ndim == 1], lr=0.1)
    for use in (optimizer.step, optimizer.zero_grad, whole.step, lambda: nn.utils.clip_grad_norm_(parameters, 1.0)):
        with pytest.raises(ValueError, match="no longer has this parameter of .* after parallelize"):
            use()
    aliased = Model()
    aliased.kept = [aliased.blocks[0].up.weight]
    aliased.blocks[0].draw = lambda block, y: aliased.kept[0].sum()
    with pytest.raises(ValueError, match="let the forward read it from its module"):
        parallelize(aliased, tp_mesh(), example=X)(X)
    hooked = Model()
    next(hooked.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="has hooks for its gradient: call parallelize before they are registered"):
        parallelize(hooked, tp_mesh(), example=X)


@on_every_rank(2)
def test_what_would_see_a_part_is_refused_when_it_comes_later():
    """Hooks, modules and forwards within what was divided; what sees whole tensors is left alone."""
    seen = []
    later = {
        "hook that would see one rank's part": lambda model: model.blocks[0].act.register_forward_hook(lambda *_: None),
        "up has a hook": lambda model: model.blocks[1].up.register_full_backward_hook(lambda *_: None),
        "act is another Softmax": lambda model: setattr(model.blocks[0], "act", nn.Softmax(-1)),
        "the forward of down was replaced": lambda model: setattr(model.blocks[0].down, "forward", lambda x: x),
    }
    for reason, change in later.items():
        model = cut()
        expected = model(X)
        model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.shape))
        assert_identical(model(X), expected)
        change(model)
        for _ in range(2):
            with pytest.raises(ValueError, match=reason):
                model(X)
    assert set(seen) == {X.shape}

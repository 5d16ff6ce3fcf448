"""The simulation of PipeDream: its order, the versions that its stages hold, and what it trains."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from testing import assert_same

from bench.data_parallel.pipedream import BACKWARD, FORWARD, in_flight, schedule, train
from tpformer.config import OptimizerSection
from tpformer.models import GPT, GPTConfig
from tpformer.training.optimizer import build_optimizer

CONFIG = GPTConfig(vocab_size=50, seq_length=6, n_layers=4, hidden_size=16, n_heads=2, tie_embeddings=False)
SGD = OptimizerSection(name="sgd", momentum=0.9, weight_decay=0.1)
STRAIGHT = ((1,), (1, 1), (1, 1, 1, 1))
REPLICATED = ((2,), (2, 1), (3, 1, 1), (1, 2), (2, 2))
UNEVEN = ((1, 4, 2), (3, 4, 2))  # a worker waits for a minibatch that another one of its round has not sent yet


def rows(minibatch: int) -> torch.Tensor:
    return (torch.arange(2)[:, None] * 17 + torch.arange(7) * 3 + 5 * minibatch) % 50


@pytest.mark.parametrize("replicas", STRAIGHT + REPLICATED + UNEVEN)
def test_the_order_is_possible_and_versions_are_those_of_the_formula(replicas):
    count = 40
    actions = schedule(replicas, count)
    assert len(actions) == len(set(actions)) == 2 * len(replicas) * count
    end = {(a.stage, a.kind, a.minibatch): a.end for a in actions}
    for _, stage, _, kind, minibatch in actions:
        before = (stage - 1, "F", minibatch)
        if kind == "B":
            before = (stage + 1, "B", minibatch) if stage + 1 < len(replicas) else (stage, "F", minibatch)
        start = end[stage, kind, minibatch] - (FORWARD if kind == "F" else BACKWARD)
        assert start >= end.get(before, 0)
    for worker in {(a.stage, a.worker) for a in actions}:
        own = sorted(a for a in actions if (a.stage, a.worker) == worker)
        assert all(a.minibatch % replicas[a.stage] == a.worker for a in own)
        assert all(a.end <= b.start for a, b in pairwise(own))
    if replicas in STRAIGHT:  # nobody waits but for filling and draining
        last = max(a.end for a in actions)
        assert last <= (count + 2 * len(replicas)) * (FORWARD + BACKWARD)
    # a straight pipeline's stage s of S holds S - s versions of its weights, and so many times their bytes
    found = train(CONFIG, replicas, rows, 16, SGD, lambda _: 0.01)
    limits = [in_flight(replicas, stage) for stage in range(len(replicas))]
    assert found.versions == limits or (replicas in UNEVEN and all(map(int.__le__, found.versions, limits)))
    if replicas in STRAIGHT:
        assert limits == [len(replicas) - stage for stage in range(len(replicas))]
    for part, versions, nbytes in zip(found.parts, found.versions, found.nbytes, strict=True):
        assert nbytes == versions * sum(each.nbytes for each in part.parameters())


@pytest.mark.parametrize("stages", [1, 3])
def test_stages_are_late_as_the_formula_says(stages):
    """Stage s of S computes with the weights that S - 1 - s later updates are missing from: the whole model in a plain
    loop, with old copies of each stage's weights, gives the same, to the bit. One stage is SGD."""
    count, lr, losses = 12, 0.05, []
    found = train(CONFIG, (1,) * stages, rows, count, SGD, lambda _: lr, dtype=torch.float64)
    late = {name: stages - 1 - stage for stage, part in enumerate(found.parts) for name, _ in part.named_parameters()}
    model = GPT(CONFIG, seed=0, dtype=torch.float64)
    optimizer = build_optimizer(model, SGD)
    past = [{name: each.detach().clone() for name, each in model.named_parameters()}]
    for minibatch in range(count):
        used = {name: past[max(0, minibatch - late[name])][name].requires_grad_() for name in past[0]}
        options = {"sample_index": torch.arange(2) + 2 * minibatch, "step": minibatch + 1}
        inputs, options["targets"] = rows(minibatch)[:, :-1], rows(minibatch)[:, 1:]
        loss = torch.func.functional_call(model, used, (inputs,), options)
        losses.append(float(loss.detach()) / 12)
        gradients = torch.autograd.grad(loss, [*used.values()], torch.full_like(loss, 1 / 12))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.update(lr, torch.zeros(()))
        past.append({name: each.detach().clone() for name, each in model.named_parameters()})
    assert found.losses == losses
    for part in found.parts:
        assert all(torch.equal(each, past[-1][name]) for name, each in part.named_parameters())


def test_replicas_of_one_stage_are_a_batch_as_large():
    """Two workers of one stage update once for two minibatches, by their mean."""
    found = train(CONFIG, (2,), rows, 10, SGD, lambda _: 0.05, dtype=torch.float64)
    whole = train(CONFIG, (1,), lambda n: torch.cat([rows(2 * n), rows(2 * n + 1)]), 5, SGD, lambda _: 0.05,
                  dtype=torch.float64)  # fmt: skip
    assert_same(*(list(each.parts[0].parameters()) for each in (found, whole)))


def test_tied_embeddings_are_refused():
    with pytest.raises(ValueError, match="embeddings cannot be tied"):
        train(replace(CONFIG, tie_embeddings=True), (1, 1), rows, 2, SGD, float)

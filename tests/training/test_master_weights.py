"""Without FSDP2, a rank in 16 bits takes the steps of one with it: the same bits where nothing is added in 16 bits."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from small_runs import MODEL, build, everything, run_config
from testing import assert_identical, on_every_rank
from torch.distributed.fsdp import FSDPModule
from turns import in_turns

from tpformer.config import RunConfig
from tpformer.planner.states import GRADIENTS, rank_moments
from tpformer.training import setup
from tpformer.training.model import summed_loss
from tpformer.training.step import train_step
from tpformer.training.updates import LocalSGD


def batch(step: int) -> torch.Tensor:
    return torch.arange(4)[:, None] * 7 % 50 + torch.arange(13) + step


def trained(config: RunConfig, fsdp: bool):
    """(losses of three steps and of an evaluation, everything that a checkpoint holds)."""
    with mock.patch.object(setup, "uses_fsdp", lambda *_: True) if fsdp else nullcontext():
        model, optimizers = build(config)
    assert isinstance(model.parts[0], FSDPModule) == fsdp
    options = {"lr": 1e-2, "clip_norm": 0.1}
    losses = [train_step(model, optimizers, batch(n), first_sample=4 * n, **options) for n in range(3)]
    numbers = [float(result.loss) for result in losses] + model.summed_loss(batch(3)).tolist()
    return numbers, everything(model.parts, optimizers)


RECOMPUTED = {"recompute": "full", "pack_activations": True}


@pytest.mark.parametrize("parallel, dtype, size", [
    ({}, "float16", 2), (RECOMPUTED, "bfloat16", 4),
    *in_turns([({}, "float16", 4), ({"tensor_parallel": 2}, "bfloat16", 2)], first=1),
])  # fmt: skip
def test_steps_are_those_of_fsdp2(ranks, parallel, dtype, size):
    """With two microbatches of 2, whose gradients add up, and with one of 4, whose gradients stay in 16 bits."""
    config = run_config(parallel, {**MODEL, "tie_embeddings": False}, dtype=dtype, microbatch_size=size)
    with_it, without = (ranks(config.parallel.world_size).run(trained, config, fsdp) for fsdp in (True, False))
    for (expected, states), (losses, own) in zip(with_it, without, strict=True):
        assert losses == expected
        assert_identical(own, states)


@on_every_rank(1)
def test_a_tied_table_adds_up_its_two_gradients_in_float32():
    """FSDP2 adds them up in 16 bits."""
    model, _ = build(run_config({}, {**MODEL, "tie_embeddings": True}, dtype="bfloat16"))
    model.gradients(batch(0), first_sample=0)
    table = model.parts[0].embed_tokens.weight
    rounded = {p: (p.grad == p.grad.bfloat16()).all() for p in model.parameters()}
    assert [p for p, each in rounded.items() if not each] == [table]


@on_every_rank(1)
def test_gradients_of_one_backward_stay_in_16_bits():
    """As the planner says, without tensor parallelism, and only for an optimizer that reads them so."""
    for parallel, size, tied in (({}, 4, False), ({}, 4, True), ({}, 2, True)):
        config = run_config(parallel, {**MODEL, "tie_embeddings": tied}, dtype="bfloat16", microbatch_size=size)
        model, optimizers = build(config)
        model.gradients(batch(0), first_sample=0)
        held = sum(parameter.grad.nbytes for parameter in model.parameters())
        assert held == rank_moments(config, 0).backward[GRADIENTS]
        optimizers[0].zero_grad()
        model.masters.narrow = False
        model.gradients(batch(0), first_sample=0)
        assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())


@on_every_rank(1)
def test_steps_of_another_optimizer_are_seen():
    """torch's fused optimizers do not count what they write, nor does one beside ours that has the other parameters."""
    config, found = run_config({}, MODEL, dtype="bfloat16", microbatch_size=4), []
    for fused, own in ((False, 0), (True, 0), (True, 5)):
        model = setup.build_model(config, setup.run_mesh(config, "cpu"))
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[own:], lr=0.1, fused=fused)]
        if own:
            optimizers.append(LocalSGD(parameters[:own], lr=0.1, fused=True))
            optimizers[1].masters = model.masters
        for _ in range(3):
            found.append(float(model.gradients(batch(0), first_sample=0)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert found[:3] == found[3:6] == found[6:] and len(set(found)) == 3


@on_every_rank(1)
def test_a_part_holds_its_masters_but_in_a_step():
    model, _ = build(run_config({}, MODEL, dtype="bfloat16"))
    (part,), masters = model.parts, model.masters
    before = dict(part.named_parameters())
    part.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="ids"), masters.computing():
        assert {p.dtype for p in part.parameters()} == {torch.bfloat16}
        first = summed_loss(part, batch(0), 0)
        summed_loss(part, batch(0) + 1000, 0)
    assert_identical(dict(part.named_parameters()), before)
    assert all(after is before[name] for name, after in part.named_parameters())
    with torch.no_grad():
        part.norm.weight.zero_()  # a user's own write is seen by the next step
    model.gradients(batch(0), first_sample=0)
    assert part.norm.weight.grad is None and part.layers["0"].mlp.fc1.weight.grad.dtype == torch.bfloat16
    with masters.computing():
        assert not part.norm.weight.any() and summed_loss(part, batch(0), 0) != first
    part.norm.weight = torch.nn.Parameter(torch.ones(24))
    with pytest.raises(RuntimeError, match="parameter weight of a .*Norm has been replaced"):
        model.summed_loss(batch(0))

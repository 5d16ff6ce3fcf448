"""The learning rate follows its schedule, weight decay its groups, and local updates are torch's."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients
from tpformer.training.optimizer import LocalAdamW, build_optimizer, learning_rate


def test_warm_up_then_cosine_to_the_floor():
    config = OptimizerSection(lr=2.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, 110, config) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == 2.0 and rates[-1] == pytest.approx(0.2)
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5)), "half way down after half of the decay"
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[9:-1], rates[10:], strict=True))


def test_no_warm_up_and_warm_up_longer_than_the_run():
    assert learning_rate(1, 10, OptimizerSection(lr=1.0, warmup_steps=0)) < 1.0
    assert learning_rate(5, 5, OptimizerSection(lr=1.0, warmup_steps=10)) == 0.5


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(vocab_size=50, seq_length=8, n_layers=1, hidden_size=16, n_heads=2))
    optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name
    assert isinstance(optimizer, torch.optim.AdamW)


def steps_of(adamw: type[torch.optim.AdamW]):
    """Make three updates of DTensor parameters on two ranks; return this rank's part of parameters and states."""
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    model = GPT(GPTConfig(vocab_size=50, seq_length=8, n_layers=1, hidden_size=16, n_heads=2), tp=mesh)
    optimizer = adamw(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    ids = torch.arange(8).view(1, 8)
    for _ in range(3):
        model(ids, targets=ids.flip(1)).backward()
        reduce_partial_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    states = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(each, DTensor) for each in (*model.parameters(), *states))
    return [each.to_local().detach().clone() for each in (*model.parameters(), *states)]


def both_optimizers():
    return steps_of(LocalAdamW), steps_of(torch.optim.AdamW)


def test_local_updates_are_those_of_torch(ranks):
    for mine, torchs in ranks(2).run(both_optimizers):
        assert len(mine) == len(torchs) > 30
        assert all(torch.equal(a, b) for a, b in zip(mine, torchs, strict=True))

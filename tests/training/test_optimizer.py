"""Weight decay follows its groups, and local updates are torch's."""

import torch
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients
from tpformer.training.optimizer import LocalAdamW, build_optimizer


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

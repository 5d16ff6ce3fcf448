"""Partial gradients are added up once, and the norm counts every parameter once."""

import copy

import pytest
import torch
from testing import assert_same
from torch.distributed.tensor import DTensor, Shard

from tpformer.distributed import build_mesh, record_collectives
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import gradient_norm, reduce_partial_gradients

CONFIG = GPTConfig(vocab_size=60, seq_length=12, n_layers=2, hidden_size=24, n_heads=2, n_kv_heads=1)


def reduce_twice():
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    model = GPT(CONFIG, tp=TensorParallel(mesh, True), dtype=torch.float64)
    ids = torch.arange(24).view(2, 12)
    model(ids, targets=ids.flip(1)).backward()
    with pytest.raises(RuntimeError, match="reduce_partial_gradients"):
        gradient_norm(model.parameters(), [mesh.get_group()])
    with record_collectives() as first:
        reduce_partial_gradients(model)
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    with record_collectives() as second:
        reduce_partial_gradients(model)
    same = all(torch.equal(before[name], p.grad.to_local()) for name, p in copy.deepcopy(model).named_parameters())
    replicated = [name for name, p in model.named_parameters() if p.grad.placements[0].is_replicate()]
    return first, second, same, replicated


def test_one_all_reduce_and_idempotent(ranks):
    for first, second, same, replicated in ranks(2).run(reduce_twice):
        assert [name for name, _ in first] == ["all_reduce"]
        assert second == [] and same
        # all ranks share norms, row biases, positions, and the one key-value head
        assert "layers.0.self_attn.k_proj.weight" in replicated and "layers.1.mlp.fc2.bias" in replicated
        assert "embed_positions.weight" in replicated and "norm.weight" in replicated
        elements = sum(dict(GPT(CONFIG).named_parameters())[name].numel() for name in replicated)
        assert first[0][1] == elements * 8


def norm_of_a_mixture():
    """A user's plain parameter, equal on all ranks, stands beside one that is sharded over one of two axes."""
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=2)
    plain = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    plain.grad = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    local = torch.full((2,), 2.0, dtype=torch.float64)
    sharded = torch.nn.Parameter(DTensor.from_local(local.clone(), mesh["tp"], [Shard(0)], run_check=False))
    sharded.grad = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
    return float(gradient_norm([plain, sharded], [mesh.get_group("tp"), mesh.get_group("dp_shard")]))


def test_parameters_on_different_meshes_count_once(ranks):
    # the squares are 9 for the plain one and 4 * 4 for the sharded one
    assert_same(ranks(4).run(norm_of_a_mixture), [5.0] * 4)

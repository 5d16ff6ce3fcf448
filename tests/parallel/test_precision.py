"""Sharded bfloat16 layers that are recomputed have the gradients of layers that are not."""

import dataclasses

import torch
import torch.distributed as dist
from testing import assert_identical
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tpformer.models import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=60, seq_length=12, n_layers=2, hidden_size=32, n_heads=2)


def sharded_gradients(recompute: str) -> list[torch.Tensor]:
    """This rank's shards of a step's gradients, with dropout. Parameters are freed after every layer's forward."""
    config = dataclasses.replace(CONFIG, n_layers=3, dropout=0.1, vocab_multiple=4)
    model = GPT(config, recompute=recompute, seed=1)
    # a user takes torch's own policy, by which FSDP2 also casts what a layer is called with
    options: dict = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    for layer in model.layers.values():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    rank = dist.get_rank()
    ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(rank))
    model(ids, targets=ids, sample_index=torch.arange(2) + 2 * rank, step=1).backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


def by_mode() -> list[list[torch.Tensor]]:
    return [sharded_gradients(recompute) for recompute in ("none", "mlp", "full")]


def test_sharded_parameters_and_dropout_under_recomputation(ranks):
    """A layer's second run gathers its parameters again, and draws the same dropout."""
    for kept, *again in ranks(2).run(by_mode):
        assert all(gradient.any() for gradient in kept)
        assert_identical(again, [kept, kept])

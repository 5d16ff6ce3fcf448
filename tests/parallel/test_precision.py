"""bfloat16 compute on float32 master weights: what is computed, what is kept, and that it trains."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tpformer.config import OptimizerSection
from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import Layout, apply_zero
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import train_step

CONFIG = GPTConfig(vocab_size=60, seq_length=12, n_layers=2, hidden_size=32, n_heads=2)


def train(tp: int, low_precision: bool):
    mesh = build_mesh("cpu", tensor_parallel=tp)
    model = GPT(CONFIG, tp=mesh["tp"], device="meta")
    seen: list[torch.dtype] = []
    if low_precision:
        apply_zero(model, model.layers.values(), mesh, Layout(tensor_parallel=tp), torch.bfloat16)
    model.to_empty(device="cpu")
    model.init_weights()
    model.layers["0"].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    optimizer = build_optimizer(model, OptimizerSection(lr=3e-3))
    whole = ModelParts([model], Layout(tensor_parallel=tp), mesh, microbatch_size=2)
    losses = []
    for step in range(1, 21):
        batch = torch.randint(60, (4, 13), generator=torch.Generator().manual_seed(step % 2))
        options = {"lr": 3e-3, "clip_norm": 1.0}
        losses.append(train_step(whole, [optimizer], batch, first_sample=0, step=step, **options).loss)
    kept = {p.dtype for p in model.parameters()} | {s["exp_avg"].dtype for s in optimizer.state.values()}
    return losses, set(seen), kept


def test_bfloat16_compute_float32_weights(ranks):
    expected, _, _ = ranks(1).run(train, 1, False)[0]
    for tp in (1, 2):
        for losses, computed, kept in ranks(tp).run(train, tp, True):
            assert computed == {torch.bfloat16} and kept == {torch.float32}
            torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
            assert losses[-1] < 0.8 * losses[0]
            assert losses != expected, "it must not have run in float32"


def sharded_gradients(recompute: str) -> list[torch.Tensor]:
    """This rank's shards of a step's gradients, dropout on, parameters resharded after every layer's forward."""
    config = dataclasses.replace(CONFIG, n_layers=3, dropout=0.1, vocab_multiple=4)
    model = GPT(config, recompute=recompute, seed=1)
    # as a user would: with torch's own policy, by which FSDP2 also casts what a layer is called with
    options: dict = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    for layer in model.layers.values():
        fully_shard(layer, **options)
    fully_shard(model, **options)
    rank = dist.get_rank()
    ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(rank))
    model(ids, targets=ids, sample_index=torch.arange(2) + 2 * rank, step=1).backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_sharded_parameters_and_dropout_under_recomputation(ranks, recompute):
    """Parameters are freed between a layer's forward and its second run, whose dropout is the same."""
    kept, again = (ranks(2).run(sharded_gradients, mode) for mode in ("none", recompute))
    for one, other in zip(kept, again, strict=True):
        assert all(a.any() for a in one) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

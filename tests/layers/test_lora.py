"""A Llama-shaped GPT fine-tuned with LoRA takes the same steps as one of torch.nn's modules. The adapters are written
as a user writes them; the GPT is tensor-parallel, recomputed, and sharded by FSDP2."""

from functools import cache

import pytest
import theirs
import torch
from habits import BATCH, LLAMA, SEQ, VOCAB
from steps import Results
from testing import assert_identical, assert_same
from theirs import HIDDEN
from torch import nn
from torch.distributed.fsdp import fully_shard

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear
from tpformer.models import GPT
from tpformer.parallel import reduce_partial_gradients

RANK, STEPS = 8, 6


def add_adapters(model: nn.Module) -> None:
    """Give q_proj and v_proj of every layer a LoRA, and freeze all else."""
    model.requires_grad_(False)
    for index, layer in model.layers.items():
        for name in ("q_proj", "v_proj"):
            base = layer.self_attn.get_submodule(name)
            a = theirs.linear(HIDDEN, RANK, seed=int(index))
            if isinstance(base, ColumnParallelLinear):
                b = ColumnParallelLinear(RANK, base.out_features, False, tp=base.tp, dtype=torch.float64)
            else:
                b = nn.Linear(RANK, base.out_features, bias=False, dtype=torch.float64)
            nn.init.zeros_(b.weight)
            setattr(layer.self_attn, name, theirs.LoRA(base, a, b))


def train(model: nn.Module, samples: slice) -> list[float]:
    """Return the loss of each step: this rank's share of the mean over the global batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))[samples]
        loss = model(ids[:, :-1], targets=ids[:, 1:], reduction="sum") / (BATCH * SEQ)
        loss.backward()
        reduce_partial_gradients(model, partial="*.a.weight")  # a rank's LoRA.a sees its sequence shard only
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: nn.Module) -> Results:
    return {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}


@cache
def trained_by_torch() -> tuple[list[float], Results, Results]:
    model = theirs.GPT(VOCAB, SEQ, LLAMA.n_layers, llama=True)
    pretrained = values(model)
    add_adapters(model)
    return train(model, slice(None)), values(model), pretrained


def on_rank(t: int, data_parallel: int, pretrained: Results) -> tuple[list[float], Results]:
    mesh = build_mesh("cpu", tensor_parallel=t, data_parallel_shard=data_parallel)
    model = GPT(LLAMA, tp=mesh["tp"], recompute="mlp", dtype=torch.float64)
    model.load_state_dict(pretrained)
    add_adapters(model)
    if data_parallel > 1:
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh["dp_shard"])
            part.set_gradient_divide_factor(1.0)
    share, number = BATCH // data_parallel, mesh["dp_shard"].get_local_rank()
    return train(model, slice(share * number, share * (number + 1))), values(model)


@pytest.mark.parametrize(("t", "data_parallel"), [(1, 1), (2, 2)])
def test_lora_equals_torch(ranks, t, data_parallel):
    losses, expected, pretrained = trained_by_torch()
    assert all(float(value.abs().max()) > 0.01 for name, value in expected.items() if name.endswith(".b.weight"))
    results = ranks(t * data_parallel).run(on_rank, t, data_parallel, pretrained)
    summed = torch.tensor([found for found, _ in results], dtype=torch.float64).sum(0) / t
    assert_same(summed, torch.tensor(losses, dtype=torch.float64))
    for _, found in results:
        assert_same(found, expected)
        frozen = {name: x for name, x in found.items() if ".a." not in name and ".b." not in name}
        assert_identical({name.replace(".base.", "."): x for name, x in frozen.items()}, pretrained)

"""Fine-tuning with LoRA, written as a user would: a Llama-shaped GPT under tensor parallelism, recompute and FSDP2
takes the steps of the same adapters on modules of torch.nn."""

from functools import cache

import pytest
import theirs
import torch
import torch.nn.functional as F
from plain import rotate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpformer.distributed import build_mesh
from tpformer.layers import ColumnParallelLinear
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients

VOCAB, SEQ, HIDDEN, HEADS, KV_HEADS, FFN = 30, 6, 24, 4, 2, 32
RANK, STEPS, BATCH = 8, 20, 2
CONFIG = GPTConfig(
    vocab_size=VOCAB, vocab_multiple=2, seq_length=SEQ, n_layers=2, hidden_size=HIDDEN, n_heads=HEADS,
    n_kv_heads=KV_HEADS, ffn_hidden_size=FFN, norm="rmsnorm", activation="swiglu", position="rope", bias=False,
    tie_embeddings=False,
)  # fmt: skip


def linear(k: int, n: int) -> nn.Linear:
    return nn.Linear(k, n, bias=False)


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.k_proj, self.v_proj = (linear(HIDDEN, HIDDEN // HEADS * KV_HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        q, k = rotate(q, CONFIG.rope_base), rotate(k, CONFIG.rope_base)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(HIDDEN, FFN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = [nn.RMSNorm(HIDDEN, CONFIG.norm_eps) for _ in range(2)]
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = PlainAttention(), PlainMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(index): PlainBlock() for index in range(CONFIG.n_layers)})
        self.norm, self.lm_head = nn.RMSNorm(HIDDEN, CONFIG.norm_eps), linear(HIDDEN, VOCAB)
        self.double()

    def forward(self, ids: Tensor, *, targets: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers.values():
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def add_adapters(model: nn.Module) -> None:
    """LoRA of q_proj and v_proj of every layer; all else is frozen."""
    model.requires_grad_(False)
    for index, layer in model.layers.items():
        for name in ("q_proj", "v_proj"):
            base = layer.self_attn.get_submodule(name)
            a = theirs.linear(HIDDEN, RANK, seed=int(index))
            if isinstance(base, ColumnParallelLinear):
                b = ColumnParallelLinear(RANK, base.out_features, False, tp=base.tp, dtype=torch.float64)
            else:
                b = linear(RANK, base.out_features).double()
            nn.init.zeros_(b.weight)
            setattr(layer.self_attn, name, theirs.LoRA(base, a, b))


def train(model: nn.Module, samples: slice) -> list[float]:
    """The loss of each step: this rank's share of the mean over the global batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))[samples]
        loss = model(ids[:, :-1], targets=ids[:, 1:]) / (BATCH * SEQ)
        loss.backward()
        reduce_partial_gradients(model, partial="*.a.weight")  # the halves on sequence shards
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in values.items()}


@cache
def trained_by_torch() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = PlainLlama()
    pretrained = whole(model)
    add_adapters(model)
    return train(model, slice(None)), whole(model), pretrained


def on_rank(t: int, data_parallel: int, pretrained: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    mesh = build_mesh("cpu", tensor_parallel=t, data_parallel_shard=data_parallel)
    model = GPT(CONFIG, tp=mesh["tp"], recompute="mlp", dtype=torch.float64)
    model.load_state_dict(pretrained)
    add_adapters(model)
    if data_parallel > 1:
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh["dp_shard"])
            part.set_gradient_divide_factor(1.0)
    share, number = BATCH // data_parallel, mesh["dp_shard"].get_local_rank()
    return train(model, slice(share * number, share * (number + 1))), whole(model)


@pytest.mark.parametrize(("t", "data_parallel"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_lora_equals_torch(ranks, t, data_parallel):
    losses, expected, pretrained = trained_by_torch()
    assert all(float(value.abs().max()) > 0.01 for name, value in expected.items() if name.endswith(".b.weight"))
    results = ranks(t * data_parallel).run(on_rank, t, data_parallel, pretrained)
    summed = torch.tensor([found for found, _ in results], dtype=torch.float64).sum(0) / t
    torch.testing.assert_close(summed, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=0)
    for _, found in results:
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if ".base." in name or name in pretrained:
                assert torch.equal(value, pretrained[name.replace(".base.", ".")]), name
            else:
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=name)

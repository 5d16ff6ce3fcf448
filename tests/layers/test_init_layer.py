"""Initial values have the same bits for every tensor-parallel size, whatever torch's seeds are."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import (
    ColumnParallelLinear,
    LMHead,
    PositionEmbedding,
    RowParallelLinear,
    TransformerBlock,
    VocabParallelEmbedding,
    init_weights,
)
from tpformer.models import GPT, GPTConfig

HIDDEN, VOCAB = 24, 37
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def build(mesh, dtype: torch.dtype) -> torch.nn.Module:
    place = {"tp": mesh, "dtype": dtype}
    return torch.nn.ModuleDict(
        {
            # 3 ranks divide 40 rows unevenly, and some of the last rank's are padding
            "embedding": VocabParallelEmbedding(VOCAB, HIDDEN, vocab_multiple=8, **place),
            "head": LMHead(VOCAB, HIDDEN, vocab_multiple=8, **place),
            "positions": PositionEmbedding(7, HIDDEN, **place),
            # 3 ranks do not divide 4 key-value heads, so each has all of them
            "block": TransformerBlock(HIDDEN, 12, n_kv_heads=4, activation="swiglu", ffn_hidden_size=36, **place),
            # 3 ranks have 9, 9 and 7 of 25 columns, so a shard's rows start inside a Philox block
            "odd": RowParallelLinear(25, 5, **place),
        }
    )


def on_rank() -> list[dict[str, torch.Tensor]]:
    mesh, found = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], []
    for dtype in DTYPES:
        model = build(mesh, dtype)
        init_weights(model, 5)
        found.append({name: full_tensor(p.detach()) for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_same_bits_for_every_layout(ranks, t):
    for dtype, *by_rank in zip(DTYPES, *ranks(t).run(on_rank), strict=True):
        plain = build(None, dtype)
        init_weights(plain, 5)
        expected = {name: p.detach() for name, p in plain.named_parameters()}
        for parameters in by_rank:
            assert parameters.keys() == expected.keys()
            for name, p in parameters.items():
                assert p.dtype == dtype and torch.equal(p, expected[name]), name


def test_values_have_their_spread_and_padding_is_zero():
    model = build(None, torch.float64)
    init_weights(model, 5)
    table = model["embedding"].weight.detach()
    assert torch.equal(table[VOCAB:], torch.zeros_like(table[VOCAB:])) and bool((table[:VOCAB] != 0).all())
    q, k = model["block"].self_attn.q_proj.weight, model["block"].self_attn.k_proj.weight
    for values, spread in ((table[:VOCAB], 0.02), (q.detach(), HIDDEN**-0.5)):
        # within six standard errors of the spread of as many normals
        assert abs(float(values.std()) / spread - 1) < 6 / (2 * values.numel()) ** 0.5
    assert not torch.equal(q[: len(k)], k), "parameters of different names must differ"
    before = q.detach().clone()
    init_weights(model, 6)
    assert not torch.equal(q, before)


def test_other_modules_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    before = [p.detach().clone() for p in model.parameters()]
    init_weights(model, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def unequal_seeds() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    torch.manual_seed(1000 + dist.get_rank())
    model = build(mesh, torch.float32)
    replicated = {name: p.to_local().detach() for name, p in model.named_parameters() if p.placements[0].is_replicate()}
    return replicated, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("t", [2, 3])
def test_reset_agrees_though_torch_seeds_differ(ranks, t):
    torch.manual_seed(1000)  # rank 0's
    expected = {name: p.detach() for name, p in build(None, torch.float32).named_parameters()}
    results = ranks(t).run(unequal_seeds)
    for replicated, values in results:
        assert "positions.weight" in replicated and ("block.self_attn.k_proj.weight" in replicated) == (t == 3)
        for name, p in replicated.items():
            assert torch.equal(p, results[0][0][name]), name
        for name, p in values.items():
            assert torch.equal(p, expected[name]), name


def on_meta(how: str, with_mesh: bool) -> dict[str, torch.Tensor]:
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"] if with_mesh else None
    config = GPTConfig(vocab_size=VOCAB, seq_length=4, n_layers=1, hidden_size=HIDDEN, n_heads=4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if how == "context" else nullcontext():
            model = build(mesh, None)
            model["gpt"] = GPT(config, tp=mesh)
        assert all(p.is_meta and p.dtype == torch.float64 for p in model.parameters())
        model.to_empty(device="cpu")
        init_weights(model, 5)
        # a layer on ranks draws its values from a generator of the CPU, whatever the default device is
        ColumnParallelLinear(4, 6, tp=mesh, device="cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    return {name: full_tensor(p.detach()) for name, p in model.named_parameters() if not name.startswith("gpt.")}


@pytest.mark.parametrize("how", ["context", "default"])
@pytest.mark.parametrize("with_mesh", [False, True])
def test_default_device_and_dtype(ranks, how, with_mesh):
    plain = build(None, torch.float64)
    init_weights(plain, 5)
    for found in ranks(2).run(on_meta, how, with_mesh):
        for name, p in plain.named_parameters():
            assert torch.equal(found[name], p), name


def test_reset_draws_anew():
    layer = RowParallelLinear(4, 4)
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    torch.manual_seed(1)
    one = RowParallelLinear(4, 4).weight
    torch.manual_seed(1)
    assert torch.equal(RowParallelLinear(4, 4).weight, one)

"""The parameters of layers: sizes and initial values, whole tensors that are loaded into shards, and optimizers
that step shards. None of it depends on the tensor-parallel size or on torch's seeds."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from steps import each_case, tp_mesh
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpformer.distributed import build_mesh, record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import (
    MLP,
    ColumnParallelLinear,
    LMHead,
    ParallelModule,
    PositionEmbedding,
    RowParallelLinear,
    TensorParallel,
    TransformerBlock,
    VocabParallelEmbedding,
    init_weights,
)
from tpformer.models import GPT, GPTConfig

HIDDEN, VOCAB = 24, 37


def build(mesh, dtype: torch.dtype | None) -> nn.Module:
    place = {"tp": mesh, "dtype": dtype}
    return nn.ModuleDict(
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


def values(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name."""
    return {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


def initial(mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(mesh, dtype)
    init_weights(model, 5)
    return values(model)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_initial_values_have_the_same_bits_for_every_layout(ranks, t):
    for (dtype,), found in each_case(ranks, t, initial, [(torch.float32,), (torch.float64,), (torch.bfloat16,)]):
        for each in found:
            assert_identical(each, initial(None, dtype), f"{dtype}")


def test_values_have_their_spread_and_padding_is_zero():
    model = build(None, torch.float64)
    init_weights(model, 5)
    table = model["embedding"].weight.detach()
    assert torch.equal(table[VOCAB:], torch.zeros_like(table[VOCAB:])) and bool((table[:VOCAB] != 0).all())
    q, k = model["block"].self_attn.q_proj.weight, model["block"].self_attn.k_proj.weight
    for drawn, spread in ((table[:VOCAB], 0.02), (q.detach(), HIDDEN**-0.5)):
        # within six standard errors of the spread of as many normals
        assert abs(float(drawn.std()) / spread - 1) < 6 / (2 * drawn.numel()) ** 0.5
    assert not torch.equal(q[: len(k)], k), "parameters of different names must differ"
    before = q.detach().clone()
    init_weights(model, 6)
    assert not torch.equal(q, before)


def test_other_modules_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = [p.detach().clone() for p in model.parameters()]
    init_weights(model, 1)
    assert_identical(list(model.parameters()), before)


def unequal_seeds() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1000 + dist.get_rank())
    model = build(tp_mesh(), torch.float32)
    replicated = {name: p.to_local().detach() for name, p in model.named_parameters() if p.placements[0].is_replicate()}
    return replicated, values(model)


def test_reset_agrees_though_torch_seeds_differ(ranks):
    torch.manual_seed(1000)  # rank 0's
    expected = values(build(None, torch.float32))
    results = ranks(3).run(unequal_seeds)
    assert {"positions.weight", "block.self_attn.k_proj.weight"} <= results[0][0].keys()
    for replicated, found in results:
        assert_identical(replicated, results[0][0])
        assert_identical(found, expected)


def on_meta(mesh, how: str, with_mesh: bool) -> dict[str, Tensor]:
    mesh = mesh if with_mesh else None
    config = GPTConfig(vocab_size=VOCAB, seq_length=4, n_layers=1, hidden_size=HIDDEN, n_heads=4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if how == "default":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if how == "context" else nullcontext():
            model, gpt = build(mesh, None), GPT(config, tp=mesh)
        assert all(p.is_meta and p.dtype == torch.float64 for p in (*model.parameters(), *gpt.parameters()))
        model.to_empty(device="cpu")
        init_weights(model, 5)
        # a layer on ranks draws its values from a generator of the CPU, whatever the default device is
        ColumnParallelLinear(4, 6, tp=mesh, device="cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    return values(model)


def test_default_device_and_dtype(ranks):
    cases = product(("context", "default"), (False, True))
    for case, found in each_case(ranks, 2, on_meta, cases):
        for each in found:
            assert_identical(each, initial(None, torch.float64), f"{case}")


def test_reset_draws_anew():
    layer = RowParallelLinear(4, 4)
    before = layer.weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    torch.manual_seed(1)
    one = RowParallelLinear(4, 4).weight
    torch.manual_seed(1)
    assert torch.equal(RowParallelLinear(4, 4).weight, one)


def test_default_sizes():
    """A gated MLP is 8/3 as wide as its input, rounded up to a multiple of 128: 10922.67 becomes Llama's 11008. A table
    is padded to a multiple of 128: GPT-2's 50257 rows become 50304."""
    assert MLP(4096, activation="swiglu", device="meta").gate_proj.weight.shape == (11008, 4096)
    assert MLP(384, activation="geglu", device="meta").up_proj.weight.shape == (1024, 384)
    assert VocabParallelEmbedding(50257, 1, device="meta").weight.shape == (50304, 1)
    assert VocabParallelEmbedding(256, 1, device="meta").weight.shape == (256, 1)


def test_placement_dtype_and_device_are_passed_on():
    """A norm on sequence shards beside linears on whole samples would be trained with wrong gradients."""
    place = TensorParallel(sequence_parallel=True)
    block = TransformerBlock(8, 2, tp=place, device="meta", dtype=torch.bfloat16)
    assert all(part.tp is place for part in block.modules() if isinstance(part, ParallelModule))
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in block.parameters())
    assert not TransformerBlock(16, 4).tp.sequence_parallel


# on 3 ranks the MLP and the vocabulary are uneven, and each rank has both key-value heads
CONFIG = GPTConfig(
    vocab_size=VOCAB, vocab_multiple=4, seq_length=6, n_layers=1, hidden_size=HIDDEN, n_heads=6, n_kv_heads=2,
    ffn_hidden_size=32, tie_embeddings=False,
)  # fmt: skip


def whole_state() -> dict[str, Tensor]:
    return GPT(CONFIG, seed=1, dtype=torch.float64).state_dict()


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_identical(values(model), state)


@on_every_rank(1, 2, 3)
def test_whole_tensors_load_into_shards() -> None:
    mesh, state = tp_mesh(), whole_state()
    model = GPT(CONFIG, seed=2, tp=mesh, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    with record_collectives() as collectives:
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert collectives == [] and dict(model.named_parameters()).items() == parameters.items()
    assert_holds(model, state)

    on_meta = GPT(CONFIG, tp=mesh, device="meta")
    on_meta.load_state_dict(model.state_dict() | {"norm.weight": state["norm.weight"]}, assign=True)  # DTensors, too
    on_meta.load_state_dict(state, assign=True)
    assert_holds(on_meta, state)
    held = on_meta.layers["0"].mlp.fc1.weight.to_local()
    assert held.untyped_storage().nbytes() == held.numel() * held.itemsize

    del state["norm.weight"]
    found = model.load_state_dict(state | {"other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["norm.weight"] and found.unexpected_keys == ["other"]
    with pytest.raises(
        RuntimeError, match=r"size mismatch for norm.weight: .* torch.Size\(\[23\]\) .* torch.Size\(\[24\]\)"
    ):
        model.load_state_dict(state | {"norm.weight": torch.ones(23)})


@on_every_rank(2, 4)
def test_fsdp_is_told_its_own_way() -> None:
    tp = dist.get_world_size() // 2
    mesh, state = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=2), whole_state()
    model = GPT(CONFIG, seed=2, tp=mesh["tp"] if tp > 1 else None, dtype=torch.float64)
    fully_shard(model, mesh=mesh["dp_shard"])
    with pytest.raises(
        RuntimeError, match=r"embed_tokens.weight is laid out by FSDP2, too, .*set_model_state_dict and"
    ):
        model.load_state_dict(state)
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    assert_holds(model, state)


def stepped(mesh, kind: type[torch.optim.Optimizer], parts: str = "weight bias") -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(6, 8, gather_output=True, tp=mesh, dtype=torch.float64)
    optimizer = kind([p for name, p in layer.named_parameters() if name in parts.split()], lr=0.1)
    for seed in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(layer)


def test_optimizers_that_update_each_element_by_itself_are_exact_on_shards(ranks):
    kinds = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)
    for (kind,), found in each_case(ranks, 2, stepped, [(kind,) for kind in kinds]):
        for each in found:
            assert_same(each, stepped(None, kind), kind.__name__)


@on_every_rank(2)
def test_adafactor_is_refused_on_shards() -> None:
    for parts in ("weight bias", "bias"):
        with pytest.raises(ValueError, match=r"Adafactor cannot step a parameter of \(8,.*\) that is sharded over"):
            stepped(tp_mesh(), torch.optim.Adafactor, parts)
    plain = nn.Linear(3, 3)
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.Adafactor(plain.parameters()).step()

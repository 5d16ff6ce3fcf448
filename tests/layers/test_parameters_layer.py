"""The parameters of layers: sizes and initial values, whole tensors that are loaded into shards, and optimizers
that step shards. None of it depends on the tensor-parallel size or on torch's seeds."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from steps import draw, each_case, tp_mesh
from testing import assert_identical, assert_same, on_every_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from turns import in_turns

from tpformer import layers
from tpformer.distributed import build_mesh, record_collectives
from tpformer.distributed.dtensor import full_tensor
from tpformer.models import GPT, GPTConfig

HIDDEN, VOCAB = 24, 37
# on 3 ranks the MLP and the vocabulary are uneven, and each rank has both key-value heads
CONFIG = GPTConfig(
    vocab_size=VOCAB, vocab_multiple=4, seq_length=6, n_layers=1, hidden_size=HIDDEN, n_heads=6, n_kv_heads=2,
    ffn_hidden_size=32, tie_embeddings=False,
)  # fmt: skip


def build(mesh, dtype: torch.dtype | None) -> nn.ModuleDict:
    """3 ranks divide the tables' 40 rows unevenly, and some of the last one's are padding; each has all 4 key-value
    heads; and they have 9, 9 and 7 of 25 columns, so that a shard's rows start inside a Philox block."""
    place: dict = {"tp": mesh, "dtype": dtype}
    block = {"n_kv_heads": 4, "activation": "swiglu", "ffn_hidden_size": 36, **place}
    return nn.ModuleDict({
        "embedding": layers.VocabParallelEmbedding(VOCAB, HIDDEN, vocab_multiple=8, **place),
        "head": layers.LMHead(VOCAB, HIDDEN, vocab_multiple=8, **place),
        "positions": layers.PositionEmbedding(7, HIDDEN, **place),
        "block": layers.transformer_block(HIDDEN, 12, **block),
        "odd": layers.RowParallelLinear(25, 5, **place),
    })  # fmt: skip


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


def initial(mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(mesh, dtype)
    layers.init_weights(model, 5)
    return values(model)


@pytest.mark.parametrize("t", [1, 2, 3])
def test_initial_values_have_the_same_bits_for_every_layout(ranks, t):
    for (dtype,), found in each_case(ranks, t, initial, [(torch.float32,), (torch.float64,), (torch.bfloat16,)]):
        assert_identical(found, (initial(None, dtype),) * t, f"{dtype}")


def test_values_have_their_spread_and_padding_is_zero():
    model = build(None, torch.float64)
    layers.init_weights(model, 5)
    table = model["embedding"].weight.detach()
    assert torch.equal(table[VOCAB:], torch.zeros_like(table[VOCAB:])) and bool((table[:VOCAB] != 0).all())
    q, k = model["block"].self_attn.q_proj.weight, model["block"].self_attn.k_proj.weight
    for drawn, spread in ((table[:VOCAB], 0.02), (q.detach(), HIDDEN**-0.5)):
        # within six standard errors of the spread of as many normals
        assert abs(float(drawn.std()) / spread - 1) < 6 / (2 * drawn.numel()) ** 0.5
    assert not torch.equal(q[: len(k)], k), "parameters of different names must differ"
    before, model["theirs"] = q.detach().clone(), nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    theirs = values(model["theirs"])
    layers.init_weights(model, 6)
    assert not torch.equal(q, before)
    assert_identical(values(model["theirs"]), theirs, "other modules are left alone")


@on_every_rank(3)
def test_reset_agrees_though_torch_seeds_differ() -> None:
    torch.manual_seed(1000)  # rank 0's
    expected = values(build(None, torch.float32))
    torch.manual_seed(1000 + dist.get_rank())
    model = build(tp_mesh(), torch.float32)
    replicated = {name: p.to_local().detach() for name, p in model.named_parameters() if p.placements[0].is_replicate()}
    assert {"positions.weight", "block.self_attn.k_proj.weight"} <= replicated.keys()
    assert_identical(replicated, {name: expected[name] for name in replicated})
    assert_identical(values(model), expected)
    model["odd"].reset_parameters()
    assert not torch.equal(values(model)["odd.weight"], expected["odd.weight"]), "a reset draws anew"


def on_meta(mesh, how: str, with_mesh: bool) -> dict[str, Tensor]:
    mesh = mesh if with_mesh else None
    config = GPTConfig(vocab_size=VOCAB, seq_length=4, n_layers=1, hidden_size=HIDDEN, n_heads=4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta" if how == "default" else None)
    try:
        with torch.device("meta") if how == "context" else nullcontext():
            model, gpt = build(mesh, None), GPT(config, tp=mesh)
        assert all(p.is_meta and p.dtype == torch.float64 for p in (*model.parameters(), *gpt.parameters()))
        layers.init_weights(model.to_empty(device="cpu"), 5)
        # a layer on ranks draws its values from a generator of the CPU, whatever the default device is
        layers.ColumnParallelLinear(4, 6, tp=mesh, device="cpu")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    return values(model)


def test_default_device_and_dtype(ranks):
    for case, found in each_case(ranks, 2, on_meta, product(("context", "default"), (False, True))):
        assert_identical(found, (initial(None, torch.float64),) * 2, f"{case}")


def test_default_sizes():
    """A gated MLP is 8/3 as wide as its input, rounded up to a multiple of 128: 10922.67 becomes Llama's 11008. A table
    is padded to a multiple of 128: GPT-2's 50257 rows become 50304."""
    assert layers.MLP(4096, activation="swiglu", device="meta").gate_proj.weight.shape == (11008, 4096)
    assert layers.MLP(384, activation="geglu", device="meta").up_proj.weight.shape == (1024, 384)
    assert layers.VocabParallelEmbedding(50257, 1, device="meta").weight.shape == (50304, 1)
    assert layers.VocabParallelEmbedding(256, 1, device="meta").weight.shape == (256, 1)


def gpt(seed: int, tp=None) -> GPT:
    return GPT(CONFIG, seed=seed, tp=tp, dtype=torch.float64)


def assert_holds(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_identical(values(model), state)


@on_every_rank(1, 2, 3)
def test_whole_tensors_load_into_shards() -> None:
    mesh, state = tp_mesh(), gpt(1).state_dict()
    parameters = dict((model := gpt(2, mesh)).named_parameters())
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
    words = r"size mismatch for norm.weight: .* torch.Size\(\[23\]\) .* torch.Size\(\[24\]\)"
    with pytest.raises(RuntimeError, match=words):
        model.load_state_dict(state | {"norm.weight": torch.ones(23)})


@on_every_rank(2, *in_turns([4], first=1))
def test_fsdp_is_told_its_own_way() -> None:
    tp = dist.get_world_size() // 2
    mesh, state = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=2), gpt(1).state_dict()
    model = fully_shard(gpt(2, mesh["tp"] if tp > 1 else None), mesh=mesh["dp_shard"])
    with pytest.raises(RuntimeError, match="embed_tokens.weight is laid out by FSDP2, too, .*set_model_state_dict and"):
        model.load_state_dict(state)
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    assert_holds(model, state)


def stepped(mesh, kind: Callable[..., torch.optim.Optimizer], parts: str = "weight bias") -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = layers.ColumnParallelLinear(6, 8, gather_output=True, tp=mesh, dtype=torch.float64)
    optimizer = kind([p for name, p in layer.named_parameters() if name in parts.split()], lr=0.1)
    for x in draw((3, 5, 6))[0]:
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(layer)


OF_DTENSORS = {
    torch.optim.Rprop: "torch has no Rprop of DTensors: use another optimizer, such as AdamW",
    partial(torch.optim.SGD, fused=True): r"torch has no SGD\(fused=True\) of DTensors: leave fused out",
    partial(torch.optim.Adagrad, fused=True): r"torch has no Adagrad\(fused=True\) of DTensors: leave fused out",
}


@on_every_rank(2)
def test_optimizers_of_single_elements_are_exact_on_shards_and_adafactor_is_refused() -> None:
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        assert_same(stepped(tp_mesh(), kind), stepped(None, kind), kind.__name__)
    for parts in ("weight bias", "bias"):
        with pytest.raises(ValueError, match=r"Adafactor cannot step a parameter of \(8,.*\) that is sharded over"):
            stepped(tp_mesh(), torch.optim.Adafactor, parts)
    for make, said in OF_DTENSORS.items():
        with pytest.raises(ValueError, match=said):
            stepped(tp_mesh(), make)
        stepped(None, make)
    plain = nn.Linear(3, 3)
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.Adafactor(plain.parameters()).step()


@on_every_rank(2)
def test_data_that_fsdp_reads_elsewhere_is_not_set() -> None:
    """Fails if a parameter has values that FSDP2 does not gather, or if such a write, as Accelerate does, raises."""
    mesh = build_mesh("cpu", tensor_parallel=1, data_parallel_shard=2)
    layer = fully_shard(layers.ColumnParallelLinear(4, 6, tp=mesh["tp"]), mesh=mesh["dp_shard"])
    before = layer.weight.to_local().clone()
    layer.weight.data = layer.weight.data * 0.5
    assert torch.equal(layer.weight.to_local(), before)

"""load_state_dict takes whole tensors into tensor-parallel layers, as torch.nn's layers do."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tpformer.distributed import build_mesh, record_collectives
from tpformer.models import GPT, GPTConfig

# on 3 ranks the MLP and the vocabulary are uneven, and each rank has both key-value heads
CONFIG = GPTConfig(
    vocab_size=37, vocab_multiple=4, seq_length=6, n_layers=1, hidden_size=24, n_heads=6, n_kv_heads=2,
    ffn_hidden_size=32, tie_embeddings=False,
)  # fmt: skip


def whole_state() -> dict[str, Tensor]:
    return GPT(CONFIG, seed=1, dtype=torch.float64).state_dict()


def assert_holds(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor) and torch.equal(p.full_tensor(), state[name]), name


def load() -> None:
    mesh, state = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], whole_state()
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


@pytest.mark.parametrize("t", [1, 2, 3])
def test_whole_tensors_load_into_shards(ranks, t):
    ranks(t).run(load)


def load_fully_sharded(tp: int) -> None:
    mesh, state = build_mesh("cpu", tensor_parallel=tp, data_parallel_shard=2), whole_state()
    model = GPT(CONFIG, seed=2, tp=mesh["tp"] if tp > 1 else None, dtype=torch.float64)
    fully_shard(model, mesh=mesh["dp_shard"])
    with pytest.raises(
        RuntimeError, match=r"embed_tokens.weight is laid out by FSDP2, too, .*set_model_state_dict and"
    ):
        model.load_state_dict(state)
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    assert_holds(model, state)


@pytest.mark.parametrize("tp", [1, 2])
def test_fsdp_is_told_its_own_way(ranks, tp):
    ranks(2 * tp).run(load_fully_sharded, tp)

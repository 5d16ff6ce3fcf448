"""A sharded model's files are those of one process, bit for bit, and each rank fills its own parts from them."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from growth import growth
from safetensors.torch import load_file, save_file
from testing import assert_identical, assert_same, on_every_rank
from tiny import built, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from turns import in_turns

import tpformer
from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.in_place.linears import make_column, make_row
from tpformer.in_place.loading import load_sharded, parameters_on_meta

IDS = torch.arange(12).view(2, 6)
WIDTH = 4096


def sharded(model: nn.Module, data_parallel: int) -> nn.Module:
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    tpformer.parallelize(model, mesh["tp"])
    if data_parallel > 1:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["dp_shard"])
    return model


def full_state(model: nn.Module) -> dict:
    return {name: value.clone() for name, value in tpformer.full_state_dict(model).items()}


def save_and_load(family: str, data_parallel: int, folder: Path, options: dict):
    """The state that was saved, which rank 0 has, and the files; then the logits and the state of what was loaded."""
    model = sharded(tiny(family, torch.float64, **options), data_parallel)
    model.save_pretrained(folder / "all", max_shard_size="20KB")
    saved = full_state(torch.compile(model, backend="eager")), sorted(os.listdir(folder / "all"))
    with parameters_on_meta():
        model = built(family, **options).double().eval()
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    load_sharded(sharded(model, data_parallel), folder / "read")
    assert isinstance(model.get_output_embeddings().weight, DTensor)
    with in_float64():
        return *saved, model(IDS).logits.detach(), full_state(model)


@pytest.mark.parametrize(("family", "data_parallel"), [("mixtral", 1), ("gpt2", 1), *in_turns([("llama", 2)], first=1)])
def test_files_are_those_of_one_process_out_and_in(ranks, tmp_path, family, data_parallel):
    options = {"tie_word_embeddings": True} if family == "llama" else {}
    model = tiny(family, torch.float64, **options)
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    base = model.transformer if family == "gpt2" else model  # a base model has names without its prefix
    base.save_pretrained(tmp_path / "read", max_shard_size="20KB")
    with in_float64():
        expected = model(IDS).logits.detach()
    results = ranks(2 * data_parallel).run(save_and_load, family, data_parallel, tmp_path, options)
    for rank, (saved, files, logits, loaded) in enumerate(results):
        assert files == sorted(os.listdir(tmp_path / "one")) and len(files) > 3
        assert_identical([saved, loaded], [dict(model.state_dict()) if rank == 0 else {}] * 2)
        assert_same(logits, expected)
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes(), name
    assert_identical(type(model).from_pretrained(tmp_path / "all").state_dict(), model.state_dict())


@on_every_rank(2)
def test_a_failure_of_rank_0_is_everybodys(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError if dist.get_rank() == 0 else RuntimeError, match="Not a directory"):
        sharded(tiny("llama"), 1).save_pretrained(tmp_path / "file" / "below")


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.up.weight


def save_changed(model: nn.Module, folder: Path, **changes: torch.Tensor | None) -> None:
    """Write a model's file without the tie and with these changes; None leaves a tensor out."""
    values = model.state_dict() | {"head.weight": None} | changes
    save_file({name: x for name, x in values.items() if x is not None}, folder / "model.safetensors")


def test_a_plain_module_in_one_process(tmp_path):
    model = Own()
    model.norm(torch.randn(8, 4))
    save_changed(model, tmp_path)
    with parameters_on_meta():
        loaded = Own()
    load_sharded(loaded, tmp_path)
    assert loaded.head.weight is loaded.up.weight
    assert_identical(loaded.state_dict(), model.state_dict())


def test_files_of_another_model_are_refused_and_change_nothing(tmp_path):
    model = Own()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for message, changes in {
        "has no up.bias, which this Own needs": {"up.bias": None},
        "has no head.weight, up.weight, which this Own needs": {"up.weight": None},
        "has left, which no part of this Own takes": {"left": torch.zeros(1)},
        r"has down.weight as \(4, 5\), but this model has it as \(4, 6\)": {"down.weight": torch.zeros(4, 5)},
        "up.weight and head.weight are tied in the model, but differ": {"head.weight": torch.zeros(6, 4)},
        "has up.bias in torch.int64": {"up.bias": torch.zeros(6, dtype=torch.int64)},
    }.items():
        save_changed(model, tmp_path, **changes)
        with pytest.raises(ValueError, match=message):
            load_sharded(model, tmp_path)
        assert_identical(dict(model.state_dict()), before)
    with torch.device("meta"):
        model = Own()
    with pytest.raises(ValueError, match=r"the buffers norm.* have no values.*parameters_on_meta"):
        load_sharded(model, tmp_path)


def test_what_transformers_does_not_know_is_refused(tmp_path):
    model = tiny("mixtral", torch.float64)
    model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    values.pop(next(name for name in values if ".experts.3." in name))
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot make .*gate_up_proj of .*experts\.0\.w1"):
        load_sharded(model, tmp_path)


@on_every_rank(2)
def test_no_rank_holds_the_whole(tmp_path):
    places = {"0.weight": "a.safetensors", "1.weight": "b.safetensors"}
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        for name, file in places.items():
            save_file({name: torch.ones(WIDTH, WIDTH)}, tmp_path / file)
    dist.barrier()
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    make_column(model[0], mesh)
    make_row(model[1], mesh)
    grown = growth(lambda: load_sharded(model, tmp_path))
    assert 0.4 * 8 * WIDTH**2 < grown < 0.6 * 8 * WIDTH**2  # of two float32 tensors

"""Each rank fills its own parts of a model from safetensors files: right in every layout, or refused with names."""

import json

import pytest
import torch
from growth import growth
from safetensors.torch import load_file, save_file
from testing import assert_identical, assert_same
from tiny import built, tiny
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tpformer
from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.in_place.linears import make_column, make_row
from tpformer.in_place.loading import load_sharded, parameters_on_meta
from tpformer.in_place.saving import full_state_dict

IDS = torch.arange(12).view(2, 6)


def load(family: str, folder: str, data_parallel: int):
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    with parameters_on_meta():
        model = built(family).double().eval()
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    tpformer.parallelize(model, mesh["tp"])
    if data_parallel > 1:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["dp_shard"])
    load_sharded(model, folder)
    assert isinstance(model.get_output_embeddings().weight, DTensor)
    with in_float64():
        return model(IDS).logits.detach(), {name: x.clone() for name, x in full_state_dict(model).items()}


@pytest.mark.parametrize(("family", "data_parallel"), [("tied", 2), ("mixtral", 1), ("gpt2", 1)])
def test_equals_one_process(ranks, tmp_path, family, data_parallel):
    model = tiny(family, torch.float64)
    saved = model.transformer if family == "gpt2" else model  # a base model has names without its prefix
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    with in_float64():
        expected = model(IDS).logits.detach()
    results = ranks(2 * data_parallel).run(load, family, str(tmp_path), data_parallel)
    for logits, _ in results:
        assert_same(logits, expected)
    assert_identical(results[0][1], dict(model.state_dict()))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.up.weight


def test_a_plain_module_in_one_process(tmp_path):
    model = Own()
    model.norm(torch.randn(8, 4))
    values = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(values, tmp_path / "model.safetensors")
    with parameters_on_meta():
        loaded = Own()
    load_sharded(loaded, tmp_path)
    assert loaded.head.weight is loaded.up.weight
    assert_identical(loaded.state_dict(), model.state_dict())


def changed(values: dict, **changes) -> dict:
    return {name: value for name, value in (values | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up.bias": None}, "has no up.bias, which this Own needs"),
        ({"up.weight": None}, "has no head.weight, up.weight, which this Own needs"),
        ({"left": torch.zeros(1)}, "has left, which no part of this Own takes"),
        ({"down.weight": torch.zeros(4, 5)}, r"has down.weight as \(4, 5\), but this model has it as \(4, 6\)"),
        ({"head.weight": torch.zeros(6, 4)}, "up.weight and head.weight are tied in the model, but differ"),
        ({"up.bias": torch.zeros(6, dtype=torch.int64)}, "has up.bias in torch.int64"),
    ],
)
def test_refusals(tmp_path, changes, message):
    model = Own()
    values = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(changed(values, **changes), tmp_path / "model.safetensors")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_sharded(model, tmp_path)
    assert_identical(dict(model.state_dict()), before)


def test_buffers_without_values_are_refused(tmp_path):
    with torch.device("meta"):
        model = Own()
    save_file(Own().norm.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"the buffers norm.* have no values.*parameters_on_meta"):
        load_sharded(model, tmp_path)


def test_what_transformers_does_not_know_is_refused(tmp_path):
    model = tiny("mixtral", torch.float64)
    model.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    one = next(name for name in values if ".experts.3." in name)
    save_file({name: value for name, value in values.items() if name != one}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot make .*gate_up_proj of .*experts\.0\.w1"):
        load_sharded(model, tmp_path)


WIDTH = 4096


def fill(folder: str) -> int:
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]

    def work() -> None:
        with parameters_on_meta():
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        make_column(model[0], mesh)
        make_row(model[1], mesh)
        load_sharded(model, folder)

    return growth(work)


def test_no_rank_holds_the_whole(ranks, tmp_path):
    whole = {f"{number}.weight": torch.ones(WIDTH, WIDTH) for number in range(2)}
    save_file({"1.weight": whole["1.weight"]}, tmp_path / "b.safetensors")
    save_file({"0.weight": whole["0.weight"]}, tmp_path / "a.safetensors")
    places = {"0.weight": "a.safetensors", "1.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    nbytes = sum(x.nbytes for x in whole.values())
    for grown in ranks(2).run(fill, str(tmp_path)):
        assert 0.4 * nbytes < grown < 0.6 * nbytes

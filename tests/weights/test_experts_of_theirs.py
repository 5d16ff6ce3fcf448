"""Experts of transformers' models: gradients equal theirs, and each rank reads the tensors of its own experts alone."""

from unittest import mock

import oracle
import pytest
import torch
import torch.nn.functional as F
from testing import assert_same
from torch.distributed.fsdp import fully_shard

from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.distributed.dtensor import full_tensor
from tpformer.models import GPT
from tpformer.training.source import open_source
from tpformer.weights.files import TensorFiles


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense-first"])
def test_gradients_equal_theirs(tmp_path, name):
    theirs = oracle.exact(oracle.make(name, tmp_path))
    source, ids = open_source(tmp_path), oracle.ids()
    ours = GPT(source.architecture, dtype=torch.float64)
    source.load([ours])
    with in_float64():
        loss = F.cross_entropy(theirs(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    found = ours(ids[:, :-1], targets=ids[:, 1:])
    found.backward()
    assert_same(found, loss)
    expected = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    assert_same({key: p.grad[: len(expected[key])] for key, p in ours.named_parameters()}, expected)


def loaded(folder: str, tensor_parallel: int, shards: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The whole parameters of a model that this rank's group has loaded, and the tensors that this rank has read."""
    mesh = build_mesh("cpu", tensor_parallel=tensor_parallel, data_parallel_shard=shards)
    source, read = open_source(folder), set()
    model = GPT(source.architecture, tp=mesh["tp"], device="meta")
    if shards > 1:
        fully_shard(model, mesh=mesh["dp_shard"])
    model.to_empty(device="cpu")
    whole = TensorFiles.slice

    def slice_of(self: TensorFiles, name: str):
        read.add(name)
        return whole(self, name)

    with mock.patch.object(TensorFiles, "slice", slice_of):
        source.load([model])
    return {name: full_tensor(value).clone() for name, value in model.state_dict().items()}, read


@pytest.mark.parametrize(("tensor_parallel", "shards"), [(4, 1), (2, 2)])
def test_every_layout_loads_the_same_and_reads_its_own_experts(ranks, tmp_path, monkeypatch, tensor_parallel, shards):
    kind, fields = oracle.MODELS["mixtral"]
    monkeypatch.setitem(oracle.MODELS, "eight", (kind, fields | {"num_local_experts": 8}))
    oracle.make("eight", tmp_path)
    ((alone, every),) = ranks(1).run(loaded, str(tmp_path), 1, 1)
    experts = {name for name in every if ".experts." in name}
    for found, read in ranks(tensor_parallel * shards).run(loaded, str(tmp_path), tensor_parallel, shards):
        assert all(torch.equal(found[name], value) for name, value in alone.items())
        assert len(read & experts) == len(experts) // (tensor_parallel * shards)

"""A sharded model is saved from all ranks as one process saves it: the same files, with the same bits."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from testing import assert_identical
from tiny import tiny
from torch.distributed.fsdp import fully_shard

import tpformer
from tpformer.distributed import build_mesh


def on_ranks(family: str, data_parallel: int):
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_shard=data_parallel)
    model = tpformer.parallelize(tiny(family, torch.float64), mesh["tp"])
    if data_parallel > 1:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh["dp_shard"])
    return model


def save(family: str, data_parallel: int, folder: str):
    model = on_ranks(family, data_parallel)
    model.save_pretrained(folder, max_shard_size="20KB")
    return {
        name: value.clone() for name, value in tpformer.full_state_dict(torch.compile(model, backend="eager")).items()
    }, sorted(os.listdir(folder))


@pytest.mark.parametrize(("family", "data_parallel"), [("tied", 2), ("mixtral", 1), ("gpt2", 1)])
def test_the_files_are_those_of_one_process(ranks, tmp_path, family, data_parallel):
    model = tiny(family, torch.float64)
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    (state, files), *others = ranks(2 * data_parallel).run(save, family, data_parallel, str(tmp_path / "all"))
    assert all(each == ({}, files) for each in others)
    assert files == sorted(os.listdir(tmp_path / "one")) and len(files) > 3
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes(), name
    assert_identical(state, dict(model.state_dict()))
    loaded = type(model).from_pretrained(tmp_path / "all")
    assert_identical(loaded.state_dict(), model.state_dict())


def fail(file: str):
    with pytest.raises(NotADirectoryError if dist.get_rank() == 0 else RuntimeError, match="Not a directory"):
        on_ranks("llama", 1).save_pretrained(Path(file, "below"))


def test_a_failure_of_rank_0_is_everybodys(ranks, tmp_path):
    (tmp_path / "file").touch()
    ranks(2).run(fail, str(tmp_path / "file"))

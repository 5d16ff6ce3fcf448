"""A checkpoint loads in any layout as what was saved in any other; another model's checkpoint is refused."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from checkpointed import CONFIG, LAYOUTS, PLAIN, build, everything, merged, save_run, update, whole
from testing import assert_identical
from torch import nn
from torch.distributed.fsdp import fully_shard

from tpformer.distributed import build_mesh
from tpformer.models import GPT
from tpformer.parallel import split_stages
from tpformer.training.checkpoint import (
    MODEL,
    Checkpointer,
    CheckpointError,
    load_checkpoint,
    newest_good,
    saved_tensors,
)

SAVED = ("tp2-pp2", "hybrid")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """By the name of a layout: the directory in which it was saved, and the tensors that it had."""
    results = {}
    for name in SAVED:
        directory = tmp_path_factory.mktemp(name)
        results[name] = directory, merged(ranks(4).run(save_run, directory, LAYOUTS[name]))
    return results


@pytest.mark.parametrize("name", SAVED)
def test_one_process_loads_what_a_layout_saved(saved, name):
    """It has no mesh and no process group, and plain tensors. It may load the model alone. test_reshard.py has layouts.

    Copies of replicated and of tied parameters are not written. The manifest notices damage to any rank's file.
    """
    directory, tensors = saved[name]
    path, note = directory / "step-2", {"skipped": 2, "scaler": {"scale": 0.2}}
    assert not dist.is_initialized()
    model = GPT(CONFIG, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    assert newest_good(directory, print) == 2
    assert load_checkpoint(path, [model], [optimizer]) == note
    assert_identical(everything([model], [optimizer]), tensors)
    assert optimizer.param_groups[0]["lr"] == 0.02, "hyperparameters are the configuration's"
    model = GPT(CONFIG, seed=2)
    load_checkpoint(path, [model])
    assert_identical(dict(model.named_parameters()), {key: tensors[key] for key, _ in model.named_parameters()})
    for key, entry in saved_tensors(path, "").items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key
    assert "embed_tokens.weight" in saved_tensors(path, MODEL)
    listed = json.loads((path / "manifest.json").read_text())
    assert {*listed, "manifest.json"} == {each.name for each in path.iterdir()}
    assert json.loads((path / "trainer.json").read_text()) == {"step": 2, "extra": note}, "it can be read by eye"


class Odd(nn.Module):
    """It has fewer rows than ranks, a buffer, a scalar, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.linear.weight.requires_grad_(False)


def save_odd(directory):
    parts = [Odd(), nn.ReLU()]
    fully_shard(parts[0], mesh=build_mesh("cpu", data_parallel_shard=4, tensor_parallel=1)["dp_shard"])
    torch.manual_seed(0)
    with torch.no_grad():
        parts[0].norm.running_mean.add_(torch.rand(2))
    trained = [parameter for parameter in parts[0].parameters() if parameter.requires_grad]
    optimizers = [torch.optim.AdamW(trained), torch.optim.AdamW([{"params": []}])]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    checkpointer = Checkpointer(directory)
    checkpointer.save(7, parts, optimizers)
    checkpointer.wait()
    for parameter in trained:
        parameter.data.zero_()
    assert checkpointer.load(7, parts, optimizers) == {}
    found = {name: whole(value) for name, value in parts[0].state_dict().items()}
    for name, parameter in parts[0].named_parameters():
        found |= {f"{name} {key}": whole(value) for key, value in optimizers[0].state.get(parameter, {}).items()}
    return found


def test_empty_shards_buffers_and_parts_without_parameters(ranks, tmp_path):
    results = ranks(4).run(save_odd, tmp_path)
    assert_identical(merged(results), results[0])
    assert results[0]["linear.bias"].abs().sum() > 0 and "linear.weight exp_avg" not in results[0]
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    load_checkpoint(tmp_path / "step-7", [model], [optimizer])
    assert_identical(model.state_dict(), {k: v for k, v in results[0].items() if " " not in k})
    assert torch.equal(optimizer.state[model.norm.weight]["exp_avg"], results[0]["norm.weight exp_avg"])


OTHERS = [
    ({"n_layers": 5}, ["has no", "model.layers.4.", "more"]),
    ({"n_layers": 3}, ["nothing here takes its", "layers.3."]),
    ({"hidden_size": 48}, ["(128, 24)", "(128, 48)"]),
]


def load_others(path):
    """Each pipeline rank's messages where the model is not the checkpoint's."""
    messages = []
    for change, _ in OTHERS:
        config = dataclasses.replace(CONFIG, **change)
        part = GPT(config, part=split_stages(config.layer_costs("parameters"), 2)[dist.get_rank()])
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path, [part], group=dist.group.WORLD)
        messages.append(str(error.value))
    return messages


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(ranks, saved):
    path = saved["tp2-pp2"][0] / "step-2"
    for first, second, (_, words) in zip(*ranks(2).run(load_others, path), OTHERS, strict=True):
        assert first == second and str(path) in first
        for word in words:
            assert word in first


def wrong_calls(directory):
    """And an optimizer that has never stepped, as in a run whose steps were all skipped, is loaded as such."""
    parts, optimizers = build(PLAIN, seed=1)
    checkpointer = Checkpointer(directory)
    for arguments, error, words in (
        ((1, parts, []), ValueError, "0 optimizers for 1 model parts"),
        ((1, parts, optimizers, {"x": torch.ones(1)}), TypeError, "Tensor"),
        ((1, [nn.ReLU()], optimizers), ValueError, "does not have"),
    ):
        with pytest.raises(error, match=words):
            checkpointer.save(*arguments)
    assert not directory.exists()
    checkpointer.save(3, parts, optimizers)
    update(parts, optimizers)
    checkpointer.load(3, parts, optimizers)
    return {key: value for key, value in everything(parts, optimizers).items() if " " in key}


def test_wrong_calls_write_nothing_and_an_optimizer_that_never_stepped_stays_so(ranks, tmp_path):
    assert ranks(1).run(wrong_calls, tmp_path / "checkpoints") == [{}]

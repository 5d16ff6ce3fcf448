"""A checkpoint loads in any layout as what was saved in any other; another model's checkpoint is refused."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist
from checkpointed import CONFIG, LAYOUTS, PLAIN, build, everything, load_run, merged, save_run, update, whole
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


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """save(name of a layout): the directory in which it was saved, and the tensors that it had."""
    results: dict = {}

    def save(name):
        if name not in results:
            directory = tmp_path_factory.mktemp(name)
            size = LAYOUTS[name].world_size
            results[name] = directory, merged(ranks(size).run(save_run, directory, LAYOUTS[name]))
        return results[name]

    return save


FIRST = ("tp2-pp2", "hybrid")
OTHERS = [pytest.param(name, marks=pytest.mark.proof) for name in LAYOUTS if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *OTHERS])
def test_one_process_loads_what_any_layout_saved(saved, name):
    """It has no mesh and no process group, and plain tensors. It may load the model alone."""
    directory, tensors = saved(name)
    assert not dist.is_initialized()
    model = GPT(CONFIG, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    assert newest_good(directory, print) == 2
    extra = load_checkpoint(directory / "step-2", [model], [optimizer])
    assert extra == {"skipped": 2, "scaler": {"scale": 0.2}}
    assert_identical(everything([model], [optimizer]), tensors)
    assert optimizer.param_groups[0]["lr"] == 0.02, "hyperparameters are the configuration's"
    model = GPT(CONFIG, seed=2)
    load_checkpoint(directory / "step-2", [model])
    assert_identical(dict(model.named_parameters()), {key: tensors[key] for key, _ in model.named_parameters()})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2-pp2", "tp2-zero3"),
        ("hybrid", "v-schedule"),
        pytest.param("v-schedule", "tp2-pp2", marks=pytest.mark.proof),
        pytest.param("tp2-zero3", "tp4", marks=pytest.mark.proof),
        pytest.param("tp4", "looped", marks=pytest.mark.proof),
        pytest.param("looped", "offload", marks=pytest.mark.proof),
    ],
)
def test_any_layout_loads_what_any_other_saved(ranks, saved, before, after):
    directory, tensors = saved(before)
    results = ranks(LAYOUTS[after].world_size).run(load_run, directory, LAYOUTS[after])
    for step, extra, _ in results:
        assert step == 2 and extra == {"skipped": 2, "scaler": {"scale": 0.2}}
    assert_identical(merged([loaded for _, _, loaded in results]), tensors)


@pytest.mark.parametrize("name", FIRST)
def test_every_element_is_written_once_and_every_file_listed(saved, name):
    """Copies of replicated and of tied parameters are not written. The manifest notices damage to any rank's file."""
    path = saved(name)[0] / "step-2"
    for key, entry in saved_tensors(path, "").items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key
    assert "embed_tokens.weight" in saved_tensors(path, MODEL)
    listed = json.loads((path / "manifest.json").read_text())
    assert {*listed, "manifest.json"} == {each.name for each in path.iterdir()}
    note = json.loads((path / "trainer.json").read_text())
    assert note == {"step": 2, "extra": {"skipped": 2, "scaler": {"scale": 0.2}}}, "it can be read by eye"


class Odd(nn.Module):
    """It has fewer rows than ranks, a buffer, a scalar, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.linear.weight.requires_grad_(False)


def save_odd(directory, sharded):
    parts = [Odd(), nn.ReLU()]
    if sharded:
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
    results = ranks(4).run(save_odd, tmp_path, True)
    assert_identical(merged(results), results[0])
    assert results[0]["linear.bias"].abs().sum() > 0 and "linear.weight exp_avg" not in results[0]
    model = Odd()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    load_checkpoint(tmp_path / "step-7", [model], [optimizer])
    assert_identical(model.state_dict(), {k: v for k, v in results[0].items() if " " not in k})
    assert torch.equal(optimizer.state[model.norm.weight]["exp_avg"], results[0]["norm.weight exp_avg"])


def before_the_first_update(directory):
    """Save a run whose steps were all skipped, and load it into an optimizer that has stepped."""
    parts, optimizers = build(PLAIN, seed=1)
    checkpointer = Checkpointer(directory)
    checkpointer.save(3, parts, optimizers)
    update(parts, optimizers)
    checkpointer.load(3, parts, optimizers)
    return {key: value for key, value in everything(parts, optimizers).items() if " " in key}


def test_an_optimizer_that_never_stepped_stays_so(ranks, tmp_path):
    assert ranks(1).run(before_the_first_update, tmp_path) == [{}]


def load_other(path, config):
    """Return each pipeline rank's message when the model is not the checkpoint's."""
    ranges = split_stages(config.layer_costs("parameters"), 2)
    part = GPT(config, part=ranges[dist.get_rank()])
    try:
        load_checkpoint(path, [part], group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layers": 5}, ["has no", "model.layers.4.", "more"]),
        ({"n_layers": 3}, ["nothing here takes its", "layers.3."]),
        ({"hidden_size": 48}, ["(128, 24)", "(128, 48)"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(ranks, saved, change, words):
    path = saved("tp2-pp2")[0] / "step-2"
    messages = ranks(2).run(load_other, path, dataclasses.replace(CONFIG, **change))
    assert messages[0] == messages[1] and str(path) in messages[0]
    for word in words:
        assert word in messages[0]


def wrong_calls(directory):
    parts, optimizers = build(PLAIN, seed=1)
    checkpointer = Checkpointer(directory)
    messages = []
    for arguments in [(1, parts, []), (1, parts, optimizers, {"x": torch.ones(1)}), (1, [nn.ReLU()], optimizers)]:
        try:
            checkpointer.save(*arguments)
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages, directory.exists()


def test_wrong_calls_are_refused_before_anything_is_written(ranks, tmp_path):
    (messages, exists) = ranks(1).run(wrong_calls, tmp_path / "checkpoints")[0]
    assert not exists
    for message, word in zip(messages, ["0 optimizers for 1 model parts", "TypeError", "does not have"], strict=True):
        assert word in message

"""Checkpoints: what is loaded is what was saved, in any layout; what is damaged is named and passed over."""

import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor

from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig
from tpformer.training import checkpoint as checkpoint_module
from tpformer.training.checkpoint import Checkpointer, CheckpointError, newest_good, steps, verify, write_manifest
from tpformer.training.config import OptimizerSection
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import train_step

CONFIG = GPTConfig(vocab_size=100, seq_length=12, n_layers=2, hidden_size=48, n_heads=4, n_kv_heads=2)


def build(tp: int, seed: int):
    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"]
    model = GPT(CONFIG, tp_mesh=mesh, seed=seed)
    return model, build_optimizer(model, OptimizerSection(lr=1e-3)), mesh.get_group()


def train(model, optimizer, group, step):
    batch = torch.randint(100, (2, 13), generator=torch.Generator().manual_seed(step))
    options = {"microbatch_size": 2, "lr": 1e-3, "clip_norm": 1.0, "groups": [group]}
    return float(train_step(model, optimizer, batch, first_sample=2 * step, step=step, **options)[0])


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def everything(model, optimizer):
    """Every parameter and every optimizer state, unsharded, by name."""
    state = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"{name} {key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return state


def save_run(directory, tp):
    """Two steps, a save at each, and the state right after the second; training goes on while it is written."""
    model, optimizer, group = build(tp, seed=1)
    checkpointer = Checkpointer(directory)
    for step in (1, 2):
        train(model, optimizer, group, step)
        checkpointer.save(step, model, optimizer)
    saved = everything(model, optimizer)
    train(model, optimizer, group, 3)
    checkpointer.wait()
    return saved


def load_run(directory, tp):
    model, optimizer, group = build(tp, seed=2)
    checkpointer = Checkpointer(directory)
    step = checkpointer.newest()
    checkpointer.load(step, model, optimizer)
    return step, everything(model, optimizer), train(model, optimizer, group, 3)


def load_model_only(directory):
    model, _, _ = build(1, seed=2)
    Checkpointer(directory).load(2, model)
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize(("saved_tp", "loaded_tp"), [(2, 2), (2, 1), (1, 4), (4, 2)])
def test_any_layout_loads_what_any_other_saved(ranks, tmp_path, saved_tp, loaded_tp):
    saved = ranks(saved_tp).run(save_run, tmp_path, saved_tp)[0]
    for step, loaded, _ in ranks(loaded_tp).run(load_run, tmp_path, loaded_tp):
        assert step == 2
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name


def test_the_model_alone_can_be_loaded(ranks, tmp_path):
    saved = ranks(2).run(save_run, tmp_path, 2)[0]
    loaded = ranks(1).run(load_model_only, tmp_path)[0]
    for name, value in loaded.items():
        assert torch.equal(value, saved[name]), name


def make_checkpoint(directory, step):
    path = directory / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 8)
    (path / ".metadata").write_bytes(b"metadata")
    write_manifest(path)
    return path


def damage_truncate(path):
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def damage_flip_a_bit(path):
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[1000] ^= 4
    file.write_bytes(content)


def damage_remove_a_file(path):
    (path / ".metadata").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_truncate, ["__0_0.distcp", "2047 bytes", "2048"]),
        (damage_flip_a_bit, ["__0_0.distcp", "corrupted", "SHA-256"]),
        (damage_remove_a_file, [".metadata", "missing"]),
        (damage_manifest, ["manifest.json", "cannot be read"]),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, words):
    make_checkpoint(tmp_path, 9)
    newest = make_checkpoint(tmp_path, 10)
    verify(newest)
    assert newest_good(tmp_path, print) == 10
    damage(newest)
    with pytest.raises(CheckpointError) as error:
        verify(newest)
    reports: list[str] = []
    assert newest_good(tmp_path, reports.append) == 9
    for word in (*words, "step-10"):
        assert word in str(error.value) and word in reports[0]
    assert steps(tmp_path) == [9, 10], "a bad checkpoint is evidence: it is left where it is"


def interrupted_save(directory):
    model, optimizer, group = build(1, seed=1)
    checkpointer = Checkpointer(directory, keep=1)
    train(model, optimizer, group, 1)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    original = checkpoint_module.write_manifest
    try:
        checkpoint_module.write_manifest = lambda path: (_ for _ in ()).throw(OSError("disk full"))
        checkpointer.save(2, model, optimizer)
        try:
            checkpointer.wait()
        except OSError as error:
            message = str(error)
    finally:
        checkpoint_module.write_manifest = original
    left = steps(directory)
    verify(directory / "step-1")
    checkpointer.save(3, model, optimizer)
    checkpointer.wait()
    return message, left, steps(directory), sorted(path.name for path in directory.iterdir())


def test_an_interrupted_save_leaves_the_previous_one_and_is_reported(ranks, tmp_path):
    message, during, after, names = ranks(1).run(interrupted_save, tmp_path)[0]
    assert message == "disk full" and during == [1]
    assert after == [3], "keep=1 drops the older one once the newer is whole"
    assert names == ["step-3"], "what the interrupted save left behind is gone"


def test_no_checkpoint_is_no_error(tmp_path):
    assert newest_good(tmp_path / "nothing", print) is None
    make_checkpoint(tmp_path, 3)
    shutil.copytree(tmp_path / "step-3", tmp_path / ".saving-4")
    assert steps(tmp_path) == [3]

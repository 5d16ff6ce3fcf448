"""With data.mask the loss is the mean over the targets of the global batch, in every layout: a plain cross entropy says
so, in float64; and a model learns the completions alone."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_step import BATCH, TP2_PP2, ZBV, ZERO3, setup
from testing import assert_same

from tpformer.config import build_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.training.data import build_dataset
from tpformer.training.resolve import resolve
from tpformer.training.run_directory import check_run_directory, read_start, write_run
from tpformer.training.setup import open_data
from tpformer.training.step import batch, evaluate
from tpformer.training.trainer import Trainer

INTERLEAVED = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B", "data_parallel_replicate": 2}
LAYOUTS = {"tp2-pp2": TP2_PP2, "zero3": ZERO3, "zbv-dp2": ZBV, "interleaved-dp2": INTERLEAVED}


class Windows:
    """Samples with another number of targets each, the first with none. A token that is none is stored as -1 - id."""

    n_samples = 7

    def sample(self, i: int) -> np.ndarray:
        generator = np.random.default_rng(i)
        ids = generator.integers(0, 60, 13)
        return np.where(generator.random(13) < i / 8, ids, -1 - ids)


def results(parallel: dict) -> tuple[float, dict, list[float], bool]:
    """Loss and gradients of a batch, the validation losses, and whether a batch without targets has loss and gradients
    0 and validation leaves the model in training mode. Training has dropout, and validation none."""
    model, _ = setup(parallel, "float64")
    first, share = model.own_samples(0, BATCH)
    rows = batch(Windows(), first, share)
    loss = float(model.gradients(rows, first_sample=first, step=1))
    named = [pair for part in model.parts for pair in part.named_parameters()]
    gradients = {name: full_tensor(parameter.grad).clone() for name, parameter in named}
    for _, parameter in named:
        parameter.grad = None
    nothing = float(model.gradients(torch.minimum(rows, ~rows), first_sample=first, step=1)) == 0
    nothing &= not any(full_tensor(parameter.grad).any() for _, parameter in named)
    model, _ = setup(parallel, "float64", dropout=0.5)
    valid = [evaluate(model, [Windows(), Windows()], number, torch.device("cpu")) for number in (5, 100)]
    return loss, gradients, valid, nothing and all(part.training for part in model.parts)


def oracle() -> tuple[float, dict, list[float]]:
    """The same of torch's cross entropy of the logits of one process."""
    (model,), _ = setup({}, "float64")[0].parts, None
    rows = batch(Windows(), 0, 7)
    ids = torch.where(rows < 0, -1 - rows, rows)
    targets = torch.where(rows < 0, -7, rows)[:, 1:]
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), targets, ignore_index=-7, reduction="none")
    counts = (targets >= 0).sum(1)
    loss = losses[:BATCH].sum() / counts[:BATCH].sum()
    loss.backward()
    gradients = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    return float(loss), gradients, [float(losses[:n].sum() / counts[:n].sum()) for n in (5, 7)]


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(1).run(oracle)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_mean_over_the_targets_of_the_global_batch(ranks, expected, layout):
    loss, gradients, valid = expected
    world = build_config({"parallel": LAYOUTS[layout]}).parallel.world_size
    for own_loss, own, own_valid, nothing in ranks(world).run(results, LAYOUTS[layout]):
        assert_same([own_loss, *own_valid], [loss, *valid])
        assert_same(own, {name: gradients[name] for name in own})
        assert nothing, "loss or gradients of a batch without targets, or no dropout after a validation"


@pytest.fixture
def values(tmp_path, tiny_values) -> dict:
    """A run on 16 prompts of random letters, each with a completion of its own."""
    letters = np.random.default_rng(0).integers(97, 123, (16, 12))
    pairs = [
        {"prompt": bytes(row[:9]).decode(), "completion": f"={chr(row[0])}{chr(row[1])}"}
        for row in letters.astype("u1")
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 20))
    build_dataset([tmp_path / "pairs.jsonl"], tmp_path / "pairs", "bytes", fields=("prompt", "completion"), quiet=True)
    data = {"train": [str(tmp_path / "pairs")], "valid": [str(tmp_path / "pairs")], "mask": True}
    return {**tiny_values, "data": data, "optimizer": {"lr": 1e-2, "warmup_steps": 5}}


def tuned(values: dict) -> tuple[float, float]:
    """Mean validation losses after training: over the completions, and over all tokens."""
    train = {"steps": 100, "global_batch_size": 16, "validation_samples": 32}
    trainer = Trainer(build_config(values, {"train": train, "checkpoint": {"interval": 0}, "log": {"interval": 100}}))
    trainer.run()
    everything = open_data(resolve(build_config(values, {"data": {"mask": False}}))).valid
    return trainer.validate(), evaluate(trainer.model, everything, 32, trainer.device)


def test_completions_are_learned_and_prompts_are_not(ranks, values):
    completions, everything = ranks(1).run(tuned, values)[0]
    assert completions < 0.5 and everything > math.log(26)


def test_a_mask_that_is_missing_or_changed_is_refused(values, tmp_path, tiny_data):
    with pytest.raises(ValueError, match=f"data.mask = true, but {tiny_data} has no .mask file: make one with"):
        open_data(resolve(build_config(values, {"data": {"train": [str(tiny_data)]}})))
    pairs = str(tmp_path / "pairs")
    blend = resolve(build_config(values, {"data": {"train": [pairs, str(tiny_data)], "weights": [1, 9]}}))
    counts = [int((open_data(blend).train.sample(i)[1:] >= 0).sum()) for i in range(200)]
    assert 140 < counts.count(16) < 200, "of data without a mask every token is a target"
    with pytest.raises(ValueError, match="no target in the first 1 samples"):
        train = {"validation_samples": 1}
        open_data(resolve(build_config(values, {"train": train, "model": {**values["model"], "seq_length": 5}})))
    (tmp_path / "run").mkdir()
    start = read_start(resolve(build_config(values)), "float32")
    write_run(start)
    resumed = build_config(values, {"run": {"resume": True}})
    assert check_run_directory(read_start(resolve(resumed), "float32")) == []
    with pytest.raises(ValueError, match="data.mask: True -> False.* --run.changes data.mask$"):
        check_run_directory(
            read_start(resolve(build_config(values, {"data": {"mask": False}, "run": {"resume": True}})), "float32")
        )
    mask = bytearray((tmp_path / "pairs.mask").read_bytes())
    mask[:9] = b"\1" * 9
    (tmp_path / "pairs.mask").write_bytes(mask)
    with pytest.raises(
        ValueError, match=r"mask SHA-256 \w{12} -> .*mask SHA-256 \w{12}; .* --run.changes data.train_contents"
    ):
        check_run_directory(read_start(resolve(resumed), "float32"))

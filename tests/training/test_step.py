"""A step that is not finite updates nothing on any rank; float16 scales its loss; low precision trains like float32."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pool import RankFailure

from tpformer.config import build_config
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.setup import build_model, run_mesh
from tpformer.training.step import LossScaler, batch, evaluate, train_step, why_skipped
from tpformer.training.trainer import Trainer

MODEL = {"vocab_size": 60, "seq_length": 12, "n_layers": 4, "hidden_size": 32, "n_heads": 2}
BATCH = 4
TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2}
ZERO3 = {"data_parallel_shard": 2, "zero_stage": 3}
ZBV = {"pipeline_parallel": 2, "pipeline_schedule": "ZBVZeroBubble", "data_parallel_shard": 2}


def setup(parallel: dict, dtype: str, dropout: float = 0.0):
    values = {"model": {**MODEL, "dropout": dropout}, "parallel": parallel, "data": {"train": ["none"]}}
    config = build_config(values, {"train": {"global_batch_size": BATCH, "dtype": dtype}})
    model = build_model(config, run_mesh(config, "cpu"))
    return model, [build_optimizer(part, config.optimizer) for part in model.parts]


def run(model: ModelParts, optimizers, step: int, scaler: LossScaler | None = None):
    batch = torch.randint(60, (BATCH, 13), generator=torch.Generator().manual_seed(step % 2))
    share = BATCH // model.layout.data_parallel
    first = model.data_rank * share
    options = {"first_sample": first, "step": step, "lr": 3e-3, "clip_norm": 1.0, "scaler": scaler}
    rows = batch[first : first + share]
    result = train_step(model, optimizers, rows, **options)
    skipped = bool(result.skipped)
    return float(result.loss), float(result.norm), skipped, why_skipped(model, rows, result) if skipped else None


def local_values(model: ModelParts) -> list[torch.Tensor]:
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def poisoned_step(parallel: dict, poison: float):
    """The third of four steps has a gradient that is not finite: in one parameter, on the last rank."""
    model, optimizers = setup(parallel, "float32")
    compute, results, kept = model.gradients, [], []
    for step in range(1, 5):

        def gradients(*args, **kwargs):
            loss = compute(*args, **kwargs)
            for part in model.parts:
                for name, parameter in part.named_parameters():
                    if name == "layers.3.mlp.fc1.weight" and torch.distributed.get_rank() == 3:
                        parameter.grad.to_local()[0, 0] = poison
            return loss

        model.gradients = gradients if step == 3 else compute
        before = local_values(model)
        results.append(run(model, optimizers, step))
        kept.append(all(torch.equal(a, b) for a, b in zip(before, local_values(model), strict=True)))
    counts = {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()}
    return results, kept, counts


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_all_ranks_skip_a_step_that_is_not_finite(ranks, poison):
    for results, kept, counts in ranks(4).run(poisoned_step, TP2_PP2, poison):
        assert [skipped for _, _, skipped, _ in results] == [False, False, True, False]
        assert kept == [False, False, True, False] and counts == {3.0}
        assert results[2][3] == "layers.3.mlp.fc1.weight" and not math.isfinite(results[2][1])
        assert math.isfinite(results[3][0]) and results[3][3] is None


def test_a_batch_that_a_gpu_takes_without_a_word_ends_the_step(ranks):
    """On a GPU a target outside the vocabulary makes the loss NaN; a CPU refuses it."""
    words = r"ValueError: token ids of this batch span \[0, 60\], outside the vocabulary \[0, 59\]"
    with pytest.raises(RankFailure, match=words):
        ranks(1).run(strange_batch)


def strange_batch() -> None:
    model, optimizers = setup({}, "float32")
    model.gradients = lambda *args, **kwargs: torch.tensor(math.nan)
    batch = torch.zeros(BATCH, 13, dtype=torch.int64)
    batch[0, 5] = 60
    result = train_step(model, optimizers, batch, first_sample=0, step=1, lr=0.1, clip_norm=1.0)
    why_skipped(model, batch, result)


def train(parallel: dict, dtype: str, steps: int, scale: float | None = None):
    model, optimizers = setup(parallel, dtype)
    scaler = LossScaler(scale, interval=3) if scale else None
    computed: set[torch.dtype] = set()
    for layer in (layer for part in model.parts for layer in part.layers.values()):
        layer.register_forward_hook(lambda module, args, y: computed.add(y.dtype))
    results = [run(model, optimizers, step, scaler) for step in range(1, steps + 1)]
    kept = {parameter.dtype for parameter in model.parameters()}
    kept |= {state["exp_avg"].dtype for optimizer in optimizers for state in optimizer.state.values()}
    losses, _, skipped, _ = zip(*results, strict=True)
    return losses, [*skipped], None if scaler is None else float(scaler.scale), computed, kept


@pytest.fixture(scope="module")
def float32_losses(ranks):
    return ranks(1).run(train, {}, "float32", 8)[0][0]


@pytest.mark.parametrize("parallel", [{}, ZERO3, TP2_PP2, ZBV], ids=["one", "zero3", "tp2-pp2", "zbv"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_trains_as_float32_does(ranks, float32_losses, parallel, dtype):
    size = math.prod(value for key, value in parallel.items() if key.endswith(("_parallel", "_shard")))
    scale = 2.0**8 if dtype == "float16" else None
    for losses, skipped, last_scale, computed, kept in ranks(size).run(train, parallel, dtype, 8, scale):
        assert computed == {getattr(torch, dtype)} and kept == {torch.float32}
        assert not any(skipped) and last_scale == (2.0**10 if scale else None), "doubled after 3 and 6 good steps"
        torch.testing.assert_close(losses, float32_losses, rtol=0.02, atol=0)
        assert losses != float32_losses, "it must not have run in float32"
        assert losses[-1] < 0.9 * losses[0]


def first_scale(values: dict) -> float:
    train = {"dtype": "float16", "global_batch_size": 6, "microbatch_size": 2, "steps": 1}
    trainer = Trainer(build_config(values, {"train": train}))
    scale = float(trainer.scaler.scale)
    trainer.run()
    return scale


def test_the_first_scale_grows_with_the_microbatches(ranks, tiny_values):
    """For one microbatch it is 2**16; for three, four times as much: the next power of two."""
    assert ranks(1).run(first_scale, tiny_values) == [2.0**18]


def test_an_overflow_halves_the_scale_on_all_ranks_alike(ranks):
    records = ranks(2).run(train, ZERO3, "float16", 20, 2.0**26)
    losses, skipped, scale, *_ = records[0]
    overflows = skipped.index(False)
    assert overflows > 0 and scale <= 2.0 ** (26 - overflows + 3)
    assert all(record[1:3] == (skipped, scale) for record in records)
    assert math.isfinite(losses[-1])


def test_the_scaler_survives_a_checkpoint_and_has_a_floor():
    scaler, good, bad = LossScaler(4.0, interval=2), torch.tensor(0.0), torch.tensor(1.0)
    for _ in range(3):
        scaler.update(good)
    other = LossScaler()
    other.interval = 2
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.scale == 8.0
    other.update(good)
    assert other.scale == 16.0, "two good steps in a row, one of them before"
    for _ in range(20):
        other.update(bad)
    assert other.scale == 1.0


class Windows:
    """Seven random samples, which no layout divides evenly."""

    n_samples = 7

    def sample(self, i: int) -> np.ndarray:
        return np.random.default_rng(i).integers(0, 60, 13)


def validation(parallel: dict):
    """Return the mean losses of the first samples and of all, the modes of the parts afterwards, and in one process the
    expected losses, made of its logits."""
    model, _ = setup(parallel, "float64", dropout=0.5)
    losses = [evaluate(model, [Windows(), Windows()], n_samples, torch.device("cpu")) for n_samples in (5, 100)]
    modes = {part.training for part in model.parts}
    if parallel:
        return losses, modes, None
    rows = batch(Windows(), 0, 7)
    logits = model.parts[0].eval()(rows[:, :-1])
    per_sample = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)
    return losses, modes, [float(per_sample[:5].mean()), float(per_sample.mean())]


@pytest.mark.parametrize("parallel", [TP2_PP2, ZERO3, ZBV], ids=["tp2-pp2", "zero3", "zbv-dp2"])
def test_validation_is_the_mean_without_dropout_in_any_layout(ranks, parallel):
    ((alone, _, expected),) = ranks(1).run(validation, {})
    assert alone == pytest.approx(expected, rel=1e-12)
    for losses, modes, _ in ranks(build_config({"parallel": parallel}).parallel.world_size).run(validation, parallel):
        assert losses == pytest.approx(expected, rel=1e-12) and modes == {True}, "and training goes on with dropout"

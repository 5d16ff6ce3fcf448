"""A step that is not finite updates nothing on any rank; float16 scales its loss; low precision trains like float64.
With data.mask the loss is the mean over the targets of the global batch, in every layout, as a plain cross entropy
says in float64; so is the norm of its gradients."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import LAYOUTS, build, built, merged, run_config, taken_gradients, world_size
from testing import assert_kernel_close, assert_same, on_every_rank
from turns import in_turns

from tpformer.config import RunConfig, build_config
from tpformer.distributed.dtensor import full_tensor
from tpformer.models import GPT
from tpformer.parallel import local_part
from tpformer.training.model import ModelParts
from tpformer.training.optimizer import build_optimizer
from tpformer.training.step import LossScaler, batch, evaluate, train_step, why_skipped
from tpformer.training.trainer import Trainer

MODEL = {"vocab_size": 60, "seq_length": 12, "n_layers": 4, "hidden_size": 32, "n_heads": 2}
BATCH, GOOD = 4, 6  # steps, after which a loss scale has been doubled twice
POISON = {2: math.nan, 4: math.inf}  # by step
TP2_PP2, ZBV, ZERO3 = LAYOUTS["tp2-pp2"], LAYOUTS["v-schedule"], {"data_parallel_shard": 2, "zero_stage": 3}
INTERLEAVED = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"}


def config_of(parallel: dict, dtype: str, dropout: float = 0.0) -> RunConfig:
    return run_config(parallel, {**MODEL, "dropout": dropout}, dtype=dtype, global_batch_size=BATCH)


def samples(step: int) -> torch.Tensor:
    return torch.randint(60, (BATCH, 13), generator=torch.Generator().manual_seed(step % 2))


def run(model: ModelParts, optimizers, step: int, scaler: LossScaler | None = None):
    first, share = model.own_samples(0, BATCH)
    options = {"first_sample": first, "lr": 3e-3, "clip_norm": 1.0, "scaler": scaler}
    rows = samples(step)[first : first + share]
    result = train_step(model, optimizers, rows, **options)
    why = why_skipped(model, rows, result) if result.skipped else None
    return float(result.loss), float(result.norm), bool(result.skipped), why


@on_every_rank(4)
def test_all_ranks_skip_a_step_that_is_not_finite() -> None:
    """Two of five steps have a gradient that is not finite: in one parameter, on the last rank."""
    model, optimizers = build(config_of(TP2_PP2, "float32"))
    compute, results, kept = model.gradients, [], []

    def gradients(*args, **options):
        loss = compute(*args, **options)
        for name, parameter in (pair for part in model.parts for pair in part.named_parameters()):
            if step in POISON and name == "layers.3.mlp.fc1.weight" and torch.distributed.get_rank() == 3:
                parameter.grad.to_local()[0, 0] = POISON[step]
        return loss

    model.gradients = gradients
    for step in range(1, 6):
        before = [parameter.to_local().detach().clone() for parameter in model.parameters()]
        results.append(run(model, optimizers, step))
        kept.append(all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True)))
    assert kept == [skipped for _, _, skipped, _ in results] == [step in POISON for step in range(1, 6)]
    assert {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()} == {3.0}
    for loss, norm, skipped, name in results:
        assert name == ("layers.3.mlp.fc1.weight" if skipped else None)
        assert math.isfinite(loss) and math.isfinite(norm) != skipped


@on_every_rank(1)
def test_a_batch_that_a_gpu_takes_without_a_word_ends_the_step() -> None:
    """On a GPU a target outside the vocabulary makes the loss NaN; a CPU refuses it."""
    model, optimizers = build(config_of({}, "float32"))
    model.gradients = lambda *args, **kwargs: torch.tensor(math.nan)
    batch = torch.zeros(BATCH, 13, dtype=torch.int64)
    batch[0, 5] = 60
    result = train_step(model, optimizers, batch, first_sample=0, lr=0.1, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"token ids of this batch span \[0, 60\], outside the vocabulary \[0, 59\]"):
        why_skipped(model, batch, result)


def train(parallel: dict, dtype: str, steps: int, scale: float | None = None):
    model, optimizers = build(config_of(parallel, dtype))
    scaler = LossScaler(scale, interval=3) if scale else None
    computed: set[torch.dtype] = set()
    for layer in (layer for part in model.parts for layer in part.layers.values()):
        layer.register_forward_hook(lambda module, args, y: computed.add(y.dtype))
    losses, _, skipped, _ = zip(*(run(model, optimizers, step, scaler) for step in range(1, steps + 1)), strict=True)
    kept = {parameter.dtype for parameter in model.parameters()}
    kept |= {state["exp_avg"].dtype for optimizer in optimizers for state in optimizer.state.values()}
    return losses, [*skipped], None if scaler is None else float(scaler.scale), computed, kept


def plain(dtype: str, steps: int) -> list[float]:
    """Losses of plain torch: a model in dtype has the rounded parameters of one in float32, moved by its gradients."""
    config = config_of({}, "float32")
    dtypes = (torch.float32, getattr(torch, dtype))
    whole, low = (GPT(config.model.architecture, seed=config.train.seed, dtype=each) for each in dtypes)
    optimizer, losses, scale = build_optimizer(whole, config.optimizer), [], 2.0**8
    for step in range(1, steps + 1):
        low.load_state_dict(whole.state_dict())
        low.zero_grad()
        loss = low(samples(step)[:, :-1], targets=samples(step)[:, 1:], reduction="mean")
        (scale * loss).backward()
        for parameter, rounded in zip(whole.parameters(), low.parameters(), strict=True):
            parameter.grad = rounded.grad.float() / scale
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.update(3e-3, torch.tensor(0.0))
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def oracle(ranks):
    return torch.tensor(ranks(1).run(train, {}, "float64", GOOD)[0][0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "parallel"),
    [("bfloat16", ZERO3), *in_turns([("bfloat16", TP2_PP2), ("float16", ZBV), ("float16", ZERO3)], first=0)],
)
def test_low_precision_trains_as_float64_does(ranks, oracle, parallel, dtype):
    scale = 2.0**8 if dtype == "float16" else None
    baseline = torch.tensor(plain(dtype, GOOD), dtype=getattr(torch, dtype))
    found = ranks(world_size(parallel)).run(train, parallel, dtype, GOOD, scale)
    for losses, skipped, last_scale, computed, kept in found:
        assert computed == {getattr(torch, dtype)} and kept == {torch.float32}
        assert not any(skipped) and last_scale == (2.0**10 if scale else None), "doubled after 3 and 6 good steps"
        assert_kernel_close(torch.tensor(losses, dtype=baseline.dtype), oracle, baseline, "losses")
        assert losses[-1] < losses[0]


@on_every_rank(1)
def test_the_first_scale_grows_with_the_microbatches(tiny_values):
    """For one microbatch it is 2**16; for three, four times as much: the next power of two."""
    train = {"dtype": "float16", "global_batch_size": 6, "microbatch_size": 2, "steps": 1}
    assert float(Trainer(build_config(tiny_values, {"train": train})).scaler.scale) == 2.0**18


def test_an_overflow_halves_the_scale_on_all_ranks_alike(ranks):
    records = ranks(2).run(train, ZERO3, "float16", 12, 2.0**24)
    losses, skipped, scale, *_ = records[0]
    overflows = skipped.index(False)
    assert overflows > 0 and scale <= 2.0 ** (24 - overflows + 4)
    assert all(record[1:3] == (skipped, scale) for record in records)
    assert math.isfinite(losses[-1])


def test_the_scaler_survives_a_checkpoint_and_has_a_floor():
    scaler, other, good, bad = LossScaler(4.0, interval=2), LossScaler(), torch.tensor(0.0), torch.tensor(1.0)
    for _ in range(3):
        scaler.update(good)
    other.interval = 2
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.scale == 8.0
    other.update(good)
    assert other.scale == 16.0, "two good steps in a row, one of them before"
    for _ in range(20):
        other.update(bad)
    assert other.scale == 1.0


class Windows:
    """Samples with another number of targets each, the first with none. A token that is none is stored as -1 - id."""

    n_samples = 7

    def sample(self, i: int) -> np.ndarray:
        generator = np.random.default_rng(i)
        ids = generator.integers(0, 60, 13)
        return np.where(generator.random(13) < i / 8, ids, -1 - ids)


def results(parallel: dict) -> tuple[list[float], dict, bool]:
    """Loss and norm of a batch, and the validation losses; its gradients; and whether a batch without targets has loss
    and gradients 0 and validation leaves the model in training mode. Training has dropout, and validation none."""
    model = built(config_of(parallel, "float64"))
    first, share = model.own_samples(0, BATCH)
    rows = batch(Windows(), first, share)
    numbers = [float(model.gradients(rows, first_sample=first)), float(model.gradient_norm())]
    assert len({p.device_mesh for p in model.parameters()}) == 1, "norms and biases are on the mesh of all others"
    gradients = taken_gradients(model)
    nothing = float(model.gradients(torch.minimum(rows, ~rows), first_sample=first)) == 0
    nothing &= not any(local_part(parameter.grad).any() for parameter in model.parameters())
    model = built(config_of(parallel, "float64", dropout=0.5))
    numbers += [evaluate(model, [Windows(), Windows()], number, torch.device("cpu")) for number in (5, 100)]
    return numbers, gradients, nothing and all(part.training for part in model.parts)


def of_torch() -> tuple[list[float], dict]:
    """The same of torch's cross entropy of the logits of one process."""
    (model,) = built(config_of({}, "float64")).parts
    rows = batch(Windows(), 0, 7)
    ids = torch.where(rows < 0, -1 - rows, rows)
    targets = torch.where(rows < 0, -7, rows)[:, 1:]
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), targets, ignore_index=-7, reduction="none")
    counts = (targets >= 0).sum(1)
    loss = losses[:BATCH].sum() / counts[:BATCH].sum()
    loss.backward()
    gradients = {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}
    norm = sum(float(gradient.square().sum()) for gradient in gradients.values()) ** 0.5
    return [float(loss), norm, *(float(losses[:n].sum() / counts[:n].sum()) for n in (5, 7))], gradients


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(1).run(of_torch)[0]


CHOSEN = [ZBV, LAYOUTS["tp2-zero3"]]
OTHERS = [
    ZERO3, {**LAYOUTS["tp2-zero3"], "zero_stage": 1}, {"pipeline_parallel": 2, **ZERO3, "zero_stage": 2},
    {**INTERLEAVED, **ZERO3, "zero_stage": 2}, {**INTERLEAVED, **ZERO3}, {**INTERLEAVED, "data_parallel_replicate": 2},
    TP2_PP2,
]  # fmt: skip


@pytest.mark.parametrize("parallel", [*CHOSEN, *in_turns(OTHERS)], ids=str)
def test_every_layout_has_the_mean_over_the_targets_of_the_global_batch(ranks, expected, parallel):
    """Fails if gradients of norms and biases are not added over tp ranks, or counted twice in the norm, by which all
    are clipped; if ZeRO on a second axis gives other gradients; or if ranks disagree."""
    numbers, gradients = expected
    found = ranks(world_size(parallel)).run(results, parallel)
    for own, _, nothing in found:
        assert_same(own, numbers)
        assert nothing, "loss or gradients of a batch without targets, or no dropout after a validation"
    assert_same(merged([own for _, own, _ in found]), gradients)

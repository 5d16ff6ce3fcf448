"""Weight decay follows its groups, and local updates are torch's. Learning rate and batch size are their formulas at
every step, and a warm-up that does not fit is not silent."""

import itertools
import math
from functools import partial

import pytest
import torch
from testing import assert_identical, assert_same, on_every_rank
from torch.distributed.tensor import DTensor

from tpformer.config import OptimizerSection, TrainSection, batch_sizes
from tpformer.distributed import build_mesh
from tpformer.models import GPT, GPTConfig
from tpformer.parallel import reduce_partial_gradients
from tpformer.training.checkpoint import Checkpointer, CheckpointError
from tpformer.training.optimizer import build_optimizer
from tpformer.training.schedules import batch_size, learning_rate, samples_before, warmup_notice
from tpformer.training.updates import LocalAdamW, LocalSGD

NESTEROV = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_matrices_decay_and_vectors_do_not(name, kind):
    model = GPT(GPTConfig(vocab_size=50, seq_length=8, n_layers=1, hidden_size=16, n_heads=2))
    optimizer = build_optimizer(model, OptimizerSection(name=name, weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name or name.endswith("bias") else 0.3), name
    assert isinstance(optimizer, kind)


def steps_of(kind):
    """Make three updates of DTensor parameters on two ranks; return this rank's part of parameters and states."""
    mesh = build_mesh("cpu", tensor_parallel=2)["tp"]
    config = GPTConfig(vocab_size=50, seq_length=8, n_layers=1, hidden_size=16, n_heads=2)
    model = GPT(config, tp=mesh, dtype=torch.float64)
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    ids = torch.arange(8).view(1, 8)
    for _ in range(3):
        model(ids, targets=ids.flip(1)).backward()
        reduce_partial_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert all(isinstance(each, DTensor) for each in (*model.parameters(), *states))
    return [each.to_local().detach().clone() for each in (*model.parameters(), *states)]


LOCAL = [  # (the optimizer here, torch's, moments); torch has no fused SGD for DTensors
    (partial(LocalAdamW, fused=True), partial(torch.optim.AdamW, fused=True), 2),
    (partial(LocalSGD, fused=True, **NESTEROV), partial(torch.optim.SGD, **NESTEROV), 1),
    (partial(LocalSGD, fused=True), torch.optim.SGD, 0),
]


@pytest.mark.parametrize(("kind", "theirs", "moments"), LOCAL, ids=["adamw", "nesterov", "sgd"])
@on_every_rank(2)
def test_local_updates_are_those_of_torch(kind, theirs, moments):
    mine, torchs = steps_of(kind), steps_of(theirs)
    assert len(mine) == len(torchs) > 10 and len(mine) % (1 + moments) == 0
    (assert_identical if moments == 2 else assert_same)(mine, torchs)


@pytest.mark.parametrize(("kind", "theirs", "moments"), LOCAL, ids=["adamw", "nesterov", "sgd"])
def test_gradient_scalers_and_closures_are_torchs(kind, theirs, moments):
    found = []
    for each in (kind, theirs):
        torch.manual_seed(0)
        model, scaler = torch.nn.Linear(5, 3).double(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = each(model.parameters(), lr=0.1)
        for factor in (1.0, math.inf, 2.0):
            scaler.scale(factor * model(torch.ones(2, 5).double()).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9
        loss = optimizer.step(lambda model=model: model(torch.ones(2, 5).double()).sum().backward() or 3.0)
        found.append([*model.parameters(), torch.tensor(loss).double()])
    assert_same(*found)
    with pytest.raises(ValueError, match="has no maximize: leave it out"):
        kind(model.parameters(), maximize=True).step()


@pytest.mark.parametrize("options", [{"name": "adamw"}, {"name": "sgd", **NESTEROV}, {"name": "sgd"}])
def test_a_skipped_first_step_leaves_nothing(options):
    """torch's fused SGD would keep memory that nobody has written as momentum."""
    ends = []
    for skips in (0, 3):
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 30)
        optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.1, **options))
        for skipped in [1.0] * skips + [0.0] * 4:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, math.nan if skipped else 1.0)
            optimizer.update(0.1, torch.tensor(skipped))
        ends.append(list(model.parameters()))
    assert_identical(*ends)


@on_every_rank(1)
def test_the_state_of_another_optimizer_is_refused(tmp_path):
    model, checkpointer = torch.nn.Linear(4, 3), Checkpointer(tmp_path)
    adamw, sgd = OptimizerSection(), OptimizerSection(name="sgd", momentum=0.9)
    for step, section, other, words in (
        (0, adamw, sgd, "holds exp_avg, exp_avg_sq, step of weight, which another optimizer has kept: go on with that"),
        (1, sgd, adamw, "holds momentum_buffer of weight"),
    ):
        optimizer = build_optimizer(model, section)
        model(torch.ones(4)).sum().backward()
        optimizer.update(0.1, torch.tensor(0.0))
        checkpointer.save(step, [model], [optimizer])
        checkpointer.load(step, [model], [build_optimizer(model, section)])
        with pytest.raises(CheckpointError, match=words):
            checkpointer.load(step, [model], [build_optimizer(model, other)])


LR, FLOOR, WARM, STEPS = 2.0, 0.1, 10, 110
FORMULAS = {  # of x, the share of the steps after the warm-up, and of the step itself
    "constant": lambda x, step: LR,
    "linear": lambda x, step: LR * (1 - x * (1 - FLOOR)),
    "cosine": lambda x, step: LR * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * x)) / 2),
    "wsd": lambda x, step: LR if step <= 77 else LR * (1 - (step - 77) / 33 * (1 - FLOOR)),
}


def rates(steps, lr=1.0, **options):
    return [learning_rate(step, steps, OptimizerSection(lr=lr, **options)) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", FORMULAS)
def test_each_step_is_the_formula(schedule):
    found = rates(STEPS, LR, warmup_steps=WARM, min_lr_ratio=FLOOR, schedule=schedule, decay_fraction=0.3)
    expected = [LR * step / WARM for step in range(1, WARM + 1)]
    expected += [FORMULAS[schedule]((step - WARM) / (STEPS - WARM), step) for step in range(WARM + 1, STEPS + 1)]
    assert_same(found, expected)
    assert found[WARM - 1] == LR
    assert_same(found[-1], LR if schedule == "constant" else LR * FLOOR)


def test_edges_of_the_schedules_and_a_warm_up_that_does_not_fit_is_named():
    """N8: 100 steps of warm-up were the default of a run of 50, too."""
    assert rates(3, warmup_steps=0, schedule="wsd", decay_fraction=0.0) == [1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=2, schedule="wsd", decay_fraction=1.0, min_lr_ratio=0.0) == [0.5, 1.0, 0.5, 0.0]
    assert rates(5, warmup_steps=10)[-1] == 0.5
    for steps in (1, 2, 3):  # a fifth of which is less than one
        assert rates(steps, schedule="wsd") == [1.0] * (steps - 1) + [0.1]
    assert rates(50)[0] == 0.2 and rates(50)[4] == 1.0 and warmup_notice(50, OptimizerSection()) is None
    assert rates(5000)[99] == 1.0 > rates(5000)[98]
    notice = warmup_notice(5, OptimizerSection(lr=1.0, warmup_steps=50))
    assert notice is not None and "warmup_steps=50 is more than train.steps=5" in notice and "ends at 0.1" in notice


@pytest.mark.parametrize("start, full, steps", [(4, 12, 4), (2, 14, 9), (3, 30, 4), (8, 8, 5), (None, 8, 5), (1, 7, 1)])
def test_sizes_grow_at_equal_distances_and_no_sample_is_left_out(start, full, steps):
    train = TrainSection(global_batch_size=full, batch_size_start=start, batch_size_ramp_steps=steps)
    sizes = [batch_size(step, train) for step in range(1, steps + 4)]
    first, growths = start or full, full // (start or full) - 1
    assert sizes == [first * (1 + min(growths, k * growths // steps)) for k in range(steps + 3)]
    assert [samples_before(step, train) for step in range(1, steps + 5)] == [0, *itertools.accumulate(sizes)]
    assert sizes[0] == first and set(sizes[steps:]) == {full} and set(sizes) <= set(batch_sizes(train))

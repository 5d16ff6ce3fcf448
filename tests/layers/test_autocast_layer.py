"""Under torch.autocast a model is as exact as the same model of torch.nn modules, by a float64 oracle. The loss and
every gradient are float32, though GEMMs run in 16 bits; also when layers are recomputed, weight gradients queued, or
sequences sharded."""

from contextlib import nullcontext
from functools import cache

import pytest
import theirs
import torch
import torch.nn.functional as F
from habits import BATCH, CONFIG, LLAMA, SEQ, VOCAB, fill
from kept import kept
from steps import Results, draw, each_case, gradients, with_keys_in_one
from test_habits_of_children import ours
from testing import assert_identical
from torch import nn
from turns import in_turns

from tpformer import ops
from tpformer.layers import LayerNorm, RMSNorm, TensorParallel
from tpformer.models import GPT

# every two values of (llama, dtype, recompute, whether weight gradients are queued, sequence shards) meet; in the last
# case some children have hooks, so they are called as modules, outside of the fused path
CASES = [
    (False, torch.bfloat16, "none", False, False, False),
    (True, torch.float16, "none", True, True, False),
    (False, torch.float16, "mlp", False, True, False),
    (True, torch.bfloat16, "mlp", True, False, False),
    (False, torch.bfloat16, "full", True, True, False),
    (True, torch.float16, "full", False, False, False),
    (False, torch.bfloat16, "none", False, False, True),
]
HOOKED = (
    "0.input_layernorm", "0.self_attn.q_proj", "0.self_attn.o_proj", "0.mlp", "1.self_attn", "1.mlp.fc1", "1.mlp.fc2",
)  # fmt: skip
BATCHES = torch.randint(VOCAB, (4, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))


def run(model: nn.Module, half: torch.dtype | None, queue: ops.WeightGradientQueue | None = None, **terms) -> Results:
    """Losses and gradients, one for each batch: the error of one small gradient would be chance."""
    found = []
    for ids in BATCHES:
        model.zero_grad()
        with torch.autocast("cpu", half, enabled=half is not None), queue.collect() if queue else nullcontext():
            loss = model(ids[:, :-1], targets=ids[:, 1:], **terms)
        (loss * 8).backward()
        if queue:
            assert len(queue) > 0
            queue.run()
        found.append({"loss": loss.detach()} | with_keys_in_one(gradients(model)))
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def with_hooks(model: nn.Module, hooked: bool) -> nn.Module:
    for path in HOOKED if hooked else ():
        theirs.scaling_hook(model.layers, path)
    return model


@cache
def by_torch(llama: bool, hooked: bool, dtype: torch.dtype, half: torch.dtype | None) -> Results:
    return run(with_hooks(theirs.GPT(VOCAB, SEQ, CONFIG.n_layers, llama).to(dtype), hooked), half, reduction="sum")


def on_rank(mesh, *case) -> Results:
    llama, half, recompute, queued, sequence_parallel, hooked = case
    model = kept(GPT, LLAMA if llama else CONFIG, tp=TensorParallel(mesh, sequence_parallel), recompute=recompute)
    fill(model, theirs.GPT(VOCAB, SEQ, CONFIG.n_layers, llama).float().state_dict())
    return run(with_hooks(model, hooked), half, ops.WeightGradientQueue() if queued else None)


def assert_no_worse(found: Results, oracle: Results, baseline: Results, what: str) -> None:
    """An error is at most twice the baseline's. A loss's, which would be chance, is at most its rounding in 16 bits."""
    assert found.keys() == oracle.keys()
    for name, x in found.items():
        assert x.dtype == torch.float32, f"{what}: {name} is {x.dtype}"
        error, bound = ((y - oracle[name]).norm() for y in (x, baseline[name]))
        bound = 2**-8 * oracle[name].norm() if name == "loss" else 2 * bound
        assert error <= bound, f"{what}: {name} is wrong by {error:.3g}, more than {bound:.3g}"


@pytest.mark.parametrize("t", [1, *in_turns([2], first=2)])
def test_a_model_is_no_worse_than_torch(ranks, t):
    for case, by_rank in each_case(ranks, t, on_rank, CASES):
        llama, half, *_, hooked = case
        oracle, baseline = by_torch(llama, hooked, torch.float64, None), by_torch(llama, hooked, torch.float32, half)
        for found in by_rank:
            assert_no_worse(found, oracle, baseline, f"{case} on {t}")


def test_linears_are_bitwise_those_of_torch():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in draw((5, 7), (3, 7), (3,))]
        results = []
        for function in (F.linear, ops.column_linear, ops.row_linear):
            with torch.autocast("cpu", torch.bfloat16):
                y = function(*inputs)
            results.append([y, *torch.autograd.grad(y.sum(), inputs)])
        assert_identical(results, [results[0]] * 3, f"{dtype}")


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_of_16_bits_are_made_in_float32(kind):
    x, norm = torch.randn(5, 24).bfloat16(), kind(24, 1e-5)
    with torch.autocast("cpu"):
        y = norm(x)
    assert_identical(y, norm(x.float()))


def test_a_scaler_finds_what_overflows():
    """torch.amp.GradScaler with float16 steps where gradients are finite, and skips where they are not."""
    block, x, losses = ours("layernorm").float(), draw((BATCH, SEQ, theirs.HIDDEN))[0].float(), []
    optimizer = torch.optim.SGD(block.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
    for _ in range(25):
        with torch.autocast("cpu", torch.float16):
            loss = block(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 1 < scaler.get_scale() < 2.0**30 and losses[0] == losses[1] > losses[-1]

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
from steps import Results, each_case, gradients, with_keys_in_one
from test_habits_of_children import ours
from testing import assert_identical
from torch import nn

from tpformer import ops
from tpformer.layers import LayerNorm, RMSNorm, TensorParallel
from tpformer.models import GPT

# every two values of (llama, dtype, recompute, whether weight gradients are queued, sequence shards) meet
CASES = [
    (False, torch.bfloat16, "none", False, False),
    (True, torch.float16, "none", True, True),
    (False, torch.float16, "mlp", False, True),
    (True, torch.bfloat16, "mlp", True, False),
    (False, torch.bfloat16, "full", True, True),
    (True, torch.float16, "full", False, False),
]
BATCHES = torch.randint(VOCAB, (4, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))


def run(model: nn.Module, half: torch.dtype | None, queue: ops.WeightGradientQueue | None = None, **terms) -> Results:
    """Losses and gradients, one for each batch: the error of one small gradient would be chance."""
    found = []
    for ids in BATCHES:
        model.zero_grad()
        with (
            torch.autocast("cpu", half) if half else nullcontext(),
            queue.collect() if queue is not None else nullcontext(),
        ):
            loss = model(ids[:, :-1], targets=ids[:, 1:], **terms)
        (loss * 8).backward()
        if queue is not None:
            assert len(queue) > 0
            queue.run()
        found.append({"loss": loss.detach()} | with_keys_in_one(gradients(model)))
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


@cache
def by_torch(llama: bool, dtype: torch.dtype, half: torch.dtype | None) -> Results:
    return run(theirs.GPT(VOCAB, SEQ, CONFIG.n_layers, llama).to(dtype), half, reduction="sum")


def by_ours(llama: bool, half: torch.dtype, recompute: str, queued: bool, tp: TensorParallel | None = None) -> Results:
    model = GPT(LLAMA if llama else CONFIG, tp=tp, recompute=recompute)
    fill(model, theirs.GPT(VOCAB, SEQ, CONFIG.n_layers, llama).float().state_dict())
    return run(model, half, ops.WeightGradientQueue() if queued else None)


def assert_no_worse(found: Results, oracle: Results, baseline: Results, what: str) -> None:
    """An error is at most twice the baseline's. Of a loss that would be chance: it is at most its rounding in 16
    bits."""
    assert found.keys() == oracle.keys()
    for name, x in found.items():
        assert x.dtype == torch.float32, f"{what}: {name} is {x.dtype}"
        error, bound = ((y - oracle[name]).norm() for y in (x, baseline[name]))
        bound = 2**-8 * oracle[name].norm() if name == "loss" else 2 * bound
        assert error <= bound, f"{what}: {name} is wrong by {error:.3g}, more than {bound:.3g}"


def check(found: Results, llama: bool, half: torch.dtype, what: str) -> None:
    assert_no_worse(found, by_torch(llama, torch.float64, None), by_torch(llama, torch.float32, half), what)


@pytest.mark.parametrize("llama, half, recompute, queued", [case[:4] for case in CASES])
def test_one_rank_is_no_worse_than_torch(llama, half, recompute, queued):
    check(by_ours(llama, half, recompute, queued), llama, half, "one rank")


def on_rank(mesh, *case) -> Results:
    return by_ours(*case[:4], tp=TensorParallel(mesh, case[4]))


def test_two_ranks_are_no_worse_than_torch(ranks):
    for case, by_rank in each_case(ranks, 2, on_rank, CASES):
        for found in by_rank:
            check(found, *case[:2], f"two ranks, {case}")


def hooked(block: nn.Module, path: str, half: torch.dtype | None = None) -> Results:
    theirs.scaling_hook(block, path)
    x = torch.randn(BATCH, SEQ, theirs.HIDDEN, generator=torch.Generator().manual_seed(5))
    with torch.autocast("cpu", half) if half else nullcontext():
        y = block(x.to(next(block.parameters()).dtype))
    y.square().sum().backward()
    return {"y": y.detach()} | with_keys_in_one(gradients(block))


@pytest.mark.parametrize(
    "path", ["input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2", "self_attn", "mlp"]
)
def test_hooked_children(path):
    """A child with a hook is called as a module, outside of the fused path."""
    oracle = hooked(theirs.Block(ffn_hidden_size=theirs.FFN), path)
    baseline = hooked(theirs.Block(ffn_hidden_size=theirs.FFN).float(), path, torch.bfloat16)
    assert_no_worse(hooked(ours("layernorm").float(), path, torch.bfloat16), oracle, baseline, path)


def test_linears_are_bitwise_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator).requires_grad_() for s in ((5, 7), (3, 7), (3,))]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        inputs = [x.detach().to(dtype).requires_grad_() for x in tensors]
        results = []
        for function in (F.linear, ops.column_linear, ops.row_linear):
            with torch.autocast("cpu", torch.bfloat16):
                y = function(*inputs)
            results.append([y, *torch.autograd.grad(y.sum(), inputs)])
        for found in results[1:]:
            assert_identical(found, results[0], f"{dtype}")


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_of_16_bits_are_made_in_float32(kind):
    x, norm = torch.randn(5, 24).bfloat16(), kind(24, 1e-5)
    with torch.autocast("cpu"):
        y = norm(x)
    assert_identical(y, norm(x.float()))


def test_a_scaler_finds_what_overflows():
    """torch.amp.GradScaler with float16 steps where gradients are finite, and skips where they are not."""
    block = ours("layernorm").float()
    optimizer = torch.optim.SGD(block.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
    x = torch.randn(BATCH, SEQ, theirs.HIDDEN, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(25):
        with torch.autocast("cpu", torch.float16):
            loss = block(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 1 < scaler.get_scale() < 2.0**30 and losses[0] == losses[1] > losses[-1]

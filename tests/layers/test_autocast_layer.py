"""Under torch.autocast a block has the error of the same block of torch.nn modules, by a float64 oracle: result and
every gradient, float32 all of them, while GEMMs are in 16 bits."""

from contextlib import nullcontext
from functools import cache

import pytest
import theirs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_children_layer import BATCH, NORMS, SEQ, ours
from theirs import HIDDEN
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpformer import ops
from tpformer.config import RECOMPUTE
from tpformer.distributed import build_mesh
from tpformer.layers import LayerNorm, LMHead, Positions, TensorParallel
from tpformer.parallel import reduce_partial_gradients

MODES = (("none", True), ("mlp", False), ("full", False))
HALVES = (torch.bfloat16, torch.float16)
VOCAB = 30


class Model(nn.Module):
    """The loss of a block, a norm and a head over VOCAB words."""

    def __init__(self, block: nn.Module, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.block, self.norm, self.head = block, norm, head

    def forward(self, x: Tensor, targets: Tensor, positions: Positions | None = None) -> dict[str, Tensor]:
        y = self.block(x, positions=positions) if isinstance(self.head, LMHead) else self.block(x)
        if isinstance(self.head, LMHead):
            rows = y.flatten(0, -2)
            return {"y": y, "loss": self.head(rows, norm=self.norm.prologue(), targets=targets)}
        return {"y": y, "loss": F.cross_entropy(self.head(self.norm(y)).flatten(0, -2), targets, reduction="sum")}


def values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, SEQ, HIDDEN, generator=generator).to(dtype)
    return x, torch.randint(VOCAB, (BATCH * SEQ,), generator=generator)


def head_values() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6)) / 4


@cache
def by_torch(norm: str, dtype: torch.dtype, half: torch.dtype | None) -> dict[str, Tensor]:
    model = Model(theirs.Block(norm), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)).to(dtype)
    with torch.no_grad():
        model.head.weight.copy_(head_values())
    return results(model, values(dtype), half)


def results(model: Model, inputs: tuple[Tensor, Tensor], half: torch.dtype | None, queue=None, **options):
    x, targets = inputs
    x.requires_grad_()
    with torch.autocast("cpu", half) if half else nullcontext(), queue.collect() if queue else nullcontext():
        found = model(x, targets, **options)
    (found["loss"] * 8).backward()
    if queue:
        queue.run()
    return {name: y.detach() for name, y in found.items()} | {
        name: p.grad for name, p in (("x", x), *model.named_parameters())
    }


def by_ours(norm: str, half: torch.dtype, recompute: str, queued: bool, tp: TensorParallel | None = None):
    model = Model(
        ours(norm, tp, recompute).float(), LayerNorm(HIDDEN, tp=tp), LMHead(VOCAB, HIDDEN, vocab_multiple=2, tp=tp)
    )
    with torch.no_grad():
        weight = model.head.local("weight")
        weight.copy_(head_values().chunk(model.head.tp.size)[model.head.tp.rank])
    x, targets = values(torch.float32)
    options = {"positions": Positions(BATCH, SEQ)}
    if tp is not None and tp.sharded:
        x = x.flatten(0, 1).chunk(tp.size)[tp.rank].clone()
    found = results(model, (x, targets), half, ops.WeightGradientQueue() if queued else None, **options)
    reduce_partial_gradients(model)
    found |= {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
    return found


def assert_no_worse(found: dict, oracle: dict, baseline: dict, what: str) -> None:
    """At most twice the baseline's error; of a scalar, where that is chance, at most its rounding in 16 bits."""
    assert found.keys() == oracle.keys()
    for name, x in found.items():
        assert x.dtype == torch.float32, f"{what}: {name} is {x.dtype}"
        error, bound = ((y.view(oracle[name].shape) - oracle[name]).norm() for y in (x, baseline[name]))
        bound = 2 * bound if x.dim() else 2**-8 * oracle[name]
        assert error <= bound, f"{what}: {name} is wrong by {error:.3g}, more than {bound:.3g}"


def check(found: dict[str, Tensor], norm: str, half: torch.dtype, what: str) -> None:
    assert_no_worse(found, by_torch(norm, torch.float64, None), by_torch(norm, torch.float32, half), what)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("queued", [False, True])
def test_one_rank(norm, half, recompute, queued):
    check(by_ours(norm, half, recompute, queued), norm, half, "one rank")


def on_rank(norm: str, half: torch.dtype, sequence_parallel: bool) -> list[dict[str, Tensor]]:
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], sequence_parallel)
    return [by_ours(norm, half, recompute, queued, tp) for recompute, queued in MODES]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("norm", "half"), [*zip(NORMS, HALVES, strict=True)])
def test_two_ranks(ranks, norm, half, sequence_parallel):
    results = ranks(2).run(on_rank, norm, half, sequence_parallel)
    for mode, *found in zip(MODES, *results, strict=True):
        if sequence_parallel:
            found = [each | {name: torch.cat([one[name] for one in found]) for name in ("y", "x")} for each in found]
        for each in found:
            check(each, norm, half, f"two ranks, {mode}, sequence_parallel={sequence_parallel}")


def hooked(block: nn.Module, path: str, half: torch.dtype | None = None) -> dict[str, Tensor]:
    theirs.scaling_hook(block, path)
    x, _ = values(next(block.parameters()).dtype)
    with torch.autocast("cpu", half) if half else nullcontext():
        y = block(x)
    y.square().sum().backward()
    return {"y": y.detach()} | {name: p.grad for name, p in block.named_parameters()}


@pytest.mark.parametrize(
    "path", ["input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2", "self_attn", "mlp"]
)
def test_hooked_children(path):
    """Children that are called as modules."""
    oracle = hooked(theirs.Block("layernorm"), path)
    baseline = hooked(theirs.Block("layernorm").float(), path, torch.bfloat16)
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
            for one, other in zip(found, results[0], strict=True):
                assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_scaler_finds_what_overflows():
    """torch.amp.GradScaler with float16: steps where gradients are finite, and none where they are not."""
    block = ours("layernorm").float()
    optimizer = torch.optim.SGD(block.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=100)
    x, _ = values(torch.float32)
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


def test_the_next_norm_is_refused():
    x = torch.randn(2, 4)
    with (
        torch.autocast("cpu"),
        pytest.raises(ValueError, match="next_norm would be made in autocast's dtype: call ops"),
    ):
        ops.row_linear(x, torch.randn(4, 4), next_norm=ops.Norm("rmsnorm", torch.ones(4), None, 1e-5))

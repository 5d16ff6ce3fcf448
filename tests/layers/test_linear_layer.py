"""ColumnParallelLinear and RowParallelLinear take the place of nn.Linear, with any leading dims and options."""

import traceback
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from habits import fill
from steps import Results, assert_ranks_have, each_case, gradients, own, step
from testing import assert_identical, assert_same
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations

from tpformer import ops
from tpformer.distributed.dtensor import full_tensor
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel

BATCH, SEQ, K, N = 3, 4, 8, 12


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_bit_identical_to_linear(kind, bias):
    """The bias is the third argument. test_calls_layer.py has other shapes."""
    ours, theirs = kind(K, N, bias), nn.Linear(K, N, bias)
    for p in ours.parameters():
        nn.init.normal_(p)
    theirs.load_state_dict(ours.state_dict())  # same names and shapes
    x, dy = rand(BATCH, SEQ, K).float(), rand(BATCH, SEQ, N, seed=1).float()
    assert_identical(step(ours, x, dy), step(theirs, x, dy))


def pair_along(mesh, sequence_dim: int | None) -> tuple[torch.Size, Results, dict[str, Tensor]]:
    """Run x through a column and a row linear, with one dim of (batch, seq, hidden) sharded as the sequence: the shape
    between them, results and gradients, and the weights."""
    t, dim = mesh.size(), sequence_dim or 0
    torch.manual_seed(3)
    options = {"sequence_dim": sequence_dim, "tp": TensorParallel(mesh, True), "dtype": torch.float64}
    column, row = ColumnParallelLinear(K, N, **options), RowParallelLinear(N, K, activation="silu", **options)
    assert column.weight.placements == (Shard(0),) and row.weight.placements == (Shard(1),)
    assert column.bias.placements == (Shard(0),) and row.bias.placements == (Replicate(),)
    x, residual, dy = (own(rand(BATCH * t, SEQ * t, K, seed=s), dim) for s in (0, 1, 2))
    x.requires_grad_(), residual.requires_grad_()
    hidden = column(x)
    y = row(hidden, residual=residual)
    y.backward(dy.reshape(y.shape))
    model = nn.ModuleDict({"column": column, "row": row})
    found = {"y": y.detach().view(x.shape), "dx": x.grad, "dresidual": residual.grad} | gradients(model)
    return hidden.shape, found, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


def plain_pair(t: int, weights: dict[str, Tensor]) -> Results:
    p = {name: value.clone().requires_grad_() for name, value in weights.items()}
    x, residual, dy = (rand(BATCH * t, SEQ * t, K, seed=s) for s in (0, 1, 2))
    x.requires_grad_(), residual.requires_grad_()
    hidden = F.silu(F.linear(x, p["column.weight"], p["column.bias"]))
    y = residual + F.linear(hidden, p["row.weight"], p["row.bias"])
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad}
    return found | {name: value.grad for name, value in p.items()}


@pytest.mark.parametrize("t", [1, 2, 3])
def test_sequence_dim_equals_plain_linears(ranks, t):
    for (sequence_dim,), by_rank in each_case(ranks, t, pair_along, [(1,), (0,), (None,)]):
        dim, wanted = sequence_dim or 0, plain_pair(t, by_rank[0][2])
        found = [each for _, each, _ in by_rank]
        residual = torch.cat([each["dresidual"] for each in found], dim)
        assert_ranks_have([each | {"dresidual": residual} for each in found], wanted, dim, f"{sequence_dim} on {t}")
        for shape, *_ in by_rank:
            tokens = BATCH * t * SEQ * t
            # without sequence_dim the leading dims are flattened, because the gathered rows no longer have x's
            assert shape == ((tokens, N // t) if sequence_dim is None and t > 1 else (BATCH * t, SEQ * t, N // t))


def some_rows(mesh, sequence_parallel: bool) -> tuple[Tensor, Results]:
    """Rank r uses the rows [2r, 2r + 3), so two neighbours share one row. Its gradient is the sum of theirs."""
    rank = mesh.get_local_rank()
    torch.manual_seed(100 + rank)  # the ranks' values must agree without equal seeds
    used = slice(2 * rank, 2 * rank + 3)
    layer = ColumnParallelLinear(K, N, used_rows=used, tp=TensorParallel(mesh, sequence_parallel), dtype=torch.float64)
    assert layer.weight.placements == (Replicate(),)
    x = rand(6, K)
    y = layer(own(x, 0 if sequence_parallel else None))
    y.sum().backward()
    local = layer.weight.detach().to_local()
    assert_same(y, x @ local[used].t())
    return local, gradients(layer)


@pytest.mark.parametrize("t", [2, 3])
def test_used_rows_sum_their_gradients_over_ranks(ranks, t):
    uses = torch.zeros(N, dtype=torch.float64)
    for rank in range(t):
        uses[2 * rank : 2 * rank + 3] += 1
    for case, by_rank in each_case(ranks, t, some_rows, [(True,), (False,)]):
        for weight, found in by_rank:
            assert_identical(weight, by_rank[0][0])
            assert_same(found, {"weight": uses[:, None] * rand(6, K).sum(0), "bias": 6 * uses}, f"{case}")


def edges(mesh, sequence_parallel: bool, sequence_dim: int | None, k: int, hidden: int) -> tuple[Results, Results]:
    """Return our results, and nn.Linear's: a column linear gathers its output, and a row linear takes all of it."""
    t, dim = mesh.size(), sequence_dim or 0
    torch.manual_seed(0)
    plain = [nn.Linear(k, hidden, dtype=torch.float64), nn.Linear(hidden, k, dtype=torch.float64)]
    options = {"tp": TensorParallel(mesh, sequence_parallel), "sequence_dim": sequence_dim, "dtype": torch.float64}
    column = ColumnParallelLinear(k, hidden, gather_output=True, **options)
    row = RowParallelLinear(hidden, k, input_is_parallel=False, **options)
    x, dy = rand(2 * t, t, k, seed=1), rand(2 * t, t, k, seed=2)
    results = []
    for modules, shard in (((column, row), sequence_parallel), (plain, False)):
        model = nn.Sequential(*modules)
        if modules is not plain:
            fill(model, nn.Sequential(*plain).state_dict())
        mine, dmine = (own(each, dim if shard else None) for each in (x, dy))
        made = modules[0](mine.requires_grad_())
        made.retain_grad()
        y = modules[1](made.view(-1, hidden) if sequence_dim is None else made)
        y.backward(dmine.view(y.shape))
        found = {"y": y.detach().view(mine.shape), "dx": mine.grad} | gradients(model)
        results.append(found | {"hidden": made.detach(), "dhidden": made.grad})
    return results[0], results[1]


# with 5 and 7 features the last rank has fewer than the others
EDGES = [(*case, *sizes) for *case, sizes in product((False, True), (None, 1), ((8, 12), (5, 7)))]


@pytest.mark.parametrize("t", [1, 2, 3])
def test_gathered_output_and_unsharded_input(ranks, t):
    for case, by_rank in each_case(ranks, t, edges, EDGES):
        wanted = by_rank[0][1]
        found = [
            each | {name: each[name].view(wanted[name].shape) for name in ("hidden", "dhidden")} for each, _ in by_rank
        ]
        assert_ranks_have(found, wanted, (case[1] or 0) if case[0] else None, f"{case} on {t}")


def test_few_frames_lie_between_a_layer_and_its_product(monkeypatch):
    """Every forward pays for each frame, and whoever follows a tensor to its kernel reads it."""
    frames = []

    def product(x, weight, bias):
        frames.extend(frame.name for frame in traceback.extract_stack() if "/tpformer/" in frame.filename)
        return x @ weight.t() + bias

    layer = ColumnParallelLinear(K, N)
    monkeypatch.setattr(F, "linear", product)
    layer(torch.zeros(2, K))
    assert frames == ["forward", "project", "call", "column_linear", "forward", "gather_matmul"]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_the_gradient_of_a_computed_weight_is_not_queued(kind):
    """Only autograd can pass the gradient on to the parameters that the weight is computed from."""
    found = []
    for queued in (False, True):
        torch.manual_seed(0)
        layer, queue = parametrizations.weight_norm(kind(K, N)), ops.WeightGradientQueue()
        with queue.collect() if queued else nullcontext():
            y = layer(torch.ones(2, K))
        y.square().sum().backward()
        assert len(queue) == 0 and queue
        found.append([p.grad for p in layer.parameters()])
    assert_identical(*found)

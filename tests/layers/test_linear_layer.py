"""ColumnParallelLinear and RowParallelLinear take the place of nn.Linear, with any leading dims and options."""

import traceback
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

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


class Pair(NamedTuple):
    """A column linear of (k, n), a row linear of (n, k), a residual; x (batch, seq, k) is sharded along sequence_dim,
    or along its first dim (None). gathered: the one gathers its output, and the other takes all of it."""

    sequence_parallel: bool
    sequence_dim: int | None
    gathered: bool
    k: int = K
    n: int = N

    @property
    def dim(self) -> int | None:
        return (self.sequence_dim or 0) if self.sequence_parallel else None

    def plain(self) -> nn.ModuleDict:
        torch.manual_seed(3)
        return nn.ModuleDict({"column": nn.Linear(self.k, self.n), "row": nn.Linear(self.n, self.k)}).double()

    def run(self, model: nn.ModuleDict, x: Tensor, residual: Tensor, dy: Tensor) -> Results:
        ours = isinstance(model["row"], RowParallelLinear)
        hidden = model["column"](x.requires_grad_())
        hidden.retain_grad()
        residual.requires_grad_()
        y = model["row"](hidden, residual=residual) if ours else model["row"](F.silu(hidden)) + residual
        y.backward(dy.reshape(y.shape))
        assert_same(residual.grad, dy)
        found = {"y": y.detach().reshape(x.shape), "dx": x.grad, "hidden": hidden.detach(), "dhidden": hidden.grad}
        return found | gradients(model)

    def inputs(self, t: int) -> list[Tensor]:
        return [own(rand(BATCH * t, SEQ * t, self.k, seed=seed), None) for seed in (0, 1, 2)]


def paired(mesh, *fields) -> Results:
    """All but the rows between both linears, where each rank has its own features of them."""
    case, t = Pair(*fields), mesh.size()
    tp = TensorParallel(mesh, case.sequence_parallel)
    options = {"sequence_dim": case.sequence_dim, "tp": tp, "dtype": torch.float64}
    column = ColumnParallelLinear(case.k, case.n, gather_output=case.gathered, **options)
    row = RowParallelLinear(case.n, case.k, activation="silu", input_is_parallel=not case.gathered, **options)
    assert column.weight.placements == column.bias.placements == (Shard(0),)
    assert row.weight.placements == (Shard(1),) and row.bias.placements == (Replicate(),)
    model = nn.ModuleDict({"column": column, "row": row})
    fill(model, case.plain().state_dict())
    found = case.run(model, *(own(z, case.dim) for z in case.inputs(t)))
    # without sequence_dim the leading dims are flattened, because the gathered rows no longer have x's
    flat = case.dim is not None and case.sequence_dim is None and t > 1
    rows, width = (BATCH * t * SEQ * t,) if flat else (BATCH * t, SEQ * t), case.n if case.gathered else case.n // t
    assert found["hidden"].shape == found["dhidden"].shape == (*rows, width)
    for name in ("hidden", "dhidden"):
        between = found.pop(name)
        if case.gathered:
            found[name] = between.reshape(BATCH * t, SEQ * t, case.n)
    return found


PAIRS = [
    *(Pair(True, sequence_dim, False) for sequence_dim in (1, 0, None)),
    # with 5 and 7 features the last rank has fewer than the others
    *(Pair(*case, True, *sizes) for *case, sizes in product((False, True), (None, 1), ((8, 12), (5, 7)))),
]


@pytest.mark.parametrize("t", [1, 2, 3])
def test_column_and_row_equal_plain_linears(ranks, t):
    for case, by_rank in each_case(ranks, t, paired, PAIRS):
        wanted = case.run(case.plain(), *case.inputs(t))
        assert_ranks_have(by_rank, {name: wanted[name] for name in by_rank[0]}, case.dim, f"{case} on {t}")


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

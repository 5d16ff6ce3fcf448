"""ColumnParallelLinear and RowParallelLinear take the place of nn.Linear, with any leading dims and options."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from habits import fill
from steps import Results, assert_ranks_have, draw, each_case, gradients, own
from testing import assert_identical, assert_same
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations
from turns import in_turns

from tpformer import ops
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel

BATCH, SEQ, K, N = 3, 4, 8, 12


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
        return draw(*[(BATCH * t, SEQ * t, self.k)] * 3)


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


@pytest.mark.parametrize("t", [1, 2, *in_turns([3], first=0)])
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
    (x,) = draw((6, K))
    y = layer(own(x, 0 if sequence_parallel else None))
    y.sum().backward()
    local = layer.weight.detach().to_local()
    assert_same(y, x @ local[used].t())
    return local, gradients(layer)


@pytest.mark.parametrize("t", [2, 3])
def test_used_rows_sum_their_gradients_over_ranks(ranks, t):
    uses = torch.tensor([sum(2 * rank <= row < 2 * rank + 3 for rank in range(t)) for row in range(N)]).double()
    wanted = {"weight": uses[:, None] * draw((6, K))[0].sum(0), "bias": 6 * uses}
    for case, by_rank in each_case(ranks, t, some_rows, [(True,), (False,)]):
        weights, found = zip(*by_rank, strict=True)
        assert_identical(weights, weights[:1] * t)
        assert_same(found, (wanted,) * t, f"{case}")


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_the_gradient_of_a_computed_weight_is_not_queued(kind):
    """Only autograd can pass the gradient on to the parameters that the weight is computed from."""
    layer, queue = parametrizations.weight_norm(kind(K, N)), ops.WeightGradientQueue()
    wanted = torch.autograd.grad(layer(torch.ones(2, K)).square().sum(), [*layer.parameters()])
    with queue.collect():
        y = layer(torch.ones(2, K))
    y.square().sum().backward()
    assert len(queue) == 0 and queue
    assert_identical([p.grad for p in layer.parameters()], wanted)

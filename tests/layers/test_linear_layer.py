"""ColumnParallelLinear and RowParallelLinear take the place of nn.Linear, with any leading dims and options."""

import traceback
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from habits import fill
from steps import Results, gradients
from testing import assert_same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrizations

from tpformer import ops
from tpformer.distributed import build_mesh
from tpformer.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel, explain

BATCH, SEQ, K, N = 3, 4, 8, 12


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, K), (BATCH, SEQ, K), (2, 2, 3, K), (K,), (0, K)])
def test_bit_identical_to_linear(kind, bias, shape):
    ours, theirs = kind(K, N, bias=bias), nn.Linear(K, N, bias=bias)
    if bias:
        nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())  # same names and shapes
    x, other = (torch.ones(shape).requires_grad_() for _ in range(2))
    y, expected = ours(x), theirs(other)
    assert y.shape == expected.shape and torch.equal(y, expected)
    y.sum().backward(), expected.sum().backward()
    assert torch.equal(x.grad, other.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_bias_is_positional_and_empty_sizes_are_refused(kind):
    assert kind(K, N, False).bias is None and kind(K, N, True).bias.shape == (N,)
    for sizes, refused in (((0, N), "in_features=0"), ((K, 0), "out_features=0"), ((-1, N), "in_features=-1")):
        with pytest.raises(ValueError, match=f"{refused} must be at least 1"):
            kind(*sizes)


def tp_mesh():
    return build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]


def pair_along(sequence_dim: int | None):
    """Run x through a column and a row linear, with one dim of (batch, seq, hidden) sharded as the sequence."""
    mesh = tp_mesh()
    t, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(3)
    options = {"sequence_dim": sequence_dim, "tp": TensorParallel(mesh, True), "dtype": torch.float64}
    column, row = ColumnParallelLinear(K, N, **options), RowParallelLinear(N, K, activation="silu", **options)
    assert column.weight.placements == (Shard(0),) and row.weight.placements == (Shard(1),)
    assert column.bias.placements == (Shard(0),) and row.bias.placements == (Replicate(),)
    dim = 0 if sequence_dim is None else sequence_dim
    x, residual, dy = (rand(BATCH * t, SEQ * t, K, seed=s).chunk(t, dim)[rank].clone() for s in (0, 1, 2))
    x.requires_grad_(), residual.requires_grad_()
    hidden = column(x)
    y = row(hidden, residual=residual)
    y.backward(dy.reshape(y.shape))
    weights = {"column": column.weight, "row": row.weight, "row_bias": row.bias}
    whole = {name: (p.detach().full_tensor(), p.grad.full_tensor()) for name, p in weights.items()}
    return hidden.shape, y.detach(), x.grad, residual.grad, whole


@pytest.mark.parametrize("t", [1, 2, 3])
@pytest.mark.parametrize("sequence_dim", [1, 0, None])
def test_sequence_dim_equals_plain_linears(ranks, t, sequence_dim):
    results = ranks(t).run(pair_along, sequence_dim)
    column, row = (results[0][4][name][0].requires_grad_() for name in ("column", "row"))
    x, residual, dy = (rand(BATCH * t, SEQ * t, K, seed=s) for s in (0, 1, 2))
    x.requires_grad_(), residual.requires_grad_()
    expected = residual + F.linear(F.silu(F.linear(x, column)), row)
    expected.backward(dy)
    dim = 0 if sequence_dim is None else sequence_dim
    for i, wanted in ((1, expected), (2, x.grad), (3, residual.grad)):
        whole = torch.cat([r[i].reshape(r[2].shape) for r in results], dim)
        assert_same(whole, wanted)
    for shape, *_, whole in results:
        tokens = BATCH * t * SEQ * t
        # without sequence_dim the leading dims are flattened, because the gathered rows no longer have x's
        assert shape == ((tokens, N // t) if sequence_dim is None and t > 1 else (BATCH * t, SEQ * t, N // t))
        wanted = {"column": column.grad, "row": row.grad, "row_bias": dy.sum((0, 1))}
        assert_same({name: gradient for name, (_, gradient) in whole.items()}, wanted)


def some_rows(sequence_parallel: bool):
    """Rank r uses the rows [2r, 2r + 3), so two neighbours share one row. Its gradient is the sum of theirs."""
    mesh = tp_mesh()
    t, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(100 + rank)  # the ranks' values must agree without equal seeds
    used = slice(2 * rank, 2 * rank + 3)
    layer = ColumnParallelLinear(K, N, used_rows=used, tp=TensorParallel(mesh, sequence_parallel), dtype=torch.float64)
    assert layer.weight.placements == (Replicate(),)
    x = rand(6, K)
    y = layer(x.chunk(t)[rank] if sequence_parallel else x)
    y.sum().backward()
    local = layer.weight.detach().to_local()
    assert_same(y, x @ local[used].t())
    return local, layer.weight.grad.full_tensor(), layer.bias.grad.full_tensor()


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_used_rows_sum_their_gradients_over_ranks(ranks, t, sequence_parallel):
    results = ranks(t).run(some_rows, sequence_parallel)
    uses = torch.zeros(N, dtype=torch.float64)
    for rank in range(t):
        uses[2 * rank : 2 * rank + 3] += 1
    for weight, dweight, dbias in results:
        assert torch.equal(weight, results[0][0])
        assert_same(dweight, uses[:, None] * rand(6, K).sum(0))
        assert torch.equal(dbias, 6 * uses)


def edges(
    t: int, mesh: DeviceMesh, sequence_parallel: bool, sequence_dim: int | None, k: int, hidden: int
) -> tuple[Results, Results]:
    """Return our results, and nn.Linear's: a column linear gathers its output, and a row linear takes all of it."""
    torch.manual_seed(0)
    plain = [nn.Linear(k, hidden, dtype=torch.float64), nn.Linear(hidden, k, dtype=torch.float64)]
    options = {"tp": TensorParallel(mesh, sequence_parallel), "sequence_dim": sequence_dim, "dtype": torch.float64}
    column = ColumnParallelLinear(k, hidden, gather_output=True, **options)
    row = RowParallelLinear(hidden, k, input_is_parallel=False, **options)
    x, dy, dim = rand(2 * t, t, k, seed=1), rand(2 * t, t, k, seed=2), sequence_dim or 0
    results = []
    for modules, shard in (((column, row), sequence_parallel), (plain, False)):
        model = nn.Sequential(*modules)
        if modules is not plain:
            fill(model, nn.Sequential(*plain).state_dict())
        mine, dmine = (each.chunk(t, dim)[dist.get_rank()].clone() if shard else each.clone() for each in (x, dy))
        made = modules[0](mine.requires_grad_())
        made.retain_grad()
        y = modules[1](made.view(-1, hidden) if sequence_dim is None else made)
        y.backward(dmine.view(y.shape))
        values = {"hidden": made.detach(), "dhidden": made.grad, "y": y.detach(), "dx": mine.grad}
        if shard:
            for name in ("y", "dx"):
                gathered = [torch.empty_like(values[name].contiguous()) for _ in range(t)]
                dist.all_gather(gathered, values[name].contiguous())
                values[name] = torch.cat(gathered, dim)
        results.append(values | gradients(model))
    return results[0], results[1]


# with 5 and 7 features the last rank has fewer than the others
EDGES = [(*case, *sizes) for *case, sizes in product((False, True), (None, 1), ((8, 12), (5, 7)))]


def all_edges(t: int) -> list[tuple[Results, Results]]:
    mesh = tp_mesh()
    return [edges(t, mesh, *case) for case in EDGES]


@pytest.mark.parametrize("t", [1, 2, 3])
def test_gathered_output_and_unsharded_input(ranks, t):
    for case, *by_rank in zip(EDGES, *ranks(t).run(all_edges, t), strict=True):
        for ours, expected in by_rank:
            found = {name: ours[name].view(value.shape) for name, value in expected.items()}
            assert_same(found, expected, f"{case} on {t}")


def refusals():
    sharded = RowParallelLinear(K, N, sequence_dim=1, tp=TensorParallel(tp_mesh(), True))
    with pytest.raises(ValueError, match=r"\(2, 5, 4\) has 5 along sequence_dim=1, which 2 .* ranks cannot share"):
        sharded(torch.zeros(2, 5, K // 2))
    with pytest.raises(ValueError, match=r"sequence_dim=1 is the dim of the features in x of shape \(4, 4\)"):
        sharded(torch.zeros(4, K // 2))
    with pytest.raises(ValueError, match="weight has 1 rows on its sharded dim, too few for 2"):
        ColumnParallelLinear(K, 1, tp=tp_mesh())
    column, row = ColumnParallelLinear(K, N, tp=tp_mesh()), RowParallelLinear(N, K, tp=tp_mesh())
    whole = RowParallelLinear(N, K, input_is_parallel=False, tp=tp_mesh())
    with pytest.raises(
        ValueError, match="x has 4 features, but every rank needs all in_features=8: .* give it gather_output=True"
    ):
        column(torch.ones(2, K // 2))
    for layer, width in ((row, 12), (whole, 6)):
        with pytest.raises(ValueError, match=f"x has {width} features, .* of in_features=12 has 6: set input_is_paral"):
            layer(torch.ones(2, width))
    with pytest.raises(ValueError, match="gather_output=True with used_rows"):
        ColumnParallelLinear(K, N, gather_output=True, used_rows=slice(0, 3), tp=tp_mesh())
    table = explain(nn.Sequential(ColumnParallelLinear(K, N, gather_output=True, tp=tp_mesh()), whole), 8)
    assert "; as a module it gathers its output" in table and "; as a module it takes an unsharded input" in table


def test_sizes_that_do_not_fit_two_ranks_are_refused(ranks):
    ranks(2).run(refusals)


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
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

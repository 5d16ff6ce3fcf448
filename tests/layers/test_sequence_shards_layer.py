"""Layers compute on sequence shards what they compute of whole samples: results, gradients and dropout. x is (batch,
seq / t, hidden), a slice of every sample on each rank, or (batch / t, seq, hidden), a slice of the tokens."""

import pytest
import theirs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import Results, assert_same, joined, step
from test_block_layer import BATCH, HIDDEN, SEQ, inputs, make_block
from torch import Tensor, nn

from tpformer.config import RECOMPUTE
from tpformer.distributed import build_mesh
from tpformer.layers import (
    MLP,
    ColumnParallelLinear,
    DropoutKey,
    PositionEmbedding,
    Positions,
    RowParallelLinear,
    SelfAttention,
    TensorParallel,
)

IDS = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]])


def run(module: nn.Module, dim: int, named: bool, ids: Tensor | None, **options) -> Results:
    """Return this rank's result and all gradients for x sharded along dim. named: positions say what x is."""
    x, dy = (z.chunk(dist.get_world_size(), dim)[dist.get_rank()] for z in inputs())
    if named:
        options["positions"] = Positions(BATCH, SEQ, ids)
    return step(module, x, dy, **options)


def tensor_parallel() -> TensorParallel:
    return TensorParallel(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], True)


def block(dim: int, kind: str, recompute: str, named: bool, ids: Tensor | None) -> Results:
    made = make_block(kind, tensor_parallel().mesh, dropout=0.5, recompute=recompute)
    return run(made, dim, named, ids, dropout_key=DropoutKey(0, 1, torch.tensor([7, 2]), made))


def assert_same_on_ranks(ranks, t: int, dim: int, function, *args) -> None:
    (expected,) = ranks(1).run(function, dim, *args)
    for result in joined(ranks(t).run(function, dim, *args), dim):
        assert_same(result, expected, tolerance=1e-11)


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["gelu-layernorm", "qk-norm-head-dim-scaling"])
@pytest.mark.parametrize("named, ids", [(False, None), (True, None), (True, IDS)])
def test_a_block_on_shards_equals_the_whole(ranks, t, kind, recompute, named, ids):
    assert_same_on_ranks(ranks, t, 1, block, kind, recompute, named, ids)


@pytest.mark.parametrize("ids", [None, IDS])
def test_a_slice_of_the_tokens(ranks, ids):
    assert_same_on_ranks(ranks, 2, 0, block, "qk-norm-head-dim-scaling", "none", True, ids)


def alone(dim: int, kind: str) -> Results:
    torch.manual_seed(0)
    options: dict = {"tp": tensor_parallel(), "dtype": torch.float64}
    if kind == "attention":
        return run(SelfAttention(HIDDEN, 6, rope_base=50.0, **options), dim, False, None)
    if kind == "mlp":
        return run(MLP(HIDDEN, **options), dim, False, None)
    return run(PositionEmbedding(SEQ, HIDDEN, **options), dim, True, IDS if kind == "documents" else None)


@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("kind", ["attention", "mlp", "positions", "documents"])
def test_each_layer_on_shards_equals_the_whole(ranks, t, kind):
    assert_same_on_ranks(ranks, t, 1, alone, kind)


class ParallelAttention(nn.Module):
    """An attention that somebody else made of parallel linears."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        options: dict = {"tp": tp, "dtype": torch.float64}
        self.qkv = nn.ModuleList(ColumnParallelLinear(HIDDEN, HIDDEN, **options) for _ in range(3))
        self.o_proj = RowParallelLinear(HIDDEN, HIDDEN, **options)

    def forward(self, x: Tensor, *, positions: Positions) -> Tensor:
        q, k, v = (each(x).view(positions.batch, positions.seq_length, -1, 4).transpose(1, 2) for each in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj(y.flatten(2).flatten(0, 1))


def foreign(dim: int, parallel: bool, recompute: str) -> Results:
    tp = tensor_parallel()
    module = make_block("gelu-layernorm", tp.mesh, recompute=recompute)
    torch.manual_seed(1)
    module.self_attn = ParallelAttention(tp) if parallel else theirs.Attention().double()
    return run(module, dim, True, None)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("parallel", [True, False])
def test_an_attention_of_other_people(ranks, parallel, recompute):
    assert_same_on_ranks(ranks, 2, 1, foreign, parallel, recompute)

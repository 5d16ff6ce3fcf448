"""Layers compute on sequence shards what they compute of whole samples: results, gradients and dropout. x is (batch,
seq / t, hidden), a slice of every sample on each rank, or (batch / t, seq, hidden), a slice of the tokens."""

from collections.abc import Callable, Sequence
from itertools import product

import theirs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from steps import Results, joined, step
from test_block_layer import BATCH, HIDDEN, SEQ, inputs, make_block
from testing import assert_same
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


def block(tp: TensorParallel, dim: int, kind: str, recompute: str, named: bool, ids: Tensor | None) -> Results:
    made = make_block(kind, tp.mesh, dropout=0.5, recompute=recompute)
    return run(made, dim, named, ids, dropout_key=DropoutKey(0, 1, torch.tensor([7, 2]), made))


def on_rank(function: Callable[..., Results], dim: int, cases: list[tuple]) -> list[Results]:
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"], True)
    return [function(tp, dim, *case) for case in cases]


def assert_same_on_ranks(ranks, sizes: Sequence[int], dim: int, function: Callable[..., Results], cases: list) -> None:
    (wanted,) = ranks(1).run(on_rank, function, dim, cases)
    for t in sizes:
        for case, expected, *found in zip(cases, wanted, *ranks(t).run(on_rank, function, dim, cases), strict=True):
            for result in joined(found, dim):
                assert_same(result, expected, f"{case} on {t}")


def test_a_block_on_shards_equals_the_whole(ranks):
    kinds, samples = ("gelu-layernorm", "qk-norm-head-dim-scaling"), ((False, None), (True, None), (True, IDS))
    cases = [(*case, *named) for *case, named in product(kinds, RECOMPUTE, samples)]
    assert_same_on_ranks(ranks, (2, 3), 1, block, cases)


def test_a_slice_of_the_tokens(ranks):
    cases = [("qk-norm-head-dim-scaling", "none", True, ids) for ids in (None, IDS)]
    assert_same_on_ranks(ranks, (2,), 0, block, cases)


def alone(tp: TensorParallel, dim: int, kind: str) -> Results:
    torch.manual_seed(0)
    options: dict = {"tp": tp, "dtype": torch.float64}
    if kind == "attention":
        return run(SelfAttention(HIDDEN, 6, rope_base=50.0, **options), dim, False, None)
    if kind == "mlp":
        return run(MLP(HIDDEN, **options), dim, False, None)
    return run(PositionEmbedding(SEQ, HIDDEN, **options), dim, True, IDS if kind == "documents" else None)


def test_each_layer_on_shards_equals_the_whole(ranks):
    cases = [(kind,) for kind in ("attention", "mlp", "positions", "documents")]
    assert_same_on_ranks(ranks, (2, 3), 1, alone, cases)


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


def foreign(tp: TensorParallel, dim: int, parallel: bool, recompute: str) -> Results:
    module = make_block("gelu-layernorm", tp.mesh, recompute=recompute)
    torch.manual_seed(1)
    module.self_attn = ParallelAttention(tp) if parallel else theirs.Attention().double()
    return run(module, dim, True, None)


def test_an_attention_of_other_people(ranks):
    assert_same_on_ranks(ranks, (2,), 1, foreign, list(product((True, False), RECOMPUTE)))

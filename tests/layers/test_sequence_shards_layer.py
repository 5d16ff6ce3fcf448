"""Layers compute on sequence shards what they compute of whole samples: results, gradients and dropout. x is (batch,
seq / t, hidden), a slice of every sample on each rank, or (batch / t, seq, hidden), a slice of the tokens."""

from collections.abc import Callable, Sequence
from itertools import product

import theirs
import torch
import torch.nn.functional as F
from steps import Results, assert_ranks_have, each_case, own, step
from test_block_layer import BATCH, HIDDEN, SEQ, inputs, make_block
from torch import Tensor, nn

from tpformer.config import RECOMPUTE
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

# what positions say of x
SAMPLES: dict[str, dict] = {
    "not told": {},
    "whole": {"positions": Positions(BATCH, SEQ)},
    "documents": {"positions": Positions(BATCH, SEQ, torch.tensor([[0, 1, 0, 1, 2, 3], [0, 0, 1, 0, 1, 2]]))},
}


def run(module: nn.Module, dim: int, samples: str, **options) -> Results:
    """Return this rank's result and all gradients for x sharded along dim."""
    x, dy = (own(z, dim) for z in inputs())
    return step(module, x, dy, **SAMPLES[samples], **options)


def block(mesh, dim: int, kind: str, recompute: str, samples: str) -> Results:
    made = make_block(kind, mesh, dropout=0.5, recompute=recompute)
    return run(made, dim, samples, dropout_key=DropoutKey(0, 1, torch.tensor([7, 2]), made))


def assert_same_on_ranks(ranks, sizes: Sequence[int], dim: int, function: Callable[..., Results], cases: list) -> None:
    cases = [(dim, *case) for case in cases]
    wanted = [expected for _, (expected,) in each_case(ranks, 1, function, cases)]
    for t in sizes:
        for (case, found), expected in zip(each_case(ranks, t, function, cases), wanted, strict=True):
            assert_ranks_have(found, expected, dim, f"{case} on {t}")


def test_a_block_on_shards_equals_the_whole(ranks):
    kinds = ("gelu-layernorm", "qk-norm-head-dim-scaling")
    assert_same_on_ranks(ranks, (2, 3), 1, block, list(product(kinds, RECOMPUTE, SAMPLES)))


def test_a_slice_of_the_tokens(ranks):
    cases = [("qk-norm-head-dim-scaling", "none", samples) for samples in ("whole", "documents")]
    assert_same_on_ranks(ranks, (2,), 0, block, cases)


def alone(mesh, dim: int, kind: str) -> Results:
    torch.manual_seed(0)
    options: dict = {"tp": TensorParallel(mesh, True), "dtype": torch.float64}
    if kind == "attention":
        return run(SelfAttention(HIDDEN, 6, rope_base=50.0, **options), dim, "not told")
    if kind == "mlp":
        return run(MLP(HIDDEN, **options), dim, "not told")
    return run(PositionEmbedding(SEQ, HIDDEN, **options), dim, kind)


def test_each_layer_on_shards_equals_the_whole(ranks):
    cases = [(kind,) for kind in ("attention", "mlp", "whole", "documents")]
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


def foreign(mesh, dim: int, parallel: bool, recompute: str) -> Results:
    module = make_block("gelu-layernorm", mesh, recompute=recompute)
    torch.manual_seed(1)
    module.self_attn = ParallelAttention(module.tp) if parallel else theirs.Attention().double()
    return run(module, dim, "whole")


def test_an_attention_of_other_people(ranks):
    assert_same_on_ranks(ranks, (2,), 1, foreign, list(product((True, False), RECOMPUTE)))

"""Between forward and backward each operation keeps exactly what its docstring lists."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tpformer import ops
from tpformer.kernels.rope.reference import rope_table
from tpformer.planner.storages import Saved

TOKENS, K, N = 12, 10, 6


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def linears() -> None:
    for operation, sequence_parallel in itertools.product((column, row), (True, False)):
        operation(sequence_parallel)


def column(sequence_parallel: bool) -> None:
    t = dist.get_world_size()
    rows = TOKENS // t if sequence_parallel else TOKENS
    weights, norm_weight, norm_bias = [rand(N, K), rand(N, K)], rand(K), rand(K)
    for kind, statistics in (("layernorm", 2), ("rmsnorm", 1), (None, 0)):
        x = rand(rows, K)
        norm = ops.Norm(kind, norm_weight, norm_bias if kind == "layernorm" else None, 1e-5) if kind else None
        with Saved(*weights, norm_weight, norm_bias).recording() as saved:
            ops.column_linear(x, weights, norm=norm, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        # x before the norm, and the statistics; but no normed rows, gathered rows or output
        sizes = saved.sizes()
        assert sizes.pop(x.untyped_storage()) == 4 * rows * K
        assert sorted(sizes.values()) == [4 * rows] * statistics, kind


def row(sequence_parallel: bool) -> None:
    t = dist.get_world_size()
    rows = TOKENS // t if sequence_parallel else TOKENS
    weight, bias, residual = rand(N, K), rand(N), rand(rows, N)
    site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, N, slice(0, rows)), 1, 0.5)
    for activation, gated in ((None, False), ("gelu_tanh", False), ("silu", True)):
        x, gate = rand(TOKENS, K), rand(TOKENS, K) if gated else None
        with Saved(weight, bias).recording() as saved:
            how = {"residual": residual, "dropout": site, "sequence_parallel": sequence_parallel}
            ops.row_linear(x, weight, bias, activation=activation, gate=gate, group=dist.group.WORLD, **how)
        # the pre-activation and the gate; but no activation output, mask or residual
        expected = {x.untyped_storage(): 4 * TOKENS * K} | ({gate.untyped_storage(): 4 * TOKENS * K} if gated else {})
        assert saved.sizes() == expected, activation


@pytest.mark.parametrize("t", [1, 2])
def test_linears_save_what_they_list(ranks, t):
    ranks(t).run(linears)


def test_dropout_and_rope_save_nothing():
    site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, K, slice(0, TOKENS)), 1, 0.5)
    with Saved().recording() as saved:
        ops.dropout(rand(TOKENS, K), site)
    assert saved.total() == 0
    cos, sin = rope_table(TOKENS, 4, 10000.0, torch.float32, "cpu")
    positions = torch.arange(TOKENS)
    with Saved().recording() as saved:
        ops.rope(rand(TOKENS, 2, 4), rand(TOKENS, 1, 4), (cos, sin), positions)
    assert saved.total() == 0


def test_norm_saves_its_input_and_statistics():
    x, weight, bias = rand(TOKENS, K), rand(K), rand(K)
    with Saved(weight, bias).recording() as saved:
        ops.norm(x, ops.Norm("layernorm", weight, bias, 1e-5))
    sizes = saved.sizes()
    assert sizes.pop(x.untyped_storage()) == 4 * TOKENS * K
    assert list(sizes.values()) == [4 * TOKENS] * 2


def test_cross_entropy_saves_the_logits_and_two_numbers_a_token():
    logits, targets = rand(TOKENS, 20), torch.arange(TOKENS)
    with Saved().recording() as saved:
        ops.vocab_parallel_cross_entropy(logits, targets, ops.VocabSlice(0, 20, 20))
    sizes = saved.sizes()
    assert sizes[logits.untyped_storage()] == 4 * TOKENS * 20 and sizes[targets.untyped_storage()] == 8 * TOKENS
    assert sorted(sizes.values()) == [2 * 4 * TOKENS, 8 * TOKENS, 4 * TOKENS * 20]


def test_fused_cross_entropy_saves_gradients_only():
    x, weight, targets = rand(TOKENS, K), rand(200, K), torch.arange(TOKENS)
    with Saved(weight).recording() as saved:
        ops.linear_cross_entropy(x, weight, targets, ops.VocabSlice(0, 200, 200), chunk_tokens=4)
    # the gradients of x and of W; but not x itself, nor anything of tokens x vocabulary elements
    sizes = saved.sizes()
    assert x.untyped_storage() not in sizes
    assert sorted(sizes.values()) == [4 * TOKENS * K, 4 * 200 * K]

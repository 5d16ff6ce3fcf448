"""Between forward and backward each operation keeps exactly what its docstring lists."""

import pytest
import torch
import torch.distributed as dist
from testing import record_saved

from tpformer import ops
from tpformer.kernels.rope.reference import rope_table

TOKENS, K, N = 12, 10, 6


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def column(sequence_parallel: bool) -> None:
    t = dist.get_world_size()
    rows = TOKENS // t if sequence_parallel else TOKENS
    weights, norm_weight, norm_bias = [rand(N, K), rand(N, K)], rand(K), rand(K)
    for kind, statistics in (("layernorm", 2), ("rmsnorm", 1), (None, 0)):
        x = rand(rows, K)
        norm = ops.Norm(kind, norm_weight, norm_bias if kind == "layernorm" else None, 1e-5) if kind else None
        with record_saved(*weights, norm_weight, norm_bias) as saved:
            ops.column_linear(x, weights, norm=norm, group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        # x before the norm, and the statistics; but no normed rows, gathered rows or output
        assert saved.pop(address(x)) == 4 * rows * K
        assert sorted(saved.values()) == [4 * rows] * statistics, kind


def row(sequence_parallel: bool) -> None:
    t = dist.get_world_size()
    rows = TOKENS // t if sequence_parallel else TOKENS
    weight, bias, residual = rand(N, K), rand(N), rand(rows, N)
    site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, N, slice(0, rows)), 1, 0.5)
    for activation, gated in ((None, False), ("gelu_tanh", False), ("silu", True)):
        x, gate = rand(TOKENS, K), rand(TOKENS, K) if gated else None
        with record_saved(weight, bias) as saved:
            ops.row_linear(
                x,
                weight,
                bias,
                activation=activation,
                gate=gate,
                residual=residual,
                dropout=site,
                group=dist.group.WORLD,
                sequence_parallel=sequence_parallel,
            )
        # the pre-activation and the gate; but no activation output, mask or residual
        expected = {address(x): 4 * TOKENS * K} | ({address(gate): 4 * TOKENS * K} if gated else {})
        assert saved == expected, activation


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("operation", [column, row])
def test_linears_save_what_they_list(ranks, t, sequence_parallel, operation):
    ranks(t).run(operation, sequence_parallel)


def test_dropout_and_rope_save_nothing():
    site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, K, slice(0, TOKENS)), 1, 0.5)
    with record_saved() as saved:
        ops.dropout(rand(TOKENS, K), site)
    assert saved == {}
    cos, sin = rope_table(TOKENS, 4, 10000.0, torch.float32, "cpu")
    positions = torch.arange(TOKENS)
    with record_saved() as saved:
        ops.rope(rand(TOKENS, 2, 4), rand(TOKENS, 1, 4), (cos, sin), positions)
    assert saved == {}


def test_norm_saves_its_input_and_statistics():
    x, weight, bias = rand(TOKENS, K), rand(K), rand(K)
    with record_saved(weight, bias) as saved:
        ops.norm(x, ops.Norm("layernorm", weight, bias, 1e-5))
    assert saved.pop(address(x)) == 4 * TOKENS * K
    assert list(saved.values()) == [4 * TOKENS] * 2


def test_cross_entropy_saves_the_logits_and_two_numbers_a_token():
    logits, targets = rand(TOKENS, 20), torch.arange(TOKENS)
    with record_saved() as saved:
        ops.vocab_parallel_cross_entropy(logits, targets, ops.VocabSlice(0, 20, 20))
    assert saved == {address(logits): 4 * TOKENS * 20, address(targets): 8 * TOKENS} | saved
    assert sorted(saved.values()) == [2 * 4 * TOKENS, 8 * TOKENS, 4 * TOKENS * 20]


def test_fused_cross_entropy_saves_gradients_only():
    x, weight, targets = rand(TOKENS, K), rand(200, K), torch.arange(TOKENS)
    with record_saved(weight) as saved:
        ops.linear_cross_entropy(x, weight, targets, ops.VocabSlice(0, 200, 200), chunk_tokens=4)
    # the gradients of x and of W; but not x itself, nor anything of tokens x vocabulary elements
    assert address(x) not in saved
    assert sorted(saved.values()) == [4 * TOKENS * K, 4 * 200 * K]

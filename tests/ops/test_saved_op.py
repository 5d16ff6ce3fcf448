"""Between forward and backward each operation keeps exactly what its docstring lists."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from testing import on_every_rank
from torch import Tensor

from tpformer import ops
from tpformer.kernels.rope.reference import rope_table
from tpformer.planner.storages import Saved

TOKENS, K, N = 12, 10, 6


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def saved_by(operation: Callable[..., object], *parameters: Tensor, **owned: Tensor) -> dict[str, int | list[int]]:
    """The bytes of what is kept, but for the parameters: of the tensors `owned` by name, of others in order."""
    with Saved(*parameters).recording() as saved:
        operation()
    sizes = saved.sizes()
    named = {name: sizes.pop(x.untyped_storage()) for name, x in owned.items() if x.untyped_storage() in sizes}
    return named | {"others": sorted(sizes.values())}


@on_every_rank(1, 2)
def test_linears_save_what_they_list() -> None:
    t, group = dist.get_world_size(), dist.group.WORLD
    weights, bias = [rand(N, K), rand(N, K)], rand(N)
    norm_weight, norm_bias = rand(K), rand(K)
    for sequence_parallel in (True, False):
        rows = TOKENS // t if sequence_parallel else TOKENS
        how = {"group": group, "sequence_parallel": sequence_parallel}
        for kind, statistics in (("layernorm", 2), ("rmsnorm", 1), (None, 0)):
            x = rand(rows, K)
            norm = ops.Norm(kind, norm_weight, norm_bias if kind == "layernorm" else None, 1e-5) if kind else None
            column = partial(ops.column_linear, x, weights, norm=norm, **how)
            # x before the norm, and the statistics; but no normed rows, gathered rows or output
            found = saved_by(column, *weights, norm_weight, norm_bias, x=x)
            assert found == {"x": 4 * rows * K, "others": [4 * rows] * statistics}, kind
        site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, N, slice(0, rows)), 1, 0.5)
        for activation, gated in ((None, False), ("gelu_tanh", False), ("silu", True)):
            given = {"x": rand(TOKENS, K)} | ({"gate": rand(TOKENS, K)} if gated else {})
            row = partial(ops.row_linear, **given, weight=weights[0], bias=bias, residual=rand(rows, N), dropout=site)
            # the pre-activation and the gate; but no activation output, mask or residual
            found = saved_by(partial(row, activation=activation, **how), weights[0], bias, **given)
            assert found == dict.fromkeys(given, 4 * TOKENS * K) | {"others": []}, activation


def test_what_other_operations_save():
    site = ops.Dropout(ops.dropout_starts(torch.arange(3), 4, K, slice(0, TOKENS)), 1, 0.5)
    x, weight, bias, targets = rand(TOKENS, K), rand(K), rand(K), torch.arange(TOKENS)
    nothing = {"others": []}
    assert saved_by(lambda: ops.dropout(x, site), x=x) == nothing
    table = rope_table(TOKENS, 4, 10000.0, torch.float32, "cpu")
    assert saved_by(lambda: ops.rope(rand(TOKENS, 2, 4), rand(TOKENS, 1, 4), table, targets)) == nothing
    norm = ops.Norm("layernorm", weight, bias, 1e-5)
    found = saved_by(lambda: ops.norm(x, norm), weight, bias, x=x)
    assert found == {"x": 4 * TOKENS * K, "others": [4 * TOKENS] * 2}
    logits, vocab = rand(TOKENS, 20), ops.VocabSlice(0, 20, 20)
    found = saved_by(lambda: ops.vocab_parallel_cross_entropy(logits, targets, vocab), logits=logits, targets=targets)
    assert found == {"logits": 4 * TOKENS * 20, "targets": 8 * TOKENS, "others": [2 * 4 * TOKENS]}
    table, vocab = rand(200, K), ops.VocabSlice(0, 200, 200)
    fused = partial(ops.linear_cross_entropy, x, table, targets, vocab, chunk_tokens=4)
    # the gradients of x and of W; but not x itself, nor anything of tokens x vocabulary elements
    assert saved_by(fused, table, x=x) == {"others": [4 * TOKENS * K, 4 * 200 * K]}

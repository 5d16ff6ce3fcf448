"""SelfAttention with norms and key projections of other people sums the gradients of shared key-value heads, and
rotates by each token's position. test_block_layer.py has heads of every kind."""

import pytest
import theirs
import torch
from steps import Results, assert_ranks_have, draw, each_case, own, step
from testing import assert_same
from torch import Tensor

from tpformer import ops
from tpformer.layers import ColumnParallelLinear, Positions, RMSNorm, SelfAttention, TensorParallel, init_weights

BATCH, SEQ, D = 2, 5, 4


def build(heads: int, kv_heads: int, tp=None, **options) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(heads * D, heads, n_kv_heads=kv_heads, tp=tp, dtype=torch.float64, **options)


def inputs(heads: int) -> list[Tensor]:
    return draw(*[(BATCH, SEQ, heads * D)] * 2)


def normed(heads: int, kv_heads: int, tp=None) -> SelfAttention:
    layer = build(heads, kv_heads, tp, qk_norm=True)
    for name in ("q_norm.weight", "k_norm.weight"):
        torch.nn.init.constant_(layer.get_parameter(name), 1.5)
    return layer


def foreign_norms(mesh, heads: int, kv_heads: int, sequence_parallel: bool) -> Results:
    """Gradients with norms of torch.nn, which every rank runs for all heads; and what refuses a norm of rows."""
    tp, dim = TensorParallel(mesh, sequence_parallel), 0 if sequence_parallel else None
    layer = normed(heads, kv_heads, tp)
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, norm := torch.nn.RMSNorm(D, eps=1e-5, dtype=torch.float64))
        torch.nn.init.constant_(norm.weight, 1.5)
    x, dy = (own(z, dim) for z in inputs(heads))
    found = step(layer, x, dy, positions=Positions(BATCH, SEQ))
    layer.k_norm = RMSNorm(D, tp=tp, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"RMSNorm norms one rank's heads of {mesh.size()}: build it with of_heads=Tr"):
        layer(x, positions=Positions(BATCH, SEQ))
    return found


# every rank has its own key heads, or the one key head, or one rank has two that others have, too
NORMED = {2: [(4, 2, True), (4, 1, True), (4, 1, False)], 3: [(6, 2, False)]}


@pytest.mark.parametrize("t", NORMED)
def test_norms_of_torch_see_every_head_once(ranks, t):
    for (heads, kv_heads, sharded), found in each_case(ranks, t, foreign_norms, NORMED[t]):
        wanted = step(normed(heads, kv_heads), *inputs(heads))
        assert_ranks_have(found, wanted, 0 if sharded else None, f"{heads} heads, {kv_heads} of keys, {sharded=}")


@pytest.mark.parametrize("interleaved", [False, True])
def test_offset_is_the_position_of_the_first_token(monkeypatch, interleaved):
    """The queries and keys that attend show it. The result does not: scores depend on distances alone."""
    seen = []
    attend = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, *rest: seen.append((q, k)) or attend(q, k, *rest))
    layer = build(4, 2, rope_base=50.0, rope_interleaved=interleaved)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    results = [layer(x, positions=Positions(1, 4, offset=offset)) for offset in (0, 3)]
    assert_same(*results)
    for actual, project in zip(seen[1], (layer.q_proj, layer.k_proj), strict=True):
        heads = project(x[0]).view(1, 4, -1, D).transpose(1, 2)
        assert_same(actual, theirs.rotate(heads, 50.0, interleaved, offset=3).transpose(1, 2))


def key_gradients(mesh, gathered: bool) -> list[Tensor]:
    """Both ranks use the one key head whole, and a hook makes the projections run as modules."""
    attention = build(4, 1, mesh)
    if gathered:
        attention.k_proj = ColumnParallelLinear(16, 4, gather_output=True, tp=attention.tp, dtype=torch.float64)
    init_weights(attention, 1)
    attention.k_proj.register_forward_hook(lambda _, inputs, y: 1.5 * y)
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).sin().view(2, 4, 16).requires_grad_()
    attention(x).square().sum().backward()
    return [x.grad, *(p.grad.full_tensor() for p in attention.k_proj.parameters())]


def test_a_gathered_key_projection_has_the_same_gradients(ranks):
    (_, kept), (_, gathered) = each_case(ranks, 2, key_gradients, [(False,), (True,)])
    assert_same(gathered, kept)

"""SelfAttention refuses heads that cannot be laid out, shares key-value heads among ranks, and sums their gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from plain import attention as plain_attention
from plain import rotate
from steps import joined, step
from testing import assert_same
from torch.distributed.tensor import Replicate, Shard

from tpformer import ops
from tpformer.config import check_heads
from tpformer.distributed import build_mesh
from tpformer.layers import (
    ColumnParallelLinear,
    Positions,
    RMSNorm,
    SelfAttention,
    TensorParallel,
    TransformerBlock,
    init_weights,
)
from tpformer.models import GPT, GPTConfig

BATCH, SEQ, D = 2, 5, 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((10, 4, 4, 1), "hidden_size=10 is not a multiple of n_heads=4: change either"),
        ((12, 6, 4, 1), "n_heads=6 is not a multiple of n_kv_heads=4: change either"),
        ((48, 12, 12, 5), r"n_heads=12 cannot be split over tensor_parallel=5 .*from \[1, 2, 3, 4, 6, 12\]"),
        ((12, 0, 4, 1), "n_heads=0 must be at least 1"),
        ((12, 4, -2, 1), "n_kv_heads=-2 must be at least 1"),
        ((0, 4, 4, 1), "hidden_size=0 must be at least 1"),
        ((10, 4, 4, 3), "hidden_size=10 is not a multiple of n_heads=4: change either, or give head_dim"),
        ((12, 4, 4, 1), "RoPE needs an even head dim, not hidden_size / n_heads = 3"),
    ],
)
def test_heads_that_cannot_be_laid_out_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_heads(*arguments, rope=True)


def test_no_key_value_heads_are_refused():
    with pytest.raises(ValueError, match="n_kv_heads=0 must be at least 1"):
        TransformerBlock(8, 2, n_kv_heads=0)


# (heads, key-value heads, ranks). Ranks divide the key-value heads, or outnumber them, or share some: of 12 heads in 4
# groups on 3 ranks, rank 0 has the 3 queries of group 0 and 1 of group 1
CASES = [(4, 2, 2), (4, 1, 2), (4, 1, 4), (8, 2, 4), (6, 2, 3), (12, 4, 3), (12, 2, 3)]


def build(heads: int, kv_heads: int, mesh=None) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(heads * D, heads, n_kv_heads=kv_heads, tp=mesh, dtype=torch.float64)


def inputs(hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(BATCH, SEQ, hidden, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, dy


def on_rank(heads: int, kv_heads: int):
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())["tp"]
    layer = build(heads, kv_heads, mesh)
    x, dy = inputs(heads * D)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    placement = layer.k_proj.weight.placements[0]
    grad = layer.k_proj.weight.grad.to_local()
    used = grad.view(-1, D, heads * D).abs().amax((1, 2)) > 0 if placement.is_replicate() else None
    return y.detach(), x.grad, {n: p.grad.full_tensor() for n, p in layer.named_parameters()}, placement, used


@pytest.mark.parametrize("heads, kv_heads, t", CASES)
def test_equals_plain_attention(ranks, heads, kv_heads, t):
    p = {name: p.detach().clone().requires_grad_() for name, p in build(heads, kv_heads).named_parameters()}
    x, dy = inputs(heads * D)
    x.requires_grad_()
    y = plain_attention(x, p, heads, kv_heads, None)
    y.backward(dy)
    expected = {name: tensor.grad for name, tensor in p.items()}
    for rank, (actual, dx, gradients, placement, used) in enumerate(ranks(t).run(on_rank, heads, kv_heads)):
        assert_same([actual, dx, gradients], [y, x.grad, expected], f"rank {rank}")
        assert placement == (Shard(0) if kv_heads % t == 0 else Replicate())
        if used is not None:  # this rank's gradient has only the heads its own queries attend with
            queries = range(rank * heads // t, (rank + 1) * heads // t)
            wanted = {query // (heads // kv_heads) for query in queries}
            assert set(used.nonzero()[:, 0].tolist()) == wanted


def foreign_norms(heads: int, kv_heads: int, sequence_parallel: bool):
    """Gradients with norms of torch.nn, which every rank runs for all heads; and what refuses a norm of rows."""
    t, rank = dist.get_world_size(), dist.get_rank()
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=t)["tp"], sequence_parallel)
    layer = normed(heads, kv_heads, tp)
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, theirs := torch.nn.RMSNorm(D, eps=1e-5, dtype=torch.float64))
        torch.nn.init.constant_(theirs.weight, 1.5)
    x, dy = (z.flatten(0, 1) for z in inputs(heads * D))
    if sequence_parallel:
        x, dy = (z.chunk(t)[rank].clone() for z in (x, dy))
    found = step(layer, x, dy, positions=Positions(BATCH, SEQ))
    layer.k_norm = RMSNorm(D, tp=tp, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"RMSNorm norms one rank's heads of {t}: build it with of_heads=True"):
        layer(x, positions=Positions(BATCH, SEQ))
    return found


def normed(heads: int, kv_heads: int, tp=None) -> SelfAttention:
    torch.manual_seed(0)
    layer = SelfAttention(heads * D, heads, n_kv_heads=kv_heads, qk_norm=True, tp=tp, dtype=torch.float64)
    for name in ("q_norm.weight", "k_norm.weight"):
        torch.nn.init.constant_(layer.get_parameter(name), 1.5)
    return layer


# every rank has its own key heads, or the one key head, or one rank has two that others have, too
@pytest.mark.parametrize(
    ("heads", "kv_heads", "t", "sequence_parallel"),
    [(4, 2, 2, True), (4, 1, 2, True), (4, 1, 2, False), (6, 2, 3, False)],
)
def test_norms_of_torch_see_every_head_once(ranks, heads, kv_heads, t, sequence_parallel):
    expected = step(
        normed(heads, kv_heads), *(z.flatten(0, 1) for z in inputs(heads * D)), positions=Positions(BATCH, SEQ)
    )
    found = ranks(t).run(foreign_norms, heads, kv_heads, sequence_parallel)
    for each in joined(found, 0) if sequence_parallel else found:
        assert_same(each, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_offset_is_the_position_of_the_first_token(monkeypatch, interleaved):
    """The queries and keys that attend show it. The result does not: scores depend on distances alone."""
    seen = []
    attend = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, *rest: seen.append((q, k)) or attend(q, k, *rest))
    layer = SelfAttention(16, 4, n_kv_heads=2, rope_base=50.0, rope_interleaved=interleaved, dtype=torch.float64)
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    results = [layer(x, positions=Positions(1, 4, offset=offset)) for offset in (0, 3)]
    assert_same(*results)
    for actual, project in zip(seen[1], (layer.q_proj, layer.k_proj), strict=True):
        heads = project(x[0]).view(1, 4, -1, D).transpose(1, 2)
        expected = rotate(heads, 50.0, interleaved, offset=3)
        assert_same(actual, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "shape, batch, seq",
    [((2, 8), 4, 4), ((4, 2), 2, 4), ((1, 8), 2, 4), ((7,), 2, 4), ((4, 4), 1, 8), ((2, 2, 3), 2, 4), ((), 2, 4)],
)
@pytest.mark.parametrize("build_layer", [SelfAttention, TransformerBlock])
def test_x_of_other_tokens_than_the_positions_is_refused(build_layer, shape, batch, seq):
    message = rf"has {math.prod(shape)} rows that are not those of Positions\(batch={batch}, seq_length={seq}\): give"
    with pytest.raises(ValueError, match=message):
        build_layer(8, 2)(torch.zeros(*shape, 8), positions=Positions(batch, seq))


def other_tokens_on_a_rank():
    layer = SelfAttention(8, 2, tp=TensorParallel(build_mesh("cpu", tensor_parallel=2)["tp"], True))
    with pytest.raises(ValueError, match=r"has 8 rows .*give .*\(8 / 2, hidden\).* to each of 2 tensor-parallel ranks"):
        layer(torch.zeros(8, 8), positions=Positions(2, 4))


def test_x_of_other_tokens_is_refused_on_two_ranks(ranks):
    ranks(2).run(other_tokens_on_a_rank)


def test_position_ids_of_another_shape_are_refused():
    message = r"position ids of shape \(2, 3\) are not \(batch, seq_length\) = \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        GPT(GPTConfig(vocab_size=9, seq_length=4, n_layers=1, hidden_size=8, n_heads=2))(
            torch.zeros(2, 4, dtype=torch.int64), position_ids=torch.arange(3).repeat(2, 1)
        )


def key_gradients(gathered: bool) -> list[torch.Tensor]:
    """Both ranks use the one key head whole, and a hook makes the projections run as modules."""
    tp = TensorParallel(build_mesh("cpu", tensor_parallel=2)["tp"])
    attention = SelfAttention(16, 4, n_kv_heads=1, tp=tp, dtype=torch.float64)
    if gathered:
        attention.k_proj = ColumnParallelLinear(16, 4, gather_output=True, tp=tp, dtype=torch.float64)
    init_weights(attention, 1)
    attention.k_proj.register_forward_hook(lambda _, inputs, y: 1.5 * y)
    x = torch.linspace(-1, 1, 128, dtype=torch.float64).sin().view(2, 4, 16).requires_grad_()
    attention(x).square().sum().backward()
    return [x.grad, *(p.grad.full_tensor() for p in attention.k_proj.parameters())]


def test_a_gathered_key_projection_has_the_same_gradients(ranks):
    for kept, gathered in zip(*(ranks(2).run(key_gradients, gathered) for gathered in (False, True)), strict=True):
        assert_same(gathered, kept)

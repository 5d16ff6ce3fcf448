"""TransformerBlock equals a plain PyTorch block in float64 with every gradient, on one rank and on several. It runs the
collectives that are promised, and its dropout follows its key."""

from itertools import product

import pytest
import torch
from plain import block as plain_block
from steps import Results, assert_ranks_have, each_case, gradients, own, step
from testing import assert_same
from torch.distributed.tensor import DTensor

from tpformer.distributed import record_collectives
from tpformer.layers import DropoutKey, RopeScaling, TensorParallel, TransformerBlock

BATCH, SEQ, HIDDEN, HEADS = 2, 6, 24, 6
KINDS = {
    "gelu-layernorm": {},
    "gelu-erf": {"activation": "gelu"},
    "swiglu-rmsnorm-rope-gqa": {
        "activation": "swiglu",
        "norm": "rmsnorm",
        "rope_base": 10000.0,
        "n_kv_heads": 3,
        "bias": False,
        "ffn_hidden_size": 36,
    },
    "geglu": {"activation": "geglu", "ffn_hidden_size": 36},
    # with 2 or 3 ranks every rank holds the one key-value head
    "mqa": {"n_kv_heads": 1, "rope_base": 500.0},
    # with 3 ranks every rank holds both key-value heads and uses one or two of them
    "qk-norm-head-dim-scaling": {
        "qk_norm": True,
        "head_dim": 6,
        "n_kv_heads": 2,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "ffn_hidden_size": 36,
        "rope_base": 100.0,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32),  # one frequency stays, one is between, one is divided
        "bias": False,
    },
    "qkv-bias-qk-norm-mqa": {"qk_norm": True, "n_kv_heads": 1, "bias": False, "qkv_bias": True, "rope_base": 500.0},
    "no-qkv-bias": {"qkv_bias": False, "head_dim": 2},
    "relu2-rope-interleaved": {"activation": "relu2", "rope_base": 500.0, "rope_interleaved": True},
}


def make_block(kind: str, mesh=None, sequence_parallel: bool = True, **options) -> TransformerBlock:
    """A block whose weights follow from one seed. Norms and biases are moved off 1 and 0, so that every term shows."""
    torch.manual_seed(0)
    options = {**KINDS[kind], "dtype": torch.float64} | options
    block = TransformerBlock(HIDDEN, HEADS, tp=TensorParallel(mesh, sequence_parallel), **options)
    with torch.no_grad():
        for name, p in block.named_parameters():
            if p.ndim == 1:
                generator = torch.Generator().manual_seed(len(name) + p.shape[0])
                value = 1 + 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
                local = p.to_local() if isinstance(p, DTensor) else p
                sharded = isinstance(p, DTensor) and p.placements[0].is_shard()
                local.copy_(value.chunk(mesh.size())[mesh.get_local_rank()] if sharded else value)
    return block


def inputs(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, dy


def by_plain_block(kind: str, block: TransformerBlock, x: torch.Tensor, dy: torch.Tensor, **options) -> Results:
    """Result and gradients of the plain block with the values of ours."""
    p = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    named = ("n_kv_heads", "activation", "rope_base", "rope_interleaved", "rope_scaling")
    options |= {key: value for key, value in KINDS[kind].items() if key in named}
    x = x.detach().clone().requires_grad_()
    y = plain_block(x, p, HEADS, norm_kind=KINDS[kind].get("norm", "layernorm"), **options)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: tensor.grad for name, tensor in p.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_block(kind):
    block = make_block(kind)
    assert_same(step(block, *inputs()), by_plain_block(kind, block, *inputs()))


def on_rank(mesh, kind: str, sequence_parallel: bool) -> tuple[Results, list, list]:
    """Results, and the collectives of the forward and of the backward."""
    block = make_block(kind, mesh, sequence_parallel)
    x, dy = (own(z, 1 if sequence_parallel else None) for z in inputs())
    x.requires_grad_()
    with record_collectives() as forward:
        y = block(x)
    with record_collectives() as backward:
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | gradients(block), list(forward), list(backward)


@pytest.mark.parametrize("t", [2, 3])
def test_tensor_parallel_equals_plain_block(ranks, t):
    nbytes = BATCH * SEQ * HIDDEN * 8
    for (kind, sequence_parallel), by_rank in each_case(ranks, t, on_rank, product(KINDS, (True, False))):
        what = f"{kind} on {t} {sequence_parallel=}"
        wanted = by_plain_block(kind, make_block(kind), *inputs())
        assert_ranks_have([result for result, *_ in by_rank], wanted, 1 if sequence_parallel else None, what)
        call = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
        # column inputs are gathered once more, for the weight gradients
        extra = [("all_gather", nbytes)] * 2 if sequence_parallel else []
        for _, forward, backward in by_rank:
            assert forward == [(name, nbytes) for name in call] * 2, what
            assert sorted(backward) == sorted([(name, nbytes) for name in call] * 2 + extra), what


def test_dropout_is_by_its_key_and_in_training_only():
    x, _ = inputs()
    block, without = make_block("gelu-layernorm", dropout=0.5), make_block("gelu-layernorm")
    key = DropoutKey(0, 1, torch.arange(BATCH), block)
    one, again = (block(x, dropout_key=key) for _ in range(2))
    assert torch.equal(one, again) and not torch.equal(one, without(x))
    assert not torch.equal(one, block(x, dropout_key=DropoutKey(0, 2, torch.arange(BATCH), block)))
    assert torch.equal(block.eval()(x), without(x))

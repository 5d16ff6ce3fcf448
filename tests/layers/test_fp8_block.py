"""In FP8 the backward of a block's second norm hands o_proj the blocks of its gradient, which nobody else sees. Where
somebody might see it, or a pass reads it anyhow, none are handed on. Gradients are always those of blocks made anew."""

from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from testing import assert_identical, on_every_rank
from torch import Tensor
from turns import in_turns

from tpformer.distributed import build_mesh
from tpformer.layers import DropoutKey, TensorParallel, TransformerBlock, init_weights, keep, transformer_block
from tpformer.ops.transports import quantized
from tpformer.parallel import local_part

HIDDEN, BATCH, SEQ = 128, 2, 4
EXPERTS: dict[str, Any] = {"n_experts": 4, "ffn_hidden_size": 128}


def make(sequence_parallel: bool = True, **options: Any) -> TransformerBlock:
    """A block of which no activation is as wide as its rows."""
    mesh = build_mesh("cpu", tensor_parallel=dist.get_world_size())
    tp = TensorParallel(mesh["tp"], sequence_parallel=sequence_parallel, precision="fp8")
    sizes: dict[str, Any] = {"head_dim": 256, "ffn_hidden_size": 512, "activation": "swiglu", "norm": "rmsnorm"}
    part = transformer_block(HIDDEN, 2, **{**sizes, "bias": False, **options}, tp=tp, dtype=torch.float64)
    init_weights(part, seed=0)
    return part


def gradients(part: TransformerBlock) -> list[Tensor]:
    """Those of the block's input and parameters."""
    shards = part.tp.size if part.tp.sequence_parallel else 1
    generator = torch.Generator().manual_seed(dist.get_rank() if shards > 1 else 0)
    x = torch.randn(BATCH, SEQ // shards, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    given = {"dropout_key": DropoutKey(0, 0, torch.arange(BATCH), part)} if part.dropout else {}
    inputs = [x, *part.parameters()]
    return [local_part(each) for each in torch.autograd.grad(part(x, **given).square().sum(), inputs)]


def handed(part: TransformerBlock) -> int:
    """How often a linear took the blocks beside a gradient as wide as the block's rows, whose gradients have to be
    those of blocks made anew."""
    taken, beside = [], quantized._beside

    def count(x: Tensor) -> Any:
        if (blocks := beside(x)) is not None:
            taken.append(x.shape[1])
        return blocks

    with mock.patch.object(quantized, "_beside", count):
        found = gradients(part)
    with mock.patch.object(quantized, "_beside", lambda _: None):
        assert_identical(found, gradients(part))
    return taken.count(HIDDEN)


@on_every_rank(2, *in_turns([1]))
def test_o_proj_takes_blocks_of_the_next_norms_gradient_unless_a_pass_makes_them() -> None:
    """A pass for dropout or for a bias does."""
    shared = {**EXPERTS, "shared_ffn_size": 512}
    for options in ({}, {"norm": "layernorm"}, {"sequence_parallel": False}, {"moe": EXPERTS}, {"moe": shared}):
        assert handed(make(**options)) == 1, options
    for recompute in ("mlp", "full"):
        assert handed(keep(make(), recompute=recompute)) == 1, recompute
    for options in ({"bias": True}, {"dropout": 0.4}):
        assert handed(make(**options)) == 0, options


def written(module: Any, inputs: Any, y: Tensor) -> None:
    """A forward hook after which a gradient is written, and autograd does not count it."""

    def write(dy: Tensor) -> None:
        dy.data.mul_(3).sub_(dy.mean())

    y.register_hook(write)


@on_every_rank(2, *in_turns([1]))
def test_gradients_that_others_see_have_no_blocks() -> None:
    """The second norm's gradient is o_proj's and the residual's alone if neither the attention nor what reads it is
    called."""
    for name, expected in {
        "": 1, "input_layernorm": 1, "self_attn.q_proj": 1, "mlp.down_proj": 1,
        "self_attn": 0, "self_attn.o_proj": 0, "post_attention_layernorm": 0, "mlp": 0, "mlp.up_proj": 0,
    }.items():  # fmt: skip
        part = make()
        part.get_submodule(name).register_forward_hook(written)
        assert handed(part) == expected, name


class Shown(TransformerBlock):
    """A block that shows what its attention makes."""

    def add_attention(self, *given: Any, **options: Any) -> Any:
        x, normed = super().add_attention(*given, **options)
        written(self, None, x)
        return x, normed


class Taken(TransformerBlock):
    """A block that shows what its MLP takes."""

    def add_mlp(self, x: Tensor, *given: Any, **options: Any) -> Any:
        written(self, None, x)
        return super().add_mlp(x, *given, **options)


@on_every_rank(2, *in_turns([1]))
def test_a_block_with_a_half_of_its_own_hands_nothing_on() -> None:
    part = make()
    parts = part.self_attn, part.mlp, part.input_layernorm, part.post_attention_layernorm
    for kind, recompute in product((Shown, Taken), ("none", "mlp", "full")):
        assert handed(keep(kind(*parts), recompute=recompute)) == 0, (kind, recompute)
    for kind, name in ((Shown, "add_attention"), (Taken, "add_mlp")):
        block = TransformerBlock(*parts)
        setattr(block, name, getattr(kind(*parts), name))
        assert handed(block) == 0, f"{name} replaced"

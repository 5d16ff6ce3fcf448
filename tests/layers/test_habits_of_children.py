"""Hooks, wrappers, adapters and the like do to the children of a block what they do to those of a torch.nn block. Every
gradient is compared in float64, on one rank and on two."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import theirs
import torch
from habits import ON_LINEARS, fill, lora
from steps import Results, assert_ranks_have, each_case, own, step, tp_mesh
from testing import assert_same
from theirs import ANYWHERE, FFN, HEADS, HIDDEN
from torch import nn

from tpformer.config import RECOMPUTE
from tpformer.layers import LayerNorm, Positions, RMSNorm, TensorParallel, TransformerBlock, explain

BATCH, SEQ = 2, 6
NORMS = ("layernorm", "rmsnorm")
OPTIONS: dict[str, dict] = {
    "layernorm": {"ffn_hidden_size": FFN},
    "rmsnorm": {"ffn_hidden_size": FFN, "norm": "rmsnorm", "activation": "swiglu", "qk_norm": True},
}
CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
OF_HEADS = {"layernorm": (), "rmsnorm": ("self_attn.q_norm", "self_attn.k_norm")}
LINEARS = {
    "layernorm": ("self_attn.q_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2"),
    "rmsnorm": ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def places(habit: str, norm: str) -> tuple[str, ...]:
    """The children that a habit is for."""
    row = ("o_proj", "fc2", "down_proj")
    some = dict.fromkeys(ON_LINEARS, LINEARS[norm]) | {
        "norm without weight": CHILDREN[::2],
        "output gathered": tuple(path for path in LINEARS[norm] if not path.endswith(row)),
    }
    return some.get(habit, (*CHILDREN, *OF_HEADS[norm], *LINEARS[norm]))


def ours(norm: str, tp: TensorParallel | None = None, recompute: str = "none") -> TransformerBlock:
    """A block with the values of theirs.Block."""
    block = TransformerBlock(HIDDEN, HEADS, tp=tp, recompute=recompute, dtype=torch.float64, **OPTIONS[norm])
    fill(block, theirs.Block(**OPTIONS[norm]).state_dict())
    return block


def run(block: nn.Module, dim: int | None = None, **options) -> Results:
    """Return result and gradients of the samples, or of this rank's slice along dim."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    torch.manual_seed(9)
    return step(block, own(x, dim), own(dy, dim), **options)


@cache
def by_torch(habit: Callable[[nn.Module, str], None], norm: str, path: str) -> Results:
    block = theirs.Block(**OPTIONS[norm])
    habit(block, path)
    return run(block)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("habit", [*ANYWHERE, *ON_LINEARS])
def test_habits_on_one_rank_equal_torch(habit, norm):
    """The modes of recomputation take turns, so that each meets every child and every habit."""
    edit, turn = (ANYWHERE | ON_LINEARS)[habit], [*ANYWHERE, *ON_LINEARS].index(habit)
    for place, path in enumerate(places(habit, norm)):
        recompute = RECOMPUTE[(turn + place + NORMS.index(norm)) % 3]
        block = ours(norm, recompute=recompute)
        edit(block, path)
        assert_same(run(block), by_torch(edit, norm, path), f"{habit} on {path}, recompute={recompute}")


def test_explain_names_what_is_called():
    block = ours("layernorm")
    assert "called" not in explain(block, 8)
    theirs.put(block, "self_attn.q_proj", nn.Sequential(block.self_attn.q_proj, nn.Tanh()))
    theirs.forward_hook(block, "mlp.fc2")
    theirs.replace_forward(block, "input_layernorm")
    theirs.subclass(block, "mlp")
    called = [line for line in explain(block, 8).splitlines() if " is called as a module, not fused: " in line]
    assert [(line.split()[0], line.split(": ")[1]) for line in called] == [
        ("input_layernorm", "its forward has been replaced"),
        ("mlp", "it is a Scaled"),
        ("self_attn.q_proj", "it is a Sequential"),
        ("mlp.fc2", "it has hooks"),
    ]


def put_theirs(block: nn.Module, path: str) -> None:
    """Replace a child by that of torch.nn's block, which is whole on every rank."""
    norm = "rmsnorm" if hasattr(block.mlp, "gate_proj") else "layernorm"
    theirs.put(block, path, theirs.Block(**OPTIONS[norm]).get_submodule(path))


def bare_norm(block: nn.Module, path: str) -> None:
    """Replace a norm by one without weight, of the same library; ours stays in the fused pass."""
    norm = block.get_submodule(path)
    options = {"tp": norm.tp} if isinstance(norm, LayerNorm | RMSNorm) else {}
    theirs.put(block, path, type(norm)(HIDDEN, 1e-5, elementwise_affine=False, **options))


def gathered_output(block: nn.Module, path: str) -> None:
    """A hook sees all features, and the block goes on with those of this rank."""
    block.get_submodule(path).gather_output = True
    theirs.scaling_hook(block, path)


# habits that mean the same to a shard as to the whole
SHARDED = {name: ANYWHERE[name] for name in ("forward pre-hook", "backward hook", "subclass", "forward replaced")} | {
    "forward hook": theirs.scaling_hook,
    "module of torch.nn": put_theirs,
    "LoRA": lora,
    "output gathered": gathered_output,
    "norm without weight": bare_norm,
}


def cases(norm: str) -> Iterator[tuple[str, str, str, str, bool]]:
    """(norm, habit, child, recompute, sequence_parallel): the last two take turns, so that each value meets every child
    and every habit, and the blocks of both norms together every combination of a child, a habit and sequence shards.
    Of each block's linears a habit meets every second one: of both blocks together column and row linears."""
    for turn, habit in enumerate(SHARDED):
        half = LINEARS[norm][(turn + NORMS.index(norm)) % 2 :: 2]
        for path in places(habit, norm):
            if path in LINEARS[norm] and path not in half and habit != "output gathered":
                continue
            place = (LINEARS[norm] if path in LINEARS[norm] else (*CHILDREN, *OF_HEADS[norm])).index(path)
            turns = turn + place + NORMS.index(norm)
            yield norm, habit, path, RECOMPUTE[turns % 3], turns % 2 == 0


def on_rank(mesh, norm: str, habit: str, path: str, recompute: str, sequence_parallel: bool) -> Results:
    block = ours(norm, TensorParallel(mesh, sequence_parallel), recompute)
    SHARDED[habit](block, path)
    partial = ["*.a.weight", "*.b.weight"]  # adapters see sequence shards
    return run(block, 0 if sequence_parallel else None, partial=partial, positions=Positions(BATCH, SEQ))


@pytest.mark.parametrize("norm", NORMS)
def test_habits_on_two_ranks_equal_torch(ranks, norm):
    for (_, habit, path, *options), found in each_case(ranks, 2, on_rank, cases(norm)):
        expected = by_torch(SHARDED[habit], norm, path)
        assert_ranks_have(found, expected, 0 if options[1] else None, f"{habit} on {path}, {options}")


def foreign_children() -> None:
    x, mesh = torch.zeros(BATCH, SEQ, HIDDEN, dtype=torch.float64), tp_mesh()
    drops = nn.Sequential(nn.Dropout(0.1), theirs.linear(HIDDEN, HIDDEN, 1))
    for child, words in (
        (drops, r"Sequential draws dropout \(p=0.1\) from this rank's generator, and other ranks would"),
        (theirs.linear(HIDDEN, HIDDEN // 2, 1), "Linear computes 12 features of 24: a module that is not built"),
    ):
        block = ours("layernorm", TensorParallel(mesh))
        block.self_attn.q_proj = child
        with pytest.raises(ValueError, match=words):
            block(x)


def test_foreign_children_that_ranks_would_disagree_on(ranks):
    ranks(2).run(foreign_children)


def child_on_other_ranks() -> None:
    shards, wholes = (TensorParallel(tp_mesh(), sequence_parallel) for sequence_parallel in (True, False))
    for outer, tp in ((shards, None), (shards, wholes), (wholes, None), (wholes, shards)):
        block, other = ours("layernorm", outer), ours("layernorm", tp)
        for path in (*CHILDREN, *LINEARS["layernorm"]):
            made = other.get_submodule(path)
            for child in (made,) if tp is None else (made, nn.Sequential(made)):
                with pytest.raises(ValueError, match=f"{path[-3:]}: a .* rank.* cannot be part of a .*: build it with"):
                    theirs.put(block, path, child)


def test_a_child_that_lies_on_ranks_in_another_way(ranks):
    ranks(2).run(child_on_other_ranks)

"""Hooks, wrappers, adapters and the like do to the children of a block what they do to those of a torch.nn block. Every
gradient is compared in float64, on one rank and on two."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import habits
import pytest
import theirs
import torch
from habits import ON_LINEARS, lora
from steps import Results, assert_ranks_have, draw, each_case, own, step, tp_mesh
from testing import assert_same, on_every_rank
from theirs import ANYWHERE, FFN, HEADS, HIDDEN
from torch import nn
from turns import in_turns

from tpformer.config import RECOMPUTE
from tpformer.layers import LayerNorm, Positions, RMSNorm, TensorParallel, TransformerBlock

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
    columns = tuple(path for path in LINEARS[norm] if not path.endswith(("o_proj", "fc2", "down_proj")))
    some = dict.fromkeys(ON_LINEARS, LINEARS[norm])
    some |= {"norm without weight": CHILDREN[::2], "output gathered": columns}
    return some.get(habit, (*CHILDREN, *OF_HEADS[norm], *LINEARS[norm]))


def ours(norm: str, tp: TensorParallel | None = None, recompute: str = "none") -> TransformerBlock:
    return habits.block(HEADS, OPTIONS[norm], tp, recompute=recompute)


def run(block: nn.Module, dim: int | None = None, **options) -> Results:
    """Return result and gradients of the samples, or of this rank's slice along dim."""
    x, dy = (own(z, dim) for z in draw(*[(BATCH, SEQ, HIDDEN)] * 2))
    torch.manual_seed(9)
    return step(block, x, dy, **options)


@cache
def by_torch(habit: Callable[[nn.Module, str], None], norm: str, path: str) -> Results:
    habit(block := theirs.Block(**OPTIONS[norm]), path)
    return run(block)


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


# by ranks: on two, those that mean the same to a shard as to the whole
HABITS = {
    1: ANYWHERE | ON_LINEARS,
    2: {name: ANYWHERE[name] for name in ("forward pre-hook", "backward hook", "subclass", "forward replaced")}
    | {"forward hook": theirs.scaling_hook, "module of torch.nn": put_theirs, "LoRA": lora}
    | {"output gathered": gathered_output, "norm without weight": bare_norm},
}


def cases(t: int, norm: str) -> Iterator[tuple[str, str, str, str, bool]]:
    """(norm, habit, child, recompute, sequence_parallel): the last two take turns, so that each value meets every child
    and every habit, and the blocks of both norms together every combination of a child, a habit and sequence shards.
    On two ranks a habit meets every second one of each block's linears: of both blocks together column and row
    linears."""
    for turn, habit in enumerate(HABITS[t]):
        half = LINEARS[norm][(turn + NORMS.index(norm)) % 2 :: 2]
        for path in places(habit, norm):
            if t > 1 and path in LINEARS[norm] and path not in half and habit != "output gathered":
                continue
            place = (LINEARS[norm] if path in LINEARS[norm] else (*CHILDREN, *OF_HEADS[norm])).index(path)
            turns = turn + place + NORMS.index(norm)
            yield norm, habit, path, RECOMPUTE[turns % 3], turns % 2 == 0


def on_rank(mesh, norm: str, habit: str, path: str, recompute: str, sequence_parallel: bool) -> Results:
    t = mesh.size()
    block = ours(norm, TensorParallel(mesh, sequence_parallel) if t > 1 else None, recompute)
    HABITS[t][habit](block, path)
    partial = ["*.a.weight", "*.b.weight"]  # adapters see sequence shards
    return run(block, 0 if sequence_parallel else None, partial=partial, positions=Positions(BATCH, SEQ))


@pytest.mark.parametrize("t, norm, half", [(2, "rmsnorm", slice(0, None, 2)), *in_turns([
    (2, "rmsnorm", slice(1, None, 2)), (2, "layernorm", slice(None)), *product((1,), NORMS, (slice(None),))
])])  # fmt: skip
def test_habits_equal_torch(ranks, t, norm, half):
    for (_, habit, path, *options), found in each_case(ranks, t, on_rank, [*cases(t, norm)][half]):
        expected = by_torch(HABITS[t][habit], norm, path)
        assert_ranks_have(found, expected, 0 if options[1] else None, f"{habit} on {path}, {options}")


@on_every_rank(1, 2)
def test_an_activation_of_a_row_linear_comes_after_that_of_its_layer() -> None:
    """Fused, as where a hook that changes nothing lets it be called as a module."""
    for norm in NORMS:
        for path in LINEARS[norm]:
            if not path.endswith(("o_proj", "fc2", "down_proj")):
                continue
            plain = run(ours(norm, TensorParallel(tp_mesh())))
            found = []
            for hooked in (False, True):
                block = ours(norm, TensorParallel(tp_mesh()))
                block.get_submodule(path).activation = "relu2"
                if hooked:
                    block.get_submodule(path).register_forward_hook(lambda *_: None)
                found.append(run(block))
            assert_same(found[0], found[1])
            assert not torch.equal(found[0]["y"], plain["y"])


@on_every_rank(2)
def test_a_child_that_lies_on_ranks_in_another_way() -> None:
    shards, wholes = (TensorParallel(tp_mesh(), sequence_parallel) for sequence_parallel in (True, False))
    for outer, tp in ((shards, None), (shards, wholes), (wholes, None), (wholes, shards)):
        block, other = ours("layernorm", outer), ours("layernorm", tp)
        for path in (*CHILDREN, *LINEARS["layernorm"]):
            made = other.get_submodule(path)
            for child in (made,) if tp is None else (made, nn.Sequential(made)):
                with pytest.raises(ValueError, match=f"{path[-3:]}: a .* rank.* cannot be part of a .*: build it with"):
                    theirs.put(block, path, child)
